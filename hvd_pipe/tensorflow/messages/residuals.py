"""What lossy codecs have left over of each bucket, in variables of this rank."""

from __future__ import annotations

import zlib

import tensorflow as tf

from hvd_pipe.tensorflow.messages.reduction import Feedback, Reduction
from hvd_pipe.tensorflow.strategies.engine import LOST, Arrays
from hvd_pipe.tensorflow.strategies.packing import Packing

__all__ = ["Residuals"]


class Residuals:
    """One `Feedback` a bucket, or None where the codec keeps none."""

    def __init__(self, reduction: Reduction, packing: Packing) -> None:
        self.each: list[Feedback | None] = [reduction.feedback(size) for size in packing.sizes]
        # Of these buckets only: other ones of this size would add it to other gradients.
        self._buckets = zlib.crc32(repr(packing.groups).encode())

    @property
    def named(self) -> dict[str, tf.Variable]:
        """The variables, by the names that they have in a checkpoint."""
        return {
            f"{LOST}{kind}.{i}.{self._buckets:08x}": getattr(feedback, kind)
            for i, feedback in enumerate(self.each)
            if feedback is not None
            for kind in ("sent", "reduced")
        }

    def state(self) -> Arrays:
        """Return copies of them all."""
        return {name: each.numpy() for name, each in self.named.items()}
