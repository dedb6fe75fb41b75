"""Merged-gradient without the barrier, for ``fit``: some messages travel behind the next forward.

Synchronous SGD, ``w[t+1] = w[t] - lr * mean_i g_i(w[t])``. A step of Keras is one call of a graph,
which ends when all that it does is done. So what the next forward pass needs last is left to the
next call, in variables::

    call t    read pending (g[t-1]) -> all-reduce -> update of its layers    one bucket at a time
              forward ............... each layer waits for its own update
              backward -> g[t]  early buckets: all-reduce -> update
                                late buckets:  assign to pending

TensorFlow itself orders the reads and writes of each variable, so all that reads a weight inside
the step reads the new one. Between two calls, whoever uses a late weight makes its update first
(`pending`): by `drain`, alone or not, as the next call of another rank sends the same messages.

Messages leave in the plan's order, at most two at a time. All ranks trace the same graph, so no
rank waits for a message that another holds back.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow.mpi_ops import Sum
from tensorflow.python.framework import ops

from hvd_pipe.planning.overlap import first_deferred
from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime import check_mode
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.tensorflow.agree import meet
from hvd_pipe.tensorflow.graphs import (
    Arrays,
    branch,
    by_index,
    data_of_step,
    restore,
    used_since,
    variable,
)
from hvd_pipe.tensorflow.messages.buckets import Packing
from hvd_pipe.tensorflow.strategies.base import (
    Due,
    Gradients,
    OptimizerAccess,
    Settings,
    same,
    together,
)
from hvd_pipe.tensorflow.strategies.merged_gradient import MergedGradientEngine

_log = logging.getLogger("hvd_pipe")

Update = Callable[[Gradients], None]


@dataclass
class _Trace:
    """How far the step of a graph has been traced."""

    graph: weakref.ref[Any]
    begins: bool = False
    """Whether late updates have been made, and no gradients have come since."""
    applies: bool = False
    """Whether gradients have come."""
    leaves: bool = False
    """Whether some of them are left to the next step."""
    updated: int | None = None
    """How many operations there were after the update."""
    sent: list[tf.Tensor] = field(default_factory=list)
    """The results of messages, in the order in which they leave."""


class ForwardOverlapEngine(MergedGradientEngine):
    """As its base, until it has a plan with an order, and a step that begins with `begin_step`."""

    def __init__(self, settings: Settings, strategy: MergedGradient, plan: Plan | None) -> None:
        self.may_defer = False
        """Whether all ranks agree that updates may be made layer by layer."""
        self.has_saved_plan = False
        """Whether a checkpoint has brought the plan, so that no other is tried."""
        self.held: Gradients = {}
        """Gradients of a checkpoint that are still to be applied."""
        self.was_loaded = False
        """Whether a checkpoint has changed what is in flight since ranks compared it."""
        self._held_weights: Gradients = {}
        """Under ``HVD_PIPE_CHECK``, the weights of that checkpoint, which NaN has replaced."""
        self._takes_plan = plan is None
        """Whether the user has given none, and no step has been traced."""
        self._trace: _Trace | None = None
        self._obstacle: str | None = None
        """Why a step that was traced could not leave updates to the next one."""
        self._is_idle = False
        """Whether the step that was traced last does not train these variables."""
        tag = settings.tag
        self._is_pending = variable([], tf.bool, f"{tag}.is_pending")
        self.noted = {
            "iterations": variable([], tf.int64, f"{tag}.iterations"),
            "rate": variable([], tf.float64, f"{tag}.rate"),
        }
        """The iterations and the rate of the step whose updates are late."""
        super().__init__(settings, strategy, plan)

    def adopt(self, plan: Plan | None) -> None:
        """Take the plan's buckets and order; nothing is pending."""
        super().adopt(plan)
        order = () if plan is None or plan.order is None else plan.order
        self._order = order
        self._alone: Callable[[], None] | None = None
        self._first_late = first_deferred(plan) if plan is not None and order else 0
        self._late = frozenset(order[self._first_late :])
        counts = [max(1, order.count(bucket)) for bucket in range(len(self._packing.groups))]
        self._sizes = [
            [size * (i + 1) // n - size * i // n for i in range(n)]
            for n, size in zip(counts, self._packing.sizes, strict=True)
        ]
        """By bucket, the sizes of its pieces, which are about equal."""
        self._piece = [order[:place].count(bucket) for place, bucket in enumerate(order)]
        """By place in the order, which piece of its bucket a message is."""
        self._kept: dict[int, tf.Variable] = {
            place: variable(
                [self._sizes[bucket][self._piece[place]]],
                self._packing.dtypes[bucket],
                f"{self.settings.tag}.pending.{place}",
            )
            for place, bucket in enumerate(order)
            if bucket in self._late
        }
        """By place in the order, of late buckets: what is to be sent, or has been averaged."""
        late = [index for bucket in sorted(self._late) for index in self._packing.groups[bucket]]
        shapes = self.settings.shapes
        self._covered: dict[int, tf.Variable] = {
            index: variable(shapes.shapes[index], shapes.dtypes[index], f"covered.{index}")
            for index in (late if check_mode.active.on else ())
        }
        """By index, the late weights, which NaN replaces between two steps."""

    @property
    def defers(self) -> bool:
        return bool(self._late) and self.may_defer and not self.settings.reduction.alone

    def problem(self) -> str | None:
        """Return why messages of this engine cannot be left to the next step, or None."""
        if self.settings.sparse:
            name = self.settings.shapes.names[min(self.settings.sparse)]
            return f"the gradient of {name!r} is sparse (sparse_as_dense=True sends a dense one)"
        if self.settings.reduction.codec is not None:
            return "compressed messages have residuals of their own"
        return self._obstacle

    # A step.

    def _traced(self) -> _Trace:
        """Return the trace of the current graph's step."""
        graph = ops.get_default_graph()
        if self._trace is None or self._trace.graph() is not graph:
            self._trace = _Trace(weakref.ref(graph))
        return self._trace

    def begin_step(self, update: Update) -> None:
        """Before the forward pass, in its graph: finish the step before, bucket by bucket."""
        if tf.executing_eagerly() or not self.defers or self._is_idle:
            return
        trace = self._traced()
        trace.begins, trace.sent = True, []
        with tf.control_dependencies(data_of_step()):
            self._finish(update, trace.sent)

    def _finish(self, update: Update, sent: list[tf.Tensor]) -> None:
        pending = self._is_pending.read_value()

        def uncover() -> None:
            for index, covered in self._covered.items():
                self.settings.variables[index].assign(covered.read_value())

        if self._covered:
            tf.cond(pending, branch(uncover), tf.no_op)
        flats = {place: kept.read_value() for place, kept in self._kept.items()}
        for place in range(self._first_late, len(self._order)):
            flats[place] = self._send(flats[place], f"late.{place}", sent, pending)
        for gradients in self._whole(flats):
            tf.cond(pending, branch(update, gradients), tf.no_op)
        with tf.control_dependencies(list(flats.values())):  # it stays pending where one fails
            self._is_pending.assign(False)

    def exchange(self, gradients: Gradients) -> Due:
        self._takes_plan = False
        if tf.executing_eagerly():
            return super().exchange(gradients)
        trace = self._traced()
        if trace.applies:
            self._obstacle = "a step applies gradients more than once"
        trace.applies = True
        if not trace.begins:
            check = tf.debugging.Assert(tf.logical_not(self._is_pending), [_PENDING])
            with tf.control_dependencies([check]):
                gradients = {i: same(gradient) for i, gradient in gradients.items()}
            return super().exchange(gradients)
        trace.begins, trace.leaves = False, True
        if self.times is not None:
            gradients = self.times.watched(gradients)
        flats: dict[int, tf.Tensor] = {}
        pieces = [
            tf.split(flat, sizes) if len(sizes) > 1 else [flat]
            for flat, sizes in zip(self._packing.pack(gradients), self._sizes, strict=True)
        ]
        for place, bucket in enumerate(self._order):
            flat = pieces[bucket][self._piece[place]]
            is_early = place < self._first_late
            flats[place] = self._send(flat, f"gradients.{place}", trace.sent) if is_early else flat
        for place, kept in self._kept.items():
            kept.assign(flats[place])
        self._is_pending.assign(True)
        *others, last = self._whole(flats, early=True)
        if self.times is not None:
            last = self.times.arrived(last)
        return Due(together([*others, last]), note=self._note)

    def _note(self, iterations: Any, rate: Any) -> None:
        self.noted["iterations"].assign(tf.cast(iterations, tf.int64))
        self.noted["rate"].assign(tf.cast(rate, tf.float64))

    def after_step(self, access: OptimizerAccess | None = None) -> None:
        super().after_step(access)
        if tf.executing_eagerly():
            return
        trace = self._traced()
        if trace.leaves:
            for index, covered in self._covered.items():
                weight = self.settings.variables[index]
                covered.assign(weight.read_value())
                weight.assign(tf.fill(weight.shape, tf.constant(np.nan, weight.dtype)))
        trace.updated = len(ops.get_default_graph().get_operations())

    def end_step(self) -> bool:
        """Look, at the end of a step's graph, for operations that use what has been updated.

        Return whether steps that were traced before begin with other updates.
        """
        trace = self._traced()
        if trace.updated is not None:
            handles = [variable.handle for variable in self.settings.variables]
            for index in used_since(trace.graph(), trace.updated, handles):
                name = self.settings.shapes.names[index]
                self._obstacle = self._obstacle or f"a step uses {name!r} after its update"
        trace.leaves, trace.updated, trace.sent = False, None, []
        was_idle, self._is_idle = self._is_idle, not trace.applies
        return self.defers and was_idle is not self._is_idle

    def _send(
        self, flat: tf.Tensor, name: str, sent: list[tf.Tensor], when: tf.Tensor | None = None
    ) -> tf.Tensor:
        """Reduce, behind the message before the last one; late ones only ``when`` pending."""
        name, reduce = f"{self.settings.tag}.{name}", self.settings.reduction.reduce
        with tf.control_dependencies(sent[-2:-1]):
            if when is None:
                reduced = reduce(flat, name)
            else:
                reduced = tf.cond(when, partial(reduce, flat, name), lambda: tf.identity(flat))
        sent.append(reduced)
        return reduced

    def _whole(self, flats: dict[int, tf.Tensor], early: bool = False) -> list[Gradients]:
        """Return the gradients of the early or the late buckets, as their messages are ordered."""
        places: dict[int, list[int]] = {}
        for place, bucket in enumerate(self._order):
            if (bucket in self._late) is not early:
                places.setdefault(bucket, []).append(place)
        buckets: list[Gradients] = []
        for bucket, bucket_places in sorted(places.items(), key=lambda pair: pair[1][-1]):
            packing = Packing(self.settings.shapes, [self._packing.groups[bucket]])
            flat = tf.concat([flats[place] for place in bucket_places], axis=0)
            buckets.append(packing.unpack([flat]))
        return buckets

    # Between two steps.

    def is_ahead(self) -> bool:
        return bool(self.held) or bool(self._is_pending.numpy())

    def meet(self) -> None:
        """Compare what is in flight with the other ranks; all come here before they go on."""
        self.was_loaded = False
        first = f"late.{self._first_late}" if self.defers else "gradients.0"
        is_held = [index in self.held for index in range(len(self.settings.shapes))]
        is_held.append(bool(self._is_pending.numpy()))
        meet(is_held, f"{self.settings.tag}.{first}", self.settings.reduction)

    def drain(self, update: Update) -> None:
        if self.was_loaded:
            self.meet()
        if self.held:
            held, self.held = self.held, {}
            for index, weight in self._held_weights.items():
                self.settings.variables[index].assign(weight)
            groups = self.settings.shapes.dtype_groups(sorted(held))
            packing, reduction = Packing(self.settings.shapes, groups), self.settings.reduction
            flats = reduction.reduce_all(packing.pack(held), f"{self.settings.tag}.held")
            update(packing.unpack(flats))
        if not self._is_pending.numpy():
            return
        if self._alone is None:  # a graph: eager operations lose the names of their messages
            self._alone = tf.function(lambda: self._finish(update, []), autograph=False)
        self._alone()

    def state(self) -> Arrays:
        """Return the gradients still to be applied, each rank's own, and the plan that stays."""
        state = super().state()
        if self.plan is not None and self.plan.tried_forward:
            index_of = {name: str(i) for i, name in enumerate(self.settings.shapes.names)}
            state[_PLAN] = np.array(_renamed(self.plan, index_of).to_json())
            state[_WORKERS] = np.array(self.settings.reduction.workers)
        pending, weights = self.held, self._held_weights
        if not pending and self._is_pending.numpy():
            weights = self._covered
            reduction = self.settings.reduction
            share = 1.0 / reduction.workers if reduction.op == Sum else 1.0
            flats = {
                place: kept.read_value() * (share if place < self._first_late else 1.0)
                for place, kept in self._kept.items()
            }
            pending = together(self._whole(flats))
        if pending:
            state |= {f"gradient.{i}": np.asarray(gradient) for i, gradient in pending.items()}
            state |= {f"weight.{i}": np.asarray(weight) for i, weight in weights.items()}
            state |= {name: noted.numpy() for name, noted in self.noted.items()}
        return state

    def load(self, state: Arrays) -> None:
        shapes, dtypes = self.settings.shapes.shapes, self.settings.shapes.dtypes
        if self._takes_plan and state.get(_WORKERS) == self.settings.reduction.workers:
            names = self.settings.shapes.names
            plan = Plan.from_json(str(state[_PLAN]))
            if set(plan.names) == set(map(str, self.settings.dense)):
                self.adopt(_renamed(plan, {name: names[int(name)] for name in plan.names}))
                self.has_saved_plan = True
        super().load({name: state[name] for name in self._residuals.named.keys() & state.keys()})
        restore(self.noted, state)
        self.was_loaded |= self.is_ahead()
        self._is_pending.assign(False)
        self.held, self._held_weights = {}, {}
        gradients, weights = by_index(state, "gradient."), by_index(state, "weight.")
        if all(i < len(shapes) and list(g.shape) == shapes[i] for i, g in gradients.items()):
            self.held = {i: tf.constant(gradient, dtypes[i]) for i, gradient in gradients.items()}
            self._held_weights = {i: tf.constant(w, dtypes[i]) for i, w in weights.items()}
            self.was_loaded |= bool(gradients)
        else:
            _log.warning(
                "the update that was in flight is lost, as it does not fit the variables here: "
                "load with the model that it was saved with, or call optimizer.synchronize() on "
                "all ranks before saving"
            )


_PLAN, _WORKERS = "plan", "workers"
"""Keys of a state: the chosen plan, and for how many workers."""

_PENDING = (
    "gradients were applied while updates of the step before were still to come: under "
    "overlap='forward', call optimizer.synchronize() on all ranks before a step outside of fit."
)


def _renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return the plan of other names: Keras may call the variables of two models differently."""
    return replace(plan, buckets=tuple(tuple(names[n] for n in b) for b in plan.buckets))
