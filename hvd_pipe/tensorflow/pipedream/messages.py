"""TensorFlow's tensors as messages between stages, and back."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvd_pipe.pipeline import messages
from hvd_pipe.pipeline.stage import Buffer
from hvd_pipe.pipeline.wire import Part

__all__ = ["Messages"]


class Messages(messages.Messages):
    """See :class:`hvd_pipe.pipeline.messages.Messages`; received tensors are copies.

    Example:
        >>> from hvd_pipe.pipeline.spec import TensorSpec
        >>> from hvd_pipe.pipeline.stage import Unit
        >>> spec = TensorSpec("dense", (8, 2), "float32", dynamic=(0,), gradient=True)
        >>> messages = Messages([spec], stages=2, where="stage 0 replica 0")
        >>> message = messages.pack(Unit(3, 0), [tf.ones((5, 2))], 7, (0.25, 4.0))
        >>> header, (tensor,) = messages.unpack(Unit(3, 0), message)
        >>> header.digest, tensor.shape
        (7, TensorShape([5, 2]))
    """

    def _name(self, tensor: Any) -> str:
        return str(tensor.dtype.name)

    def _bytes(self, tensor: Any, dtype: str) -> Part:
        data: Part = tf.cast(tensor, dtype).numpy()
        return data

    def _tensor(self, part: Buffer, dtype: str, shape: tuple[int, ...], wanted: str) -> Any:
        array = part.view(tf.as_dtype(dtype).as_numpy_dtype).reshape(shape)
        return tf.cast(tf.constant(array), wanted)
