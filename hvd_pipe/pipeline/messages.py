"""Tensors as messages between stages, and back; a framework says how its tensors become bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hvd_pipe.pipeline.spec import ITEM_BYTES, TensorSpec
from hvd_pipe.pipeline.stage import Buffer, Unit
from hvd_pipe.pipeline.wire import Format, Header, Part

__all__ = ["Boundary", "Messages"]

T = TypeVar("T")

_SHORTENED = {"float32", "float64"}


class Messages(ABC):
    """Messages of one kind over one cut: its activations, or its gradients.

    Args:
        specs: What each carries.
        stages: How many the pipeline has.
        where: Who packs and unpacks, for errors: "stage 1 replica 0".
        short: Whether floating-point numbers travel as bfloat16.
    """

    def __init__(
        self, specs: Sequence[TensorSpec], stages: int, where: str, short: bool = False
    ) -> None:
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
        self, unit: Unit, tensors: Sequence[Any], digest: int, squared_norms: tuple[float, ...]
    ) -> Buffer:
        """Return a message.

        Raises:
            ValueError: A tensor is not as planned; names it, and the stage.
        """
        parts, shapes = [], []
        for spec, sent, tensor in zip(self._specs, self._sent, tensors, strict=True):
            shapes.append(tuple(tensor.shape))
            spec.check(shapes[-1], self._name(tensor), self._where)
            parts.append(self._bytes(tensor, sent.dtype))
        return self._format.pack(Header(*unit, digest, squared_norms, tuple(shapes)), parts)

    def unpack(self, unit: Unit, message: Buffer) -> tuple[Header, list[Any]]:
        """Return what a message holds; tensors may be views of it.

        Raises:
            HvdPipeError: It is of another microbatch, or malformed.
            ValueError: A tensor is not as planned; names it, and the stage.
        """
        header, parts = self._format.unpack(message)
        header.check_unit(unit, self._where)
        tensors = []
        for spec, sent, shape, part in zip(
            self._specs, self._sent, header.shapes, parts, strict=True
        ):
            spec.check(shape, spec.dtype, self._where)
            tensors.append(self._tensor(part, sent.dtype, shape, spec.dtype))
        return header, tensors

    @abstractmethod
    def _name(self, tensor: Any) -> str:
        """Return the plain name of a tensor's dtype."""

    @abstractmethod
    def _bytes(self, tensor: Any, dtype: str) -> Part:
        """Return a tensor's elements as this dtype."""

    @abstractmethod
    def _tensor(self, part: Buffer, dtype: str, shape: tuple[int, ...], wanted: str) -> Any:
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
        self._specs = tuple(specs)
        self.activations = make(specs)
        self.gradients = make(self.with_gradient(specs))

    @property
    def capacities(self) -> tuple[int, int]:
        """Bytes of the largest activation, and of the largest gradient."""
        return self.activations.capacity, self.gradients.capacity

    def with_gradient(self, values: Sequence[T]) -> list[T]:
        """Return those of the values, one a tensor, that a gradient comes back for."""
        pairs = zip(self._specs, values, strict=True)
        return [value for spec, value in pairs if spec.gradient]
