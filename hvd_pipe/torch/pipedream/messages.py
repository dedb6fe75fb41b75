"""Tensors as messages between stages, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.spec import ITEM_BYTES, TensorSpec
from hvd_pipe.pipeline.stage import Buffer, Unit
from hvd_pipe.pipeline.wire import Format, Header

__all__ = ["Boundary", "Messages"]

T = TypeVar("T")

_SHORT = torch.bfloat16
_SHORTENED = {"float32", "float64"}


class Messages:
    """Messages of one kind over one cut: its activations, or its gradients.

    Args:
        specs: What each carries.
        stages: How many the pipeline has.
        where: Who packs and unpacks, for errors: "stage 1 replica 0".
        short: Whether floating-point numbers travel as bfloat16.
        device: Where tensors are wanted.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        stages: int,
        where: str,
        short: bool,
        device: torch.device,
    ) -> None:
        self._specs, self._where, self._device = tuple(specs), where, device
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
        unit: Unit,
        tensors: Sequence[torch.Tensor],
        digest: int,
        squared_norms: tuple[float, ...],
    ) -> Buffer:
        """Return a message.

        Raises:
            ValueError: A tensor is not as planned; names it, and the stage.
        """
        parts, shapes = [], []
        for spec, sent, tensor in zip(self._specs, self._sent, tensors, strict=True):
            spec.check(tensor.shape, _name(tensor.dtype), self._where)
            data = tensor.detach().to(device="cpu", dtype=_dtype(sent.dtype)).contiguous()
            parts.append(data.view(-1).view(torch.uint8).numpy())
            shapes.append(tuple(tensor.shape))
        header = Header(*unit, digest, squared_norms, tuple(shapes))
        return self._format.pack(header, parts)

    def unpack(self, unit: Unit, message: Buffer) -> tuple[Header, list[torch.Tensor]]:
        """Return what a message holds; tensors may be views of it.

        Raises:
            HvdPipeError: It is of another microbatch, or malformed.
            ValueError: A tensor is not as planned; names it, and the stage.
        """
        header, parts = self._format.unpack(message)
        if (header.minibatch, header.microbatch) != unit:
            raise HvdPipeError(
                f"{self._where} waits for microbatch {unit.microbatch} of minibatch "
                f"{unit.minibatch}, and got {header.microbatch} of {header.minibatch}: the "
                "neighbour runs another schedule."
            )
        tensors = []
        for spec, sent, shape, part in zip(
            self._specs, self._sent, header.shapes, parts, strict=True
        ):
            spec.check(shape, spec.dtype, self._where)
            tensor = torch.from_numpy(part).view(_dtype(sent.dtype)).view(shape)
            tensors.append(tensor.to(device=self._device, dtype=_dtype(spec.dtype)))
        return header, tensors


class Boundary:
    """A cut between two stages: what crosses it forward, and which gradients come back.

    Args:
        specs: What crosses it.
        stages, where, short, device: As `Messages` takes them.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        stages: int,
        where: str,
        short: bool,
        device: torch.device,
    ) -> None:
        self._specs = tuple(specs)
        self.activations = Messages(specs, stages, where, short, device)
        self.gradients = Messages(self.with_gradient(specs), stages, where, short, device)

    @property
    def capacities(self) -> tuple[int, int]:
        """Bytes of the largest activation, and of the largest gradient."""
        return self.activations.capacity, self.gradients.capacity

    def with_gradient(self, values: Sequence[T]) -> list[T]:
        """Return those of the values, one a tensor, that a gradient comes back for."""
        pairs = zip(self._specs, values, strict=True)
        return [value for spec, value in pairs if spec.gradient]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)  # type: ignore[no-any-return]
