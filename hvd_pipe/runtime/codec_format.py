"""What encoded gradients look like on the wire: the same bytes for every framework.

    values   x x x x x x x x | x x x x x x x x | x x x         chunks, the last one may be shorter
               |    max|x|/127   |                 |
    int8     [ s0 s1 s2 ][ q q q q q q q q  q q q q q q q q  q q q ]      4 and 1 bytes each
    bf16     [ h h h h h h h h h h h h h h h h h h h ]                    2 bytes each

Frameworks encode and decode; sizes, options and their checks are here.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

LEVELS = 127
SMALLEST_SCALE = 2.0**-126  # float32's smallest normal number
LARGEST_SCALE = 2.0**121 * (128 / 127 - 2.0**-23)  # 127 times the next float32 would be infinite


class CodecFormat(abc.ABC):
    """What is alike in each framework's class of codecs; none of these is a Horovod compressor."""

    belongs_to: ClassVar[str]
    """Where the user should give it."""
    name: ClassVar[str]
    """Its name in `hvd_pipe.planning.comm.CODECS`."""
    error_feedback: bool
    """Whether what a message loses is added to the next one."""

    @property
    def chunk(self) -> int:
        """Elements that are encoded as one; slices of a buffer begin at whole chunks."""
        return 1

    @abc.abstractmethod
    def nbytes(self, numel: int) -> int:
        """Return the bytes that ``numel`` elements become."""

    def compress(self, tensor: Any) -> NoReturn:
        """Raise TypeError: Horovod sums what its own compressors make."""
        raise TypeError(
            f"{self!r} cannot be used in a single Horovod call, as Horovod cannot sum what it "
            f"makes: give it to {self.belongs_to}, or use hvd.Compression.none or "
            "hvd.Compression.fp16 here."
        )

    def decompress(self, tensor: Any, ctx: Any) -> NoReturn:
        """Raise TypeError, as `compress` does."""
        self.compress(tensor)

    def __post_init__(self) -> None:
        if not isinstance(self.error_feedback, bool):
            raise TypeError(f"error_feedback must be True or False, got {self.error_feedback!r}.")


@dataclass(frozen=True)
class BF16Format(CodecFormat):
    """Two bytes a value: the upper half of its float32."""

    name: ClassVar[str] = "bf16"
    error_feedback: bool = False

    def nbytes(self, numel: int) -> int:
        """Return the bytes that ``numel`` elements become."""
        return 2 * numel


@dataclass(frozen=True)
class Int8Format(CodecFormat):
    """A byte a value, and a float32 scale a chunk."""

    name: ClassVar[str] = "int8"
    chunk: int = 256
    error_feedback: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.chunk, bool) or not isinstance(self.chunk, int):
            raise TypeError(f"chunk must be an int, got {self.chunk!r}: 256 is the default.")
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}: 256 is the default.")
        super().__post_init__()

    def nbytes(self, numel: int) -> int:
        """Return the bytes that ``numel`` elements become."""
        return 4 * self.chunks(numel) + numel

    def chunks(self, numel: int) -> int:
        """Return how many scales ``numel`` elements have."""
        return -(-numel // self.chunk)
