"""What compressing gradients costs and saves: the ratio of sizes, and the time of coding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["CODECS", "NONE", "CodecCost"]


@dataclass(frozen=True)
class CodecCost:
    """A codec as a plan sees it: smaller messages, and some time to make them.

    With it, an all-reduce of ``x`` bytes of gradients takes ``T(ratio x) + seconds_per_byte x``;
    see :meth:`hvd_pipe.planning.comm.CommModel.compressed`.

    Args:
        name: what the codec is called.
        ratio: bytes on the wire over bytes of gradients, positive.
        seconds_per_byte: of gradients, to encode and decode them once, not negative.

    Raises:
        ValueError: a ratio or a time that no codec has.

    Example:
        >>> CodecCost("half", ratio=0.5, seconds_per_byte=1e-10)
        CodecCost(name='half', ratio=0.5, seconds_per_byte=1e-10)

    Source: Pipe-SGD (Li et al., NeurIPS 2018) has the ratio and the time in its timing model.
    """

    name: str
    ratio: float
    seconds_per_byte: float = 0.0

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


NONE = CodecCost("none", 1.0)
"""Gradients travel as they are."""

_MEASURED_BYTES = 64 * 2**20  # float32, one CPU thread, encode + decode

CODECS = MappingProxyType(
    {
        codec.name: codec
        for codec in (
            NONE,
            # Horovod casts into new tensors, whose memory costs more than the cast.
            CodecCost("fp16", 0.5, 45e-3 / _MEASURED_BYTES),
            CodecCost("bf16", 0.5, 16.2e-3 / _MEASURED_BYTES),
            # 256 values share a float32 scale: 260 bytes for 1024.
            CodecCost("int8", 260 / 1024, 34.2e-3 / _MEASURED_BYTES),
        )
    }
)
"""The codecs of :mod:`hvd_pipe.torch.compression` for float32 gradients, by name.

Times were measured on one CPU thread (64 MiB of float32, encode + decode: fp16, which is Horovod's
own cast, 45 ms; bf16 16.2 ms; int8 34.2 ms). A GPU takes far less: use ``CodecCost(name, ratio)``
there, or measure.
"""
