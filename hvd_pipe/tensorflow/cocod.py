"""CoCoD-SGD: the models of the round's start are averaged while k local steps run.

start of round s   a snapshot x_i[s] is sent, by a thread beside the graphs of the steps
k local steps      the user's optimizer, on local gradients
end of round       x_i[s+1] = mean_j x_j[s] + (x_i - x_i[s])     then the next round starts

`ModelAverage` has the arithmetic, and Overlap-Local-SGD's rule for the end of a round. In a graph,
a round's border is a call out of it, inside a condition that is true once in k steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_pipe.strategy import CoCoD
from hvd_pipe.tensorflow.engine import (
    Arrays,
    Due,
    Engine,
    Gradients,
    Peek,
    Settings,
    raw,
    variable,
)
from hvd_pipe.tensorflow.model_average import ModelAverage
from hvd_pipe.tensorflow.packing import DEFAULT_BUCKET_BYTES, Packing, default_groups

__all__ = ["CoCoDEngine"]


class CoCoDEngine(Engine):
    """Local steps, with the average of the round's start in flight behind them."""

    name = CoCoD.name

    def __init__(self, settings: Settings, strategy: CoCoD) -> None:
        super().__init__(settings)
        shapes = settings.shapes
        self._period, self._warmup_steps = strategy.period, strategy.warmup_steps
        self._models = Packing(shapes, shapes.kinds(range(len(shapes))))
        self._average = ModelAverage(
            settings.reduction, strategy, self._models.sizes, f"{settings.tag}.models"
        )
        self._warmup = Packing(
            shapes, default_groups(shapes, settings.dense, DEFAULT_BUCKET_BYTES)
        )
        self._rounds = variable([], tf.int64, f"{settings.tag}.rounds")
        self._local_steps = variable([], tf.int64, f"{settings.tag}.local_steps")

    def exchange(self, gradients: Gradients) -> Due:
        if not self._warmup_steps:
            return Due(gradients)
        reduction, tag = self.settings.reduction, self.settings.tag

        def averaged() -> list[tf.Tensor]:
            return [
                reduction.reduce(flat, f"{tag}.warmup.{i}")
                for i, flat in enumerate(self._warmup.pack(gradients))
            ]

        flats = tf.cond(self._is_warm(), averaged, lambda: self._warmup.pack(gradients))
        return Due(self._warmup.unpack(flats))

    def before_update(self) -> None:
        """Begin the first round with the models as they are before its first update."""
        first = tf.logical_and(self._is_local(), tf.equal(self._local_steps, 0))
        tf.cond(first, self._begin, tf.no_op)

    def after_step(self, peek: Peek | None = None) -> None:
        local = self._is_local()
        counted = self._local_steps.assign_add(tf.cast(local, tf.int64))
        self._rounds.assign_add(1)
        ends = tf.logical_and(local, tf.equal(counted % self._period, 0))
        tf.cond(ends, self._next_round, tf.no_op)

    def drain(self, update: Callable[[Gradients], None]) -> None:
        """Make all replicas equal: the average of the models as they are now.

        With y the average in flight, mean_i (y + x_i - start_i) = mean_i x_i, so what is in flight
        need not be added.
        """
        self._assign(self._average.average_now(self._flats()))
        self._local_steps.assign(0)

    def equalise(self, variables: Sequence[Any]) -> None:
        reduction, tag = self.settings.reduction.lossless(), self.settings.tag
        for i, each in enumerate(variables):
            flat = tf.reshape(tf.convert_to_tensor(raw(each)), [-1])
            mean = reduction.reduce(flat, f"{tag}.equal.{i}")
            each.assign(tf.reshape(mean, each.shape))

    def settle(self) -> None:
        self._average.settle()

    def state(self) -> Arrays:
        counters = {"rounds": self._rounds.numpy(), "local_steps": self._local_steps.numpy()}
        return {**counters, **self._average.state()}

    def load(self, state: Arrays) -> None:
        self._rounds.assign(state["rounds"])
        self._local_steps.assign(state["local_steps"])
        self._average.load(state)

    def _is_local(self) -> tf.Tensor:
        return self._rounds >= self._warmup_steps

    def _is_warm(self) -> tf.Tensor:
        return self._rounds < self._warmup_steps

    def _flats(self) -> list[tf.Tensor]:
        return self._models.pack(
            dict(enumerate(map(tf.convert_to_tensor, self.settings.variables)))
        )

    def _assign(self, flats: list[tf.Tensor]) -> None:
        for place, value in self._models.unpack(flats).items():
            self.settings.variables[place].assign(value)

    def _begin(self) -> tf.Operation:
        return tf.group(tf.py_function(self._send, self._flats(), [tf.int32]))

    def _send(self, *flats: tf.Tensor) -> tf.Tensor:
        self._average.start(flats)
        return tf.constant(0)

    def _next_round(self) -> tf.Operation:
        flats = tf.py_function(self._finish, self._flats(), self._models.dtypes)
        for flat, size in zip(flats, self._models.sizes, strict=True):
            flat.set_shape([size])
        self._assign(flats)
        return tf.no_op()

    def _finish(self, *flats: tf.Tensor) -> list[tf.Tensor]:
        found = self._average.finish(flats)
        self._average.start(found)
        return found
