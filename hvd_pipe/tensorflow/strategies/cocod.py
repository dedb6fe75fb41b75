"""CoCoD-SGD: the models of the round's start are averaged while k local steps run.

start of round s   a snapshot x_i[s] is sent, by a thread beside the graphs of the steps
k local steps      the user's optimizer, on local gradients
end of round       x_i[s+1] = mean_j x_j[s] + (x_i - x_i[s])     then the next round starts

`ModelAverage` has the arithmetic, and the other rules for the end of a round. With
``momentum="average"`` the optimizer's momenta follow the models' rule, in messages of their own.
With fragments, each has a `ModelAverage` of its own, and they take turns::

    period 4, 2 fragments     step   1    2    3    4    5    6
                              sent   |--- 0 ---|--- 1 ---|--- 0 --

In a graph, the end of a turn is a call out of it, inside a condition that is true once in as many
steps, and with fragments inside a branch that reads two of them: what arrives, and what leaves.
With ``within="node"`` gradients are averaged over the ranks of a node, as operations of the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_pipe.cocod import assign_fragments
from hvd_pipe.runtime.process_sets import find_node
from hvd_pipe.strategy import CoCoD
from hvd_pipe.tensorflow.agree import agreement
from hvd_pipe.tensorflow.arguments import shapes_of
from hvd_pipe.tensorflow.graphs import Arrays, branch, raw, restore, variable
from hvd_pipe.tensorflow.messages.buckets import Packing
from hvd_pipe.tensorflow.messages.reduction import Reduction
from hvd_pipe.tensorflow.strategies.base import Due, Engine, Gradients, OptimizerAccess, Settings
from hvd_pipe.tensorflow.strategies.model_average import (
    FRAGMENTS,
    Part,
    as_cut,
    model_parts,
    momenta_part,
    wide,
)

Flats = Sequence[tf.Tensor]


class CoCoDEngine(Engine):
    """Local steps, with the average of the round's start in flight behind them."""

    name = CoCoD.name
    is_local = True

    def __init__(self, settings: Settings, strategy: CoCoD) -> None:
        super().__init__(settings)
        shapes = settings.shapes
        self._turn, self._count = strategy.turn, strategy.fragments
        self._warmup_steps = strategy.warmup_steps
        # A model without a gradient that travels has no tensors, and is one fragment.
        self._fragment_of = [0] * len(shapes)
        if self._count > 1:
            self._fragment_of = assign_fragments(shapes.nbytes, self._count)
        self._parts = model_parts(settings, strategy, self._fragment_of)
        if strategy.momentum == "average":
            momenta = momenta_part(settings, strategy)
            if settings.momenta:
                self._parts.append(momenta)
        self._everyone = replace(settings.reduction, weights=strategy.weights or ())
        self._node = _within_node(settings, strategy) if strategy.within == "node" else None
        self._buckets = Packing(shapes, shapes.default_groups(settings.dense[::-1]))
        self._rounds = variable([], tf.int64, f"{settings.tag}.rounds")
        self._local_steps = variable([], tf.int64, f"{settings.tag}.local_steps")

    def exchange(self, gradients: Gradients) -> Due:
        due = Due(self._averaged(gradients))
        # The first round begins with the models as they are before its first update.
        first = tf.logical_and(self._is_local(), tf.equal(self._local_steps, 0))
        tf.cond(first, self._begin, tf.no_op)
        return due

    def _averaged(self, gradients: Gradients) -> Gradients:
        """Average gradients over all ranks while these warm up, then over the node's, if any."""
        if not self._warmup_steps and self._node is None:
            return gradients
        flats = self._buckets.pack(gradients)
        if not self._warmup_steps:
            return self._buckets.unpack(self._reduced(flats, self._node, "node"))
        averaged = tf.cond(
            self._rounds < self._warmup_steps,
            partial(self._reduced, flats, self._everyone, "warmup"),
            partial(self._reduced, flats, self._node, "node"),
        )
        return self._buckets.unpack(averaged)

    def _reduced(self, flats: Flats, reduction: Reduction | None, label: str) -> Flats:
        if reduction is None:
            return flats
        tag = f"{self.settings.tag}.{label}"
        return [reduction.reduce(flat, f"{tag}.{i}") for i, flat in enumerate(flats)]

    def after_step(self, access: OptimizerAccess | None = None) -> None:
        local = self._is_local()
        counted = self._local_steps.assign_add(tf.cast(local, tf.int64))
        self._rounds.assign_add(1)
        ends = tf.logical_and(local, tf.equal(counted % self._turn, 0))
        over = [partial(self._next_turn, fragment) for fragment in range(self._count)]
        if self._count == 1:
            tf.cond(ends, over[0], tf.no_op)
            return
        ended = tf.cast((counted // self._turn - 1) % self._count, tf.int32)
        tf.cond(ends, branch(tf.switch_case, ended, over), tf.no_op)

    def drain(self, update: Callable[[Gradients], None]) -> None:
        """Make all replicas equal: the average of the models as they are now.

        With y the average in flight, mean_i (y + x_i - start_i) = mean_i x_i: without an outer
        model or anchor it need not be added. Those stay.
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
        if self._count > 1:
            found[FRAGMENTS] = np.array(self._fragment_of)
        for part in self._parts:
            found |= part.state()
        return found

    def load(self, state: Arrays) -> None:
        restore({"rounds": self._rounds, "local_steps": self._local_steps}, state)
        state = as_cut(state, self._fragment_of, self.settings.shapes)
        turn = int(self._local_steps) // self._turn % self._count
        for part in self._parts:
            part.load(state, part.fragment == turn)
        # Else a round begins anew: momenta were left alone until now, or fragments were others.
        if not all(part.average.is_ahead for part in self._of(turn)):
            self._local_steps.assign(0)

    def _is_local(self) -> tf.Tensor:
        return self._rounds >= self._warmup_steps

    def _of(self, fragment: int) -> list[Part]:
        """What takes this turn; momenta are averaged with the only fragment."""
        return [part for part in self._parts if part.fragment == fragment]

    def _begin(self) -> tf.Operation:
        first = self._of(0)
        return tf.group(tf.py_function(_weakly(self._send, 0), _flats(first), [tf.int32]))

    def _send(self, fragment: int, *flats: tf.Tensor) -> tf.Tensor:
        for part, mine in _split(self._of(fragment), flats):
            part.average.start(mine)
        return tf.constant(0)

    def _next_turn(self, ended: int) -> tf.Operation:
        """Take a fragment's average in, and send the next fragment."""
        arriving, leaving = self._of(ended), self._of((ended + 1) % self._count)
        flats = _flats(arriving) + (_flats(leaving) if self._count > 1 else [])
        with tf.control_dependencies(flats):
            there = [part.average.arrival() for part in arriving]
        dtypes = [dtype for part in arriving for dtype in part.packing.dtypes]
        with tf.control_dependencies(there):
            flats = tf.py_function(_weakly(self._finish, ended), flats, dtypes)
        for part, mine in _split(arriving, flats):
            part.assign(mine)
        return tf.no_op()

    def _finish(self, ended: int, *flats: tf.Tensor) -> list[tf.Tensor]:
        arriving = self._of(ended)
        found = [
            flat for part, mine in _split(arriving, flats) for flat in part.average.finish(mine)
        ]
        # With one fragment, what leaves is what has just arrived.
        self._send((ended + 1) % self._count, *(flats[len(found) :] or found))
        return found


def _within_node(settings: Settings, strategy: CoCoD) -> Reduction | None:
    """Return how the ranks of this node average gradients; None where it has one rank."""
    world = settings.reduction.process_set
    found = find_node(agreement, f"{settings.tag}.node", world, strategy.weights)
    if found is None:
        return None
    node, weights = found
    # A node's own links are fast: nothing is compressed.
    return replace(settings.reduction.lossless(), process_set=node, weights=weights)


def _flats(parts: Sequence[Part]) -> list[tf.Tensor]:
    return [flat for part in parts for flat in part.flats()]


def _split(parts: Sequence[Part], flats: Flats) -> list[tuple[Part, Flats]]:
    """Return each part with its vectors, which come first, in this order."""
    found, start = [], 0
    for part in parts:
        end = start + len(part.packing.groups)
        found.append((part, flats[start:end]))
        start = end
    return found


def _weakly(method: Callable[..., Any], *bound: Any) -> Callable[..., Any]:
    """Return a function for a graph, which TensorFlow keeps for ever, that keeps no engine."""
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        mine = found()
        assert mine is not None  # whoever runs the step has the optimizer
        return mine(*bound, *arguments)

    return call
