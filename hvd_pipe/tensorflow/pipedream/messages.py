"""Tensors as messages between stages, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.spec import ITEM_BYTES, TensorSpec
from hvd_pipe.pipeline.stage import Buffer, Unit
from hvd_pipe.pipeline.wire import Format, Header

__all__ = ["Messages"]


class Messages:
    """Messages of one kind over one cut: its activations, or its gradients.

    Args:
        specs: What each carries.
        stages: How many the pipeline has.
        where: Who packs and unpacks, for errors: "stage 1 replica 0".

    Example:
        >>> spec = TensorSpec("dense", (8, 2), "float32", dynamic=(0,), gradient=True)
        >>> messages = Messages([spec], stages=2, where="stage 0 replica 0")
        >>> message = messages.pack(Unit(3, 0), [tf.ones((5, 2))], digest=7)
        >>> digest, (tensor,) = messages.unpack(Unit(3, 0), message)
        >>> digest, tensor.shape
        (7, TensorShape([5, 2]))
    """

    def __init__(self, specs: Sequence[TensorSpec], stages: int, where: str) -> None:
        self._specs, self._where = tuple(specs), where
        self._unknown = (math.nan,) * stages
        self._format = Format(
            tuple(spec.shape for spec in specs),
            tuple(ITEM_BYTES[spec.dtype] for spec in specs),
            stages,
        )

    @property
    def capacity(self) -> int:
        """Bytes of the largest message."""
        return self._format.capacity

    def pack(self, unit: Unit, tensors: Sequence[Any], digest: int) -> Buffer:
        """Return a message.

        Raises:
            ValueError: A tensor is not as planned; names it, and the stage.
        """
        shapes = tuple(tuple(each.shape) for each in tensors)
        for spec, tensor, shape in zip(self._specs, tensors, shapes, strict=True):
            spec.check(shape, tensor.dtype.name, self._where)
        header = Header(*unit, digest, self._unknown, shapes)
        return self._format.pack(header, [each.numpy() for each in tensors])

    def unpack(self, unit: Unit, message: Buffer) -> tuple[int, list[Any]]:
        """Return the digest and the tensors of a message, which are copies.

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
        for spec, shape, part in zip(self._specs, header.shapes, parts, strict=True):
            spec.check(shape, spec.dtype, self._where)
            array = part.view(tf.as_dtype(spec.dtype).as_numpy_dtype).reshape(shape)
            tensors.append(tf.constant(array))
        return header.digest, tensors
