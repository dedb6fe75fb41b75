"""Tensors as messages between stages, and back: a header and then each tensor's bytes.

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.stage import Buffer, MicrobatchIndex

ALIGNMENT = 64
"""Bytes; where a tensor may begin so that every framework takes it without a copy."""

Bytes = npt.NDArray[np.uint8]
Part = npt.NDArray[Any] | bytes | bytearray | memoryview

_MAGIC = b"hvdpipe1"
_FIXED = struct.Struct("<8sQQQQII")


def empty(nbytes: int) -> Bytes:
    """Return a flat buffer of this length that begins at a multiple of `ALIGNMENT`."""
    buffer = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -buffer.ctypes.data % ALIGNMENT
    return buffer[first : first + nbytes]


@dataclass(frozen=True)
class Header:
    """What a message says of itself."""

    minibatch: int
    microbatch: int
    digest: int
    squared_norms: tuple[float, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Format:
    """What the messages of a channel have in common."""

    most_shapes: tuple[tuple[int, ...], ...]
    itemsizes: tuple[int, ...]
    stages: int

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
        for noun, count, planned in (
            ("stages", stages, self.stages),
            ("tensors", tensors, len(self.most_shapes)),
        ):
            if count != planned:
                raise _malformed(f"it has {count} {noun}, the plan {planned}")
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
        """Check shapes, and return where each tensor's bytes are, and the message's length."""
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


_DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
ITEM_BYTES = {
    name: 2 if name == "bfloat16" else np.dtype(name).itemsize for name in _DTYPES.split()
}
"""Bytes of an element by the plain name of its dtype: the dtypes that can travel."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that crosses a cut between stages."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    dynamic: tuple[int, ...]
    gradient: bool

    @property
    def nbytes(self) -> int:
        """Bytes with the sample minibatch."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def check(self, shape: Sequence[int], dtype: str, where: str) -> None:
        """Check a tensor: dimensions in ``dynamic`` may be smaller than planned, no others."""
        actual = tuple(shape)
        name = f"{where}: tensor {self.name!r}"
        plan = f"was planned as {self.dtype} {self.shape}, but is {dtype} {actual}"
        if dtype != self.dtype:
            raise ValueError(
                f"{name} {plan}: minibatches must have the dtypes of the sample; convert them in "
                "the loader, or plan with a sample that has this dtype"
            )
        if len(actual) != len(self.shape):
            raise ValueError(
                f"{name} {plan}: it must have {len(self.shape)} dimensions; plan with a sample "
                "that is shaped like the minibatches"
            )
        for at, (planned, now) in enumerate(zip(self.shape, actual, strict=True)):
            if at in self.dynamic and now > planned:
                raise ValueError(
                    f"{name} {plan}: dimension {at} follows the batch and may be smaller than "
                    "planned, never larger; plan with the largest minibatch as the sample"
                )
            if at not in self.dynamic and now != planned:
                raise ValueError(
                    f"{name} {plan}: dimension {at} does not follow the batch, so it must be "
                    f"{planned} in every minibatch; pad or crop the data to one size"
                )


_SHORTENED = {"float32", "float64"}


class Messages(ABC):
    """Messages of one kind over one cut: its activations, or its gradients."""

    def __init__(
        self,
        dtypes: Mapping[str, Any],
        specs: Sequence[TensorSpec],
        stages: int,
        where: str,
        short: bool = False,
    ) -> None:
        self._dtypes, self._names = dtypes, {dtype: name for name, dtype in dtypes.items()}
        self._specs, self._where = tuple(specs), where
        self._sent = [
            replace(spec, dtype="bfloat16") if short and spec.dtype in _SHORTENED else spec
            for spec in specs
        ]
        self.format = Format(
            tuple(spec.shape for spec in self._sent),
            tuple(ITEM_BYTES[spec.dtype] for spec in self._sent),
            stages,
        )

    def pack(
        self,
        index: MicrobatchIndex,
        tensors: Sequence[Any],
        digest: int,
        squared_norms: tuple[float, ...],
    ) -> Buffer:
        """Return a message."""
        parts, shapes = [], []
        for spec, sent, tensor in zip(self._specs, self._sent, tensors, strict=True):
            shapes.append(tuple(tensor.shape))
            dtype = self._names.get(tensor.dtype) or str(tensor.dtype)
            spec.check(shapes[-1], dtype, self._where)
            parts.append(self._bytes(tensor, self._dtypes[sent.dtype]))
        return self.format.pack(Header(*index, digest, squared_norms, tuple(shapes)), parts)

    # Architecture: D5
    def unpack(self, index: MicrobatchIndex, message: Buffer) -> tuple[Header, list[Any]]:
        """Return what a message holds; tensors may be views of it."""
        header, parts = self.format.unpack(message)
        if (header.minibatch, header.microbatch) != index:
            raise HvdPipeError(
                f"{self._where} waits for microbatch {index.microbatch} of minibatch "
                f"{index.minibatch}, and got {header.microbatch} of {header.minibatch}: the "
                "neighbour runs another schedule."
            )
        tensors = []
        for spec, sent, shape, part in zip(
            self._specs, self._sent, header.shapes, parts, strict=True
        ):
            spec.check(shape, spec.dtype, self._where)
            dtypes = self._dtypes[sent.dtype], self._dtypes[spec.dtype]
            tensors.append(self._tensor(part, shape, *dtypes))
        return header, tensors

    @abstractmethod
    def _bytes(self, tensor: Any, dtype: Any) -> Part:
        """Return a tensor's elements as this dtype."""

    @abstractmethod
    def _tensor(self, part: Buffer, shape: tuple[int, ...], dtype: Any, wanted: Any) -> Any:
        """Return the tensor of dtype ``wanted`` whose elements, as another dtype, are these."""


class Boundary:
    """A cut between two stages: what crosses it forward, and which gradients come back."""

    def __init__(
        self, specs: Sequence[TensorSpec], make: Callable[[Sequence[TensorSpec]], Messages]
    ) -> None:
        self.differentiated = tuple(at for at, spec in enumerate(specs) if spec.gradient)
        """Places of the tensors that a gradient comes back for."""
        self.activations = make(specs)
        self.gradients = make([specs[at] for at in self.differentiated])
        self.capacities = self.activations.format.capacity, self.gradients.format.capacity
        """Bytes of the largest activation, and of the largest gradient."""
