"""What compressing gradients costs and saves: the ratio of sizes, and the time of coding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True)
class CodecCost:
    """A codec as a plan sees it: smaller messages, and some time to make them.

    An all-reduce of ``x`` bytes takes ``T(ratio x) + seconds_per_byte x``, and each phase beyond
    the first its latency once more; see :meth:`hvd_pipe.planning.comm.CommModel.compressed`.

    Args:
        name: what the codec is called.
        ratio: bytes on the wire over bytes of gradients, positive.
        seconds_per_byte: of gradients, for all encoding and decoding that they need, not negative.
        phases: messages that follow each other in an all-reduce: 2 (all-to-all, all-gather) where
            Horovod cannot sum what travels, else 1.

    Raises:
        ValueError: a ratio or a time that no codec has.

    Source: Pipe-SGD (Li et al., NeurIPS 2018) has the ratio and the time in its timing model.
    """

    name: str
    ratio: float
    seconds_per_byte: float = 0.0
    phases: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio > 0.0):
            raise ValueError(
                f"codec {self.name!r}: ratio is bytes on the wire over bytes of gradients, a "
                f"positive number (0.5 for 16 of 32 bits), got {self.ratio}"
            )
        if not (math.isfinite(self.seconds_per_byte) and self.seconds_per_byte >= 0.0):
            raise ValueError(
                f"codec {self.name!r}: seconds_per_byte must be finite and not negative, got "
                f"{self.seconds_per_byte}"
            )

        if self.phases not in (1, 2):
            raise ValueError(f"codec {self.name!r}: phases must be 1 or 2, got {self.phases}")

    def of_encoded(self) -> CodecCost:
        """The same costs, where sizes count bytes after encoding."""
        return replace(self, ratio=1.0, seconds_per_byte=self.seconds_per_byte / self.ratio)


NONE = CodecCost("none", 1.0)
"""Gradients travel as they are."""


def _in_two_phases(name: str, ratio: float, encode_s: float, decode_s: float) -> CodecCost:
    """A codec whose bytes cannot be summed: ``1 + 1/n`` encodings, two decodings (n = 4 here)."""
    return CodecCost(name, ratio, (1.25 * encode_s + 2.0 * decode_s) / _MEASURED_BYTES, phases=2)


_MEASURED_BYTES = 64 * 2**20  # float32, one CPU thread

CODECS = MappingProxyType(
    {
        codec.name: codec
        for codec in (
            NONE,
            # Horovod casts into new tensors, whose memory costs more than the cast.
            CodecCost("fp16", 0.5, 45e-3 / _MEASURED_BYTES),
            _in_two_phases("bf16", 0.5, encode_s=6.6e-3, decode_s=9.6e-3),
            # 256 values share a float32 scale: 260 bytes for 1024.
            _in_two_phases("int8", 260 / 1024, encode_s=20.9e-3, decode_s=13.3e-3),
        )
    }
)
"""The codecs of :mod:`hvd_pipe.torch.compression` for float32 gradients, by name.

Times were measured on one CPU thread (64 MiB of float32; encode, decode: bf16 6.6, 9.6 ms; int8
20.9, 13.3 ms; both, of fp16, which is Horovod's own cast: 45 ms). A GPU takes far less: use
``CodecCost(name, ratio, phases=2)`` there, or measure.
"""
