"""What encoded gradients look like on the wire: the same bytes for every framework.

    values   x x x x x x x x | x x x x x x x x | x x x         chunks, the last one may be shorter
               |    max|x|/127   |                 |
    int8     [ s0 s1 s2 ][ q q q q q q q q  q q q q q q q q  q q q ]      4 and 1 bytes each
    bf16     [ h h h h h h h h h h h h h h h h h h h ]                    2 bytes each

Frameworks encode and decode; sizes, options and their checks are here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

LEVELS = 127
SMALLEST_SCALE = 2.0**-126  # float32's smallest normal number
LARGEST_SCALE = 2.0**121 * (128 / 127 - 2.0**-23)  # 127 times the next float32 would be infinite


class NoCompressor:
    """Refuses to be one of Horovod's compressors, whose results Horovod sums as they are."""

    belongs_to: ClassVar[str]
    """Where the user should give it instead."""

    def compress(self, tensor: Any) -> NoReturn:
        """Refuse.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"{self!r} cannot be used in a single Horovod call, as Horovod cannot sum what it "
            f"makes: give it to {self.belongs_to}, or use hvd.Compression.none or "
            "hvd.Compression.fp16 here."
        )

    def decompress(self, tensor: Any, ctx: Any) -> NoReturn:
        """Refuse, as `compress` does."""
        self.compress(tensor)


@dataclass(frozen=True)
class BF16Format:
    """Two bytes a value: the upper half of its float32.

    Args:
        error_feedback: Whether what a message loses is added to the next one.

    Raises:
        TypeError: ``error_feedback`` is no bool.
    """

    name: ClassVar[str] = "bf16"
    """Its name in `hvd_pipe.planning.codec.CODECS`."""
    error_feedback: bool = False

    def __post_init__(self) -> None:
        _check_feedback(self.error_feedback)

    @property
    def chunk(self) -> int:
        """Elements that are encoded as one; slices of a buffer begin at whole chunks."""
        return 1

    def nbytes(self, numel: int) -> int:
        """Return the bytes that ``numel`` elements become."""
        return 2 * numel


@dataclass(frozen=True)
class Int8Format:
    """A byte a value, and a float32 scale a chunk.

    Args:
        chunk: Elements that share a scale.
        error_feedback: Whether what a message loses is added to the next one.

    Raises:
        TypeError: ``chunk`` is no int, or ``error_feedback`` is no bool.
        ValueError: ``chunk`` is less than 1.
    """

    name: ClassVar[str] = "int8"
    """Its name in `hvd_pipe.planning.codec.CODECS`."""
    chunk: int = 256
    error_feedback: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.chunk, bool) or not isinstance(self.chunk, int):
            raise TypeError(f"chunk must be an int, got {self.chunk!r}: 256 is the default.")
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}: 256 is the default.")
        _check_feedback(self.error_feedback)

    def nbytes(self, numel: int) -> int:
        """Return the bytes that ``numel`` elements become."""
        return 4 * self.chunks(numel) + numel

    def chunks(self, numel: int) -> int:
        """Return how many scales ``numel`` elements have."""
        return -(-numel // self.chunk)


def _check_feedback(error_feedback: object) -> None:
    if not isinstance(error_feedback, bool):
        raise TypeError(f"error_feedback must be True or False, got {error_feedback!r}.")
