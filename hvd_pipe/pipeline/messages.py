"""Tensors as messages between stages, and back; a framework says how its tensors become bytes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.stage import Buffer, MicrobatchIndex
from hvd_pipe.pipeline.wire import Format, Header, Part

__all__ = ["ITEM_BYTES", "Boundary", "Messages", "TensorSpec"]


ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of an element by the plain name of its dtype: the dtypes that can travel."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that crosses a cut between stages.

    Args:
        name: Unique in its model.
        shape: With the sample minibatch.
        dtype: Its plain name, one of :data:`ITEM_BYTES`.
        dynamic: Dimensions that follow the batch size, which a last minibatch makes smaller.
        gradient: Whether a gradient of its shape and dtype comes back.

    Raises:
        ValueError: An empty name, an unknown dtype, or a shape or dimension that cannot be.

    Example:
        >>> spec = TensorSpec("relu", (32, 10), "float32", dynamic=(0,), gradient=True)
        >>> spec.nbytes
        1280
        >>> spec.check((7, 10), "float32", "stage 1")
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dynamic: tuple[int, ...]
    gradient: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dynamic", tuple(self.dynamic))
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a tensor needs a non-empty string as its name, got {self.name!r}")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(
                f"tensor {self.name!r}: dtype must be one of {', '.join(ITEM_BYTES)}; "
                f"got {self.dtype!r}"
            )
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in self.shape):
            raise ValueError(
                f"tensor {self.name!r}: a shape has integers of at least 0, got {self.shape}"
            )
        if any(at not in range(len(self.shape)) for at in self.dynamic):
            raise ValueError(
                f"tensor {self.name!r}: dynamic = {self.dynamic} must number dimensions of the "
                f"shape {self.shape}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes with the sample minibatch."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def check(self, shape: Sequence[int], dtype: str, where: str) -> None:
        """Check that a tensor is as planned; dimensions in ``dynamic`` may be smaller, not larger.

        Args:
            shape: Of the tensor at hand.
            dtype: Of the tensor at hand, its plain name.
            where: Who has it, for the message: "stage 1 replica 0".

        Raises:
            ValueError: It differs; names the stage, the tensor, the plan and what was found.
        """
        found = tuple(shape)
        what = f"{where}: tensor {self.name!r}"
        plan = f"was planned as {self.dtype} {self.shape}, but is {dtype} {found}"
        if dtype != self.dtype:
            raise ValueError(
                f"{what} {plan}: minibatches must have the dtypes of the sample; convert them in "
                "the loader, or plan with a sample that has this dtype"
            )
        if len(found) != len(self.shape):
            raise ValueError(
                f"{what} {plan}: it must have {len(self.shape)} dimensions; plan with a sample "
                "that is shaped like the minibatches"
            )
        for at, (planned, now) in enumerate(zip(self.shape, found, strict=True)):
            if at in self.dynamic and now > planned:
                raise ValueError(
                    f"{what} {plan}: dimension {at} follows the batch and may be smaller than "
                    "planned, never larger; plan with the largest minibatch as the sample"
                )
            if at not in self.dynamic and now != planned:
                raise ValueError(
                    f"{what} {plan}: dimension {at} does not follow the batch, so it must be "
                    f"{planned} in every minibatch; pad or crop the data to one size"
                )


_SHORTENED = {"float32", "float64"}


class Messages(ABC):
    """Messages of one kind over one cut: its activations, or its gradients.

    Args:
        dtypes: The framework's, by their plain names.
        specs: What each carries.
        stages: How many the pipeline has.
        where: Who packs and unpacks, for errors: "stage 1 replica 0".
        short: Whether floating-point numbers travel as bfloat16.
    """

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
        self._format = Format(
            tuple(spec.shape for spec in self._sent),
            tuple(ITEM_BYTES[spec.dtype] for spec in self._sent),
            stages,
        )

    @property
    def capacity(self) -> int:
        """Bytes of the largest message."""
        return self._format.capacity

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
        return self._format.pack(Header(*index, digest, squared_norms, tuple(shapes)), parts)

    # Architecture: D5
    def unpack(self, index: MicrobatchIndex, message: Buffer) -> tuple[Header, list[Any]]:
        """Return what a message holds; tensors may be views of it."""
        header, parts = self._format.unpack(message)
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
    """A cut between two stages: what crosses it forward, and which gradients come back.

    Args:
        specs: What crosses it.
        make: Makes the messages that carry some of it.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], make: Callable[[Sequence[TensorSpec]], Messages]
    ) -> None:
        self.differentiated = tuple(at for at, spec in enumerate(specs) if spec.gradient)
        """Places of the tensors that a gradient comes back for."""
        self.activations = make(specs)
        self.gradients = make([specs[at] for at in self.differentiated])

    @property
    def capacities(self) -> tuple[int, int]:
        """Bytes of the largest activation, and of the largest gradient."""
        return self.activations.capacity, self.gradients.capacity
