"""CoCoD-SGD: the models of the round's start are averaged while k local steps run.

start of round s   a snapshot x_i[s] is sent, by a thread beside the graphs of the steps
k local steps      the user's optimizer, on local gradients
end of round       x_i[s+1] = mean_j x_j[s] + (x_i - x_i[s])     then the next round starts

`ModelAverage` has the arithmetic, and Overlap-Local-SGD's rule for the end of a round. In a graph,
a round's border is a call out of it, inside a condition that is true once in k steps. With
``momentum="average"`` the optimizer's momenta follow the models' rule, in messages of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvd_pipe.strategy import CoCoD
from hvd_pipe.tensorflow.agree import Description, checked
from hvd_pipe.tensorflow.arguments import shapes_of
from hvd_pipe.tensorflow.graphs import Arrays, raw, restore, variable
from hvd_pipe.tensorflow.measuring import timeline
from hvd_pipe.tensorflow.messages.buckets import Packing
from hvd_pipe.tensorflow.strategies.base import Due, Engine, Gradients, OptimizerAccess, Settings
from hvd_pipe.tensorflow.strategies.model_average import ModelAverage, wide

__all__ = ["CoCoDEngine"]


class CoCoDEngine(Engine):
    """Local steps, with the average of the round's start in flight behind them."""

    name = CoCoD.name
    is_local = True

    def __init__(self, settings: Settings, strategy: CoCoD) -> None:
        super().__init__(settings)
        shapes = settings.shapes
        self._period, self._warmup_steps = strategy.period, strategy.warmup_steps
        models = Packing(shapes, shapes.dtype_groups(range(len(shapes))))
        average = ModelAverage(
            settings.reduction, strategy, models.sizes, f"{settings.tag}.models"
        )
        self._parts = [_Part("", settings.variables, models, average)]
        if strategy.momentum == "average":
            _check_momenta(settings)
            if settings.momenta:
                self._parts.append(_momenta(settings, strategy))
        self._warmup = Packing(shapes, shapes.default_groups(settings.dense[::-1]))
        self._rounds = variable([], tf.int64, f"{settings.tag}.rounds")
        self._local_steps = variable([], tf.int64, f"{settings.tag}.local_steps")

    def exchange(self, gradients: Gradients) -> Due:
        due = self._average_warm(gradients) if self._warmup_steps else Due(gradients)
        # The first round begins with the models as they are before its first update.
        first = tf.logical_and(self._is_local(), tf.equal(self._local_steps, 0))
        tf.cond(first, self._begin, tf.no_op)
        return due

    def _average_warm(self, gradients: Gradients) -> Due:
        reduction, tag = self.settings.reduction, self.settings.tag
        step, weigh = timeline.current(), self._parts[0].average.weigh

        def averaged() -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            flats = [
                reduction.reduce(weigh(flat), f"{tag}.warmup.{i}")
                for i, flat in enumerate(self._warmup.pack(gradients))
            ]
            return flats, [] if step is None else step.part()

        def local() -> tuple[list[tf.Tensor], list[tf.Tensor]]:
            return self._warmup.pack(gradients), [] if step is None else step.part()

        flats, notes = tf.cond(self._is_warm(), averaged, local)
        if step is not None:
            step.whole(notes)
        return Due(self._warmup.unpack(flats))

    def after_step(self, access: OptimizerAccess | None = None) -> None:
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
        for part in self._parts:
            part.assign(part.average.average_now(part.flats()))
        self._local_steps.assign(0)

    def equalise(self, variables: Sequence[Any]) -> None:
        reduction, tag = self.settings.reduction.lossless(), self.settings.tag
        shapes = shapes_of(variables)
        packing = Packing(shapes, shapes.dtype_groups(range(len(shapes))))
        flats = packing.pack({i: tf.convert_to_tensor(raw(v)) for i, v in enumerate(variables)})
        means = [
            tf.cast(reduction.reduce(wide(flat), f"{tag}.equal.{i}"), flat.dtype)
            for i, flat in enumerate(flats)
        ]
        for i, mean in packing.unpack(means).items():
            variables[i].assign(mean)

    def is_ahead(self) -> bool:
        return any(part.average.is_ahead for part in self._parts)

    def settle(self) -> None:
        for part in self._parts:
            part.average.settle()

    def forget(self) -> None:
        for part in self._parts:
            part.average.forget()
        self._local_steps.assign(0)

    def share(self) -> None:
        self.drain(lambda _: None)

    def state(self) -> Arrays:
        found = {"rounds": self._rounds.numpy(), "local_steps": self._local_steps.numpy()}
        for part in self._parts:
            found |= {part.label + name: each for name, each in part.average.state().items()}
        return found

    def load(self, state: Arrays) -> None:
        restore({"rounds": self._rounds, "local_steps": self._local_steps}, state)
        for part in self._parts:
            part.average.load(
                {
                    name.removeprefix(part.label): each
                    for name, each in state.items()
                    if name.startswith(part.label)
                }
            )
        # Momenta that were left alone until now begin with a round of their own.
        is_whole = all(part.average.is_ahead for part in self._parts)
        if not is_whole:
            self._local_steps.assign(0)

    def _is_local(self) -> tf.Tensor:
        return self._rounds >= self._warmup_steps

    def _is_warm(self) -> tf.Tensor:
        return self._rounds < self._warmup_steps

    def _flats(self) -> list[tf.Tensor]:
        return [flat for part in self._parts for flat in part.flats()]

    def _split(self, flats: Sequence[tf.Tensor]) -> list[tuple[_Part, Sequence[tf.Tensor]]]:
        found, start = [], 0
        for part in self._parts:
            end = start + len(part.packing.groups)
            found.append((part, flats[start:end]))
            start = end
        return found

    def _begin(self) -> tf.Operation:
        return tf.group(tf.py_function(_weakly(self._send), self._flats(), [tf.int32]))

    def _send(self, *flats: tf.Tensor) -> tf.Tensor:
        for part, mine in self._split(flats):
            part.average.start(mine)
        return tf.constant(0)

    def _next_round(self) -> tf.Operation:
        dtypes = [dtype for part in self._parts for dtype in part.packing.dtypes]
        flats = self._flats()
        asked = []
        if timeline.active.is_on:
            with tf.control_dependencies(flats):
                asked = [tf.py_function(_weakly(self._ask), [], tf.int32)]
        with tf.control_dependencies([*flats, *asked]):
            there = [part.average.arrival() for part in self._parts]
        with tf.control_dependencies(there):
            flats = tf.py_function(_weakly(self._finish), flats, dtypes)
        for part, mine in self._split(flats):
            part.assign(mine)
        return tf.no_op()

    def _ask(self) -> tf.Tensor:
        for part in self._parts:
            part.average.ask()
        return tf.constant(0)

    def _finish(self, *flats: tf.Tensor) -> list[tf.Tensor]:
        found = [(part, part.average.finish(mine)) for part, mine in self._split(flats)]
        for part, mine in found:
            part.average.start(mine)
        return [flat for _, mine in found for flat in mine]


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for a graph, which TensorFlow keeps for ever, that keeps no engine."""
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        mine = found()
        assert mine is not None  # whoever runs the step has the optimizer
        return mine(*arguments)

    return call


@dataclass(frozen=True)
class _Part:
    """Variables that are averaged: the model's, or the momenta.

    Args:
        label: Begins the names of its state.
        variables: By index.
        packing: How they lie in flat vectors.
        average: What becomes of these.
    """

    label: str
    variables: Sequence[tf.Variable]
    packing: Packing
    average: ModelAverage

    def flats(self) -> list[tf.Tensor]:
        return self.packing.pack(dict(enumerate(map(tf.convert_to_tensor, self.variables))))

    def assign(self, flats: Sequence[tf.Tensor]) -> None:
        for flat, size in zip(flats, self.packing.sizes, strict=True):
            flat.set_shape([size])
        for index, value in self.packing.unpack(flats).items():
            self.variables[index].assign(value)


def _momenta(settings: Settings, strategy: CoCoD) -> _Part:
    """Return the momenta, which travel uncompressed: float16 makes zeros of second moments.

    They follow the pull-back, but no momentum of an anchor or an outer optimizer, which could
    carry a second moment below zero. Progress can, so that these stop at zero.
    """
    variables = [each.variable for each in settings.momenta]
    shapes = shapes_of(variables)
    groups, clamped = [], []
    for nonnegative in (False, True):
        indices = [i for i, m in enumerate(settings.momenta) if m.nonnegative == nonnegative]
        same = shapes.dtype_groups(indices)
        groups += same
        clamped += [nonnegative] * len(same)
    packing = Packing(shapes, groups)
    average = ModelAverage(
        settings.reduction.lossless(),
        CoCoD(weights=strategy.weights, pull_back=strategy.pull_back),
        packing.sizes,
        f"{settings.tag}.momenta",
        clamped,
    )
    return _Part("momenta.", variables, packing, average)


def _check_momenta(settings: Settings) -> None:
    """Raise on all ranks where they have other momenta, as with a momentum of 0 on one of them."""

    def check() -> tuple[None, Description]:
        names = ", ".join(each.name for each in settings.momenta)
        return None, [("the optimizer's momenta, which are averaged", names or "none")]

    checked(check, f"{settings.tag}.momenta.names", settings.reduction.process_set)
