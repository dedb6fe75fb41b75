"""Which gradients share a message, how they lie in it, and the residuals of each.

gradients   [ a b ]  [ c ]  [ d e f ]          indices 0, 1, 2
groups      (2, 1), (0,)
flats       [ d e f c ], [ a b ]               one message each
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from hvd_pipe.runtime.gradient_index import GradientIndex
from hvd_pipe.tensorflow.messages.reduction import Feedback, Reduction


class Shapes(GradientIndex):
    """The gradients of a job: names, shapes and dtypes, in an order that all ranks share."""

    def __init__(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[tf.DType]
    ) -> None:
        self.shapes = [[int(extent) for extent in shape] for shape in shapes]
        self.dtypes = [tf.as_dtype(dtype) for dtype in dtypes]
        self.numel = [int(np.prod(shape, dtype=np.int64)) for shape in self.shapes]
        pairs = zip(self.numel, self.dtypes, strict=True)
        nbytes = [numel * int(dtype.size) for numel, dtype in pairs]
        super().__init__(names, nbytes, self.dtypes)


class Packing:
    """Lays gradients into flat buffers, each of one dtype, and takes them out again."""

    def __init__(self, shapes: Shapes, groups: Sequence[Sequence[int]]) -> None:
        self.shapes, self.groups = shapes, [list(group) for group in groups]

    @property
    def sizes(self) -> list[int]:
        """How many elements each buffer has."""
        return [sum(self.shapes.numel[index] for index in group) for group in self.groups]

    @property
    def dtypes(self) -> list[tf.DType]:
        """The dtype of each buffer."""
        return [self.shapes.dtypes[group[0]] for group in self.groups]

    # Architecture: K7
    def pack(self, values: Mapping[int, tf.Tensor]) -> list[tf.Tensor]:
        """Return the buffers that hold ``values``, by index."""
        flats = []
        for group in self.groups:
            parts = [tf.reshape(values[index], [-1]) for index in group]
            flats.append(parts[0] if len(parts) == 1 else tf.concat(parts, axis=0))
        return flats

    def unpack(self, flats: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        """Return the values that lie in the buffers, by index."""
        values: dict[int, tf.Tensor] = {}
        for group, flat in zip(self.groups, flats, strict=True):
            sizes = [self.shapes.numel[index] for index in group]
            parts = [flat] if len(group) == 1 else tf.split(flat, sizes)
            for index, part in zip(group, parts, strict=True):
                values[index] = tf.reshape(part, self.shapes.shapes[index])
        return values


class Residuals:
    """One `Feedback` a bucket, or None where the codec keeps none."""

    def __init__(self, reduction: Reduction, packing: Packing) -> None:
        self.feedbacks: list[Feedback | None] = [*map(reduction.feedback, packing.sizes)]
        # Of these buckets only: other ones of this size would add it to other gradients.
        self._buckets = zlib.crc32(repr(packing.groups).encode())

    @property
    def named(self) -> dict[str, tf.Variable]:
        """The variables, by the names that they have in a checkpoint."""
        return {
            name: residual
            for i, feedback in enumerate(self.feedbacks)
            if feedback is not None
            for name, residual in feedback.named(f"{i}.{self._buckets:08x}").items()
        }
