"""What a stage's optimizer needs: learning rates by replicas, and sums over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import Average, ProcessSet, Sum

from hvd_pipe.tensorflow.messages.buckets import Packing, Shapes

__all__ = ["ByMinibatch", "Replicas", "add", "scaled"]


class Replicas:
    """The workers of a stage, and what they add up.

    A stage's gradients are all there at the same time, so all of one dtype are one message.

    Args:
        process_set: The ranks.
        stage: Its number, for the names of messages.
        weights: What is trained.
    """

    def __init__(self, process_set: ProcessSet, stage: int, weights: Sequence[Any]) -> None:
        self._process_set, self._tag = process_set, f"hvd_pipe.pipeline.gradients.{stage}"
        shapes = Shapes(
            [each.path for each in weights],
            [each.shape for each in weights],
            [each.dtype for each in weights],
        )
        self._packing = Packing(shapes, shapes.default_groups(range(len(shapes))[::-1], None))
        self._sum = tf.function(self._summed, autograph=False)

    def add(self, gradient: list[Any]) -> list[Any]:
        """Return the sum over all workers of the stage; all of them call this."""
        return list(self._sum(gradient))

    def average(self, variables: Sequence[Any]) -> None:
        """Give variables their mean over the workers of the stage; all of them call this."""
        for place, each in enumerate(variables):
            # In double precision, so that what is alike, as frozen weights are, stays as it is.
            mean = mpi_ops._allreduce(
                tf.cast(each.value.read_value(), tf.float64),
                name=f"{self._tag}.state.{place}",
                op=Average,
                process_set=self._process_set,
            )
            each.assign(tf.cast(mean, each.dtype))

    def _summed(self, gradient: list[Any]) -> list[Any]:
        flats = self._packing.pack(dict(enumerate(gradient)))
        sums = [
            mpi_ops._allreduce(
                flat,
                name=f"{self._tag}.{number}",
                op=Sum,
                ignore_name_scope=True,
                process_set=self._process_set,
            )
            for number, flat in enumerate(flats)
        ]
        found = self._packing.unpack(sums)
        return [found[place] for place in range(len(gradient))]


class ByMinibatch(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A schedule that counts minibatches, of which an update may take several.

    Args:
        schedule: The user's.
        scale: Multiplies its rates.

    Example:
        >>> halving = keras.optimizers.schedules.PiecewiseConstantDecay([3], [1.0, 0.5])
        >>> rate = ByMinibatch(halving, scale=2.0)
        >>> for update in range(4):
        ...     print(update, float(rate(update)))
        ...     rate.advance(minibatches=2)
        0 2.0
        1 2.0
        2 1.0
        3 1.0
    """

    def __init__(self, schedule: Any, scale: float) -> None:
        self._schedule, self._scale = schedule, scale
        self.minibatches = tf.Variable(0, trainable=False, dtype=tf.int64)
        """How many there were."""

    def __call__(self, _: Any) -> Any:
        """Return the rate of the next update, whatever its number."""
        return self._schedule(self.minibatches) * self._scale

    def advance(self, minibatches: int) -> None:
        """Count the minibatches of an update."""
        self.minibatches.assign_add(minibatches)

    def get_config(self) -> dict[str, Any]:
        """Return what Keras would save."""
        return {"schedule": self._schedule, "scale": self._scale}


def scaled(optimizer: Any, scale: float) -> Any:
    """Return an optimizer whose rates are scaled, and whose schedule counts minibatches.

    Args:
        optimizer: Of a stage, new.
        scale: R_s / R_0, or 1.

    Example:
        >>> float(scaled(keras.optimizers.SGD(0.5), 2.0).learning_rate)
        1.0
    """
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        optimizer._learning_rate = ByMinibatch(rate, scale)
    elif scale != 1.0:
        optimizer.learning_rate = float(rate) * scale
    return optimizer


def add(value: float, name: str, ranks: ProcessSet) -> float:
    """Return the sum of all ranks' numbers."""
    number = tf.constant(value, tf.float64)
    return float(mpi_ops._allreduce(number, name=name, op=Sum, process_set=ranks))
