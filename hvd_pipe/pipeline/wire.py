"""How tensors become a message: one flat buffer, a header and then each tensor's bytes.

::

    0         8      16          24          32      40      44      48
    | "hvdpipe1" | length | minibatch | microbatch | digest | stages | tensors |
    | squared norm of each stage (float64) | shape of each tensor (int64) | gap
    | tensor 0 | gap | tensor 1 | ...                 each begins at a multiple of 64 bytes

All numbers are little-endian. A buffer may go on after the message, as where every message of a
channel is as long as the largest one: the header knows the length.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_pipe.errors import HvdPipeError

__all__ = ["ALIGNMENT", "Bytes", "Format", "Header", "Part", "empty"]

ALIGNMENT = 64
"""Bytes; where a tensor may begin so that every framework takes it without a copy."""

Bytes = npt.NDArray[np.uint8]
Part = npt.NDArray[Any] | bytes | bytearray | memoryview

_MAGIC = b"hvdpipe1"
_FIXED = struct.Struct("<8sQQQQII")
_DIGESTS = 1 << 63


def empty(nbytes: int) -> Bytes:
    """Return a flat buffer of this length that begins at a multiple of `ALIGNMENT`.

    Example:
        >>> empty(100).ctypes.data % ALIGNMENT, empty(100).size
        (0, 100)
    """
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -buffer.ctypes.data % ALIGNMENT
    return buffer[first : first + nbytes]


@dataclass(frozen=True)
class Header:
    """What a message says of itself.

    Args:
        minibatch: Its number, from 0.
        microbatch: Its number within the minibatch, from 0.
        digest: A number below 2^63 that travels with the microbatch: of its targets.
        squared_norms: Of the gradient of each stage, nan where it is not known.
        shapes: Of each tensor.
    """

    minibatch: int
    microbatch: int
    digest: int
    squared_norms: tuple[float, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Format:
    """What the messages of a channel have in common.

    Args:
        most_shapes: The planned shape of each tensor; a message's dimensions may be smaller.
        itemsizes: Bytes of an element of each tensor.
        stages: How many stages the pipeline has.

    Raises:
        ValueError: Counts that differ, or sizes that are not positive.

    Example:
        >>> form = Format(most_shapes=((32, 10),), itemsizes=(4,), stages=2)
        >>> form.capacity
        1408
        >>> x = np.arange(20, dtype=np.float32).reshape(2, 10)
        >>> message = form.pack(Header(5, 0, 7, (0.25, math.nan), (x.shape,)), [x])
        >>> header, (part,) = form.unpack(message)
        >>> header.minibatch, header.shapes, message.size
        (5, ((2, 10),), 256)
        >>> bool((part.view(np.float32).reshape(2, 10) == x).all())
        True
    """

    most_shapes: tuple[tuple[int, ...], ...]
    itemsizes: tuple[int, ...]
    stages: int

    def __post_init__(self) -> None:
        if len(self.most_shapes) != len(self.itemsizes):
            raise ValueError(
                f"each tensor needs a shape and an itemsize, got {len(self.most_shapes)} shapes "
                f"and {len(self.itemsizes)} itemsizes"
            )
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")
        for number, (shape, itemsize) in enumerate(
            zip(self.most_shapes, self.itemsizes, strict=True)
        ):
            if itemsize < 1 or min(shape, default=0) < 0:
                raise ValueError(
                    f"tensor {number} must have dimensions of at least 0 and an itemsize of at "
                    f"least 1, got {shape} of {itemsize} bytes"
                )

    @cached_property
    def capacity(self) -> int:
        """Bytes of the largest message: that of the planned shapes."""
        return self._places(Header(0, 0, 0, (math.nan,) * self.stages, self.most_shapes))[1]

    def pack(self, header: Header, parts: Sequence[Part]) -> Bytes:
        """Return the message of these tensors: their bytes are copied once."""
        places, length = self._places(header)
        if len(parts) != len(header.shapes):
            raise ValueError(
                f"the header has shapes of {len(header.shapes)} tensors, got {len(parts)} parts"
            )
        message = empty(length)
        fixed = (header.minibatch, header.microbatch, header.digest)
        _FIXED.pack_into(
            message.data, 0, _MAGIC, message.size, *fixed, self.stages, len(self.most_shapes)
        )
        message[self._norms].view("<f8")[:] = header.squared_norms
        message[self._dims].view("<i8")[:] = [dim for shape in header.shapes for dim in shape]
        message[self._dims.stop : self._first] = 0
        for number, (place, part) in enumerate(zip(places, parts, strict=True)):
            array = part if isinstance(part, np.ndarray) else np.frombuffer(part, np.uint8)
            if array.nbytes != place.stop - place.start:
                raise ValueError(
                    f"tensor {number} of shape {header.shapes[number]} and itemsize "
                    f"{self.itemsizes[number]} has {place.stop - place.start} bytes, got a part "
                    f"of {array.nbytes}"
                )
            # Through a view of the part's own shape, so that strides cost no second copy.
            np.copyto(message[place].view(array.dtype).reshape(array.shape), array)
            # Nothing else of this process's memory travels along.
            message[place.stop : place.stop + -place.stop % ALIGNMENT] = 0
        return message

    def unpack(self, buffer: Bytes) -> tuple[Header, list[Bytes]]:
        """Return a message's header, and views of the bytes of its tensors: nothing is copied."""
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
            raise ValueError(
                f"a message is a flat, contiguous array of uint8, got {buffer.dtype} of shape "
                f"{buffer.shape}"
            )
        if buffer.size < self._first:
            raise _malformed(
                f"the header of this plan has {self._first} bytes, the message {buffer.size}"
            )
        fixed = _FIXED.unpack_from(buffer.data)
        magic, length, minibatch, microbatch, digest, stages, tensors = fixed
        if magic != _MAGIC:
            raise _malformed(f"it begins with {magic!r} and not with {_MAGIC!r}")
        for what, found, planned in (
            ("stages", stages, self.stages),
            ("tensors", tensors, len(self.most_shapes)),
        ):
            if found != planned:
                raise _malformed(f"it has {found} {what}, the plan {planned}")
        norms = tuple(buffer[self._norms].view("<f8").tolist())
        dims = iter(buffer[self._dims].view("<i8").tolist())
        shapes = tuple(tuple(next(dims) for _ in most) for most in self.most_shapes)
        header = Header(minibatch, microbatch, digest, norms, shapes)
        try:
            places, expected = self._places(header)
        except ValueError as error:
            raise _malformed(str(error)) from error
        if length != expected:
            raise _malformed(f"it says that it has {length} bytes, and its shapes make {expected}")
        if buffer.size < length:
            raise _malformed(f"{buffer.size} of its {length} bytes have come")
        return header, [buffer[place] for place in places]

    @cached_property
    def _norms(self) -> slice:
        """Where the squared norms are."""
        return slice(_FIXED.size, _FIXED.size + 8 * self.stages)

    @cached_property
    def _dims(self) -> slice:
        """Where the shapes are."""
        first = self._norms.stop
        return slice(first, first + 8 * sum(map(len, self.most_shapes)))

    @cached_property
    def _first(self) -> int:
        """Where the first tensor begins."""
        end: int = self._dims.stop
        return end + -end % ALIGNMENT

    def _places(self, header: Header) -> tuple[list[slice], int]:
        """Check a header, and return where each tensor's bytes are, and the message's length."""
        if len(header.squared_norms) != self.stages:
            raise ValueError(
                f"squared_norms must be one a stage, {self.stages}, got "
                f"{len(header.squared_norms)}"
            )
        for name in ("minibatch", "microbatch", "digest"):
            value = getattr(header, name)
            if not 0 <= value < _DIGESTS:
                raise ValueError(f"{name} must be in 0..2^63-1, got {value}")
        if len(header.shapes) != len(self.most_shapes):
            raise ValueError(
                f"the plan has {len(self.most_shapes)} tensors, got {len(header.shapes)} shapes"
            )
        places, end = [], self._first
        for number, (shape, most) in enumerate(zip(header.shapes, self.most_shapes, strict=True)):
            if len(shape) != len(most) or any(
                not 0 <= dim <= largest for dim, largest in zip(shape, most, strict=True)
            ):
                raise ValueError(
                    f"tensor {number} has shape {shape}; the plan allows {most} and smaller"
                )
            place = slice(end, end + math.prod(shape) * self.itemsizes[number])
            places.append(place)
            end = place.stop + -place.stop % ALIGNMENT
        return places, end


def _malformed(what: str) -> HvdPipeError:
    return HvdPipeError(
        f"a message is not what this rank expects: {what}. Every rank must run the same script "
        "and plan, with the same hvd_pipe."
    )
