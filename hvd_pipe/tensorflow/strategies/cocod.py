"""CoCoD-SGD: the models of the round's start are averaged while k local steps run.

start of round s   a snapshot x_i[s] is sent, by a thread beside the graphs of the steps
k local steps      the user's optimizer, on local gradients
end of round       progress    x_i[s+1] = mean + (x_i - x_i[s])      CoCoD-SGD
                   outer       x_i[s+1] = g + (x_i - x_i[s])         DiLoCo's outer optimizer
                   pull-back   x_i[s+1] = x_i - alpha (x_i - z)      Overlap-Local-SGD

With ``momentum="average"`` the optimizer's momenta follow the models' rule, in messages of their
own. With fragments, each has a `ModelAverage` of its own, and they take turns::

    period 4, 2 fragments     step   1    2    3    4    5    6
                              sent   |--- 0 ---|--- 1 ---|--- 0 --

In a graph, the end of a turn is a call out of it, inside a condition that is true once in as many
steps, and with fragments inside a branch that reads two of them: what arrives, and what leaves.
With ``within="node"`` gradients are averaged over the ranks of a node, as operations of the step.

With compression, the first round sends models as they are, and all others ``x_i - (last round's
mean)``, or ``x_i - g``: what is lost then is a part of a small difference, not of the model.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_pipe.cocod import assign_fragments
from hvd_pipe.runtime.consensus import Description
from hvd_pipe.runtime.process_sets import find_node
from hvd_pipe.strategy import CoCoD
from hvd_pipe.tensorflow.agree import agreement, checked
from hvd_pipe.tensorflow.arguments import shapes_of
from hvd_pipe.tensorflow.compression import Compression
from hvd_pipe.tensorflow.graphs import Arrays, branch, raw, restore, variable
from hvd_pipe.tensorflow.measuring import timeline
from hvd_pipe.tensorflow.messages.buckets import Packing, Shapes
from hvd_pipe.tensorflow.messages.reduction import Feedback, Reduction
from hvd_pipe.tensorflow.strategies.base import Due, Engine, Gradients, OptimizerAccess, Settings

Flats = Sequence[tf.Tensor]

_THREAD = "hvd_pipe.cocod"

IN_FLIGHT = ("start", "sent")
"""Prefixes of the names in a `state` that belong to a round that is not over."""

KEPT = ("base", "anchor", "velocity", "outer", "outer_velocity")
"""Prefixes of the names that are kept over rounds; residuals have other names."""

FRAGMENTS = "fragments"
"""The name in a state of each variable's fragment; vectors are numbered over all of them."""


class ModelAverage:
    """Averages variables behind rounds of local steps: a fragment of the model, or the momenta."""

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        packing: Packing,
        reduction: Reduction,
        strategy: CoCoD,
        tag: str,
        fragment: int = 0,
        first: int = 0,
        label: str = "",
        nonnegative: Sequence[bool] | None = None,
    ) -> None:
        reduction = replace(reduction, weights=strategy.weights or ())
        self.packing, self.fragment = packing, fragment
        self._variables, self._strategy = variables, strategy
        self._first, self._label = first, label
        """The number of its first vector in a state, and what begins its names there."""
        self._nonnegative = nonnegative or [False] * len(packing.groups)
        self._is_lossy = reduction.compression is not Compression.none and not reduction.alone
        self._feedback = [reduction.feedback(size) for size in packing.sizes]
        self._name = f"{tag}.round"
        self._average = _averaging(self._name, reduction, self._feedback)
        self._average_exactly = _averaging(f"{tag}.whole", reduction.lossless())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)
        self._sent: Future[list[tf.Tensor]] | None = None
        self._changing = threading.Lock()
        with tf.init_scope(), tf.device("/cpu:0"):
            self._arrivals = tf.queue.FIFOQueue(1, [tf.bool], [()], name=f"{tag}.arrivals")
        self._start: Flats = []
        self._base: Flats = []
        self._anchor: Flats = []
        self._velocity: Flats = []

    def read(self) -> list[tf.Tensor]:
        """Return the variables, in vectors."""
        own = (index for group in self.packing.groups for index in group)
        return self.packing.pack({i: tf.convert_to_tensor(self._variables[i]) for i in own})

    def assign(self, flats: Flats) -> None:
        """Assign the vectors to the variables."""
        for flat, size in zip(flats, self.packing.sizes, strict=True):
            flat.set_shape([size])
        for index, value in self.packing.unpack(flats).items():
            self._variables[index].assign(value)

    def start(self, flats: Flats) -> None:
        """Send a snapshot."""
        self._start = [tf.identity(flat) for flat in flats]
        outgoing, average = [_wide(flat) for flat in self._start], self._average
        if self._base:
            outgoing = [flat - base for flat, base in zip(outgoing, self._base, strict=True)]
        elif self._is_lossy:
            average = self._average_exactly
        timeline.active.ready(self._name)
        self._drop_sent()
        self._sent = self._thread.submit(average, *outgoing)
        self._sent.add_done_callback(self._announce)

    def arrival(self) -> tf.Tensor:
        """Wait, as an operation of a graph, until what `start` has sent is there for `finish`.

        `finish` would wait as well, but in one of the threads that run operations, of which the
        average needs one itself: there may be one in all. Waiting for a queue takes none.
        """
        return self._arrivals.dequeue()

    def finish(self, flats: Flats) -> list[tf.Tensor]:
        """Return the models that the next round starts with; after `arrival`."""
        assert self._sent is not None
        means: Flats = self._sent.result()
        self._sent = None
        if self._base:
            means = [mean + base for mean, base in zip(means, self._base, strict=True)]
        if self._strategy.outer != "none":
            means = self._moved(means)
        if self._is_lossy:
            self._base = means
        ends = [_wide(flat) for flat in flats]
        pull = self._strategy.pull_back
        if pull is None:
            starts = [_wide(flat) for flat in self._start]
            models = [m + (x - s) for m, x, s in zip(means, ends, starts, strict=True)]
        else:
            anchors = self._moved(means) if self._strategy.anchor_momentum else means
            models = [x - pull * (x - z) for x, z in zip(ends, anchors, strict=True)]
        self._start = []
        models = [
            tf.maximum(x, 0) if clamp else x
            for x, clamp in zip(models, self._nonnegative, strict=True)
        ]
        return [tf.cast(x, flat.dtype) for x, flat in zip(models, flats, strict=True)]

    def _moved(self, means: Flats) -> Flats:
        """Move what goes from round to round towards the means, and return it.

        An anchor z: v = beta v + (mean - z), z = z + v.
        An outer model g: d = g - mean, u = mu u + d, g = g - lr (d + mu u).
        """
        rule = self._strategy
        beta, mu, lr = rule.anchor_momentum, rule.outer_momentum, rule.outer_lr
        velocity = self._velocity or [tf.zeros_like(mean) for mean in means]
        anchor = self._anchor or means
        changes = [mean - z for mean, z in zip(means, anchor, strict=True)]
        if rule.outer == "none":
            velocity = [beta * v + d for v, d in zip(velocity, changes, strict=True)]
            anchor = [z + v for z, v in zip(anchor, velocity, strict=True)]
        else:
            velocity = [mu * u - d for u, d in zip(velocity, changes, strict=True)]
            anchor = [
                g - lr * (mu * u - d) for g, d, u in zip(anchor, changes, velocity, strict=True)
            ]
        self._anchor, self._velocity = anchor, velocity
        return anchor

    def average_now(self, flats: Flats) -> list[tf.Tensor]:
        """Return the average of the models as they are, the same bits on every rank."""
        self.settle()
        means = self._average_exactly(*map(_wide, flats))
        self._drop_sent()
        self._start = []
        self._base = means if self._is_lossy else []
        return [tf.cast(mean, flat.dtype) for mean, flat in zip(means, flats, strict=True)]

    @property
    def is_ahead(self) -> bool:
        """Whether a round is on, which `finish` ends."""
        return self._sent is not None

    def settle(self) -> None:
        """Wait for what has been sent."""
        if self._sent is not None:
            self._sent.result()

    def forget(self) -> None:
        """Wait for nothing that was sent, and keep it from whatever comes."""
        self._drop_sent()
        self._start = []
        self._thread.shutdown(wait=False)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)

    def _announce(self, sent: Future[list[tf.Tensor]]) -> None:
        with self._changing:
            if sent is self._sent:
                self._arrivals.enqueue(True)

    def _drop_sent(self) -> None:
        with self._changing:
            self._sent = None
            if int(self._arrivals.size()):
                self._arrivals.dequeue()

    def state(self) -> Arrays:
        """Return copies of what the coming rounds need; waits for what has been sent."""
        flats_of = {
            "start": self._start,
            "sent": self._sent.result() if self._sent is not None else [],
            "base": self._base,
            **dict(zip(self._strategy.kept, (self._anchor, self._velocity), strict=False)),
        }
        arrays = {
            f"{self._label}{kind}.{self._first + i}": np.array(flat)
            for kind, flats in flats_of.items()
            for i, flat in enumerate(flats)
        }
        residuals = {name: residual.numpy() for name, residual in self._residuals().items()}
        return {**arrays, **residuals}

    def load(self, state: Arrays, in_turn: bool) -> None:
        """Go on from a state of all parts; only with ``in_turn`` from a round in flight."""
        self.settle()

        def flats(kind: str) -> list[tf.Tensor]:
            numbers = range(self._first, self._first + len(self.packing.groups))
            names = [f"{self._label}{kind}.{i}" for i in numbers]
            arrays = [state[name] for name in names if name in state]
            # One of other sizes means nothing here.
            is_ours = [array.size for array in arrays] == self.packing.sizes
            return [tf.constant(array) for array in arrays] if is_ours else []

        self._base = flats("base")
        self._anchor, self._velocity = map(flats, self._strategy.kept or ("", ""))
        self._start, sent = map(flats, IN_FLIGHT if in_turn else ("", ""))
        self._drop_sent()
        if sent:
            self._sent = Future()
            self._sent.set_result(sent)
            self._announce(self._sent)
        restore(self._residuals(), state)

    def _residuals(self) -> dict[str, tf.Variable]:
        return {
            name: residual
            for i, feedback in enumerate(self._feedback, self._first)
            if feedback is not None
            for name, residual in feedback.named(str(i)).items()
        }


def _averaging(name: str, reduction: Reduction, feedbacks: Sequence[Feedback | None] = ()) -> Any:
    """Return a graph that averages: outside of one, operations have no names to meet by."""

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def average(*flats: tf.Tensor) -> list[tf.Tensor]:
        return reduction.reduce_all(flats, name, feedbacks)

    def shown(*flats: tf.Tensor) -> Any:
        trace = timeline.active
        # Traced before the message leaves. As each fragment has a function of its own, TensorFlow
        # would warn of a function that is traced again and again.
        send = average.get_concrete_function(*flats)
        if not trace.is_on or reduction.alone:
            return send(*flats)
        operations = [
            trace.launched(f"{name}.{i}", reduction.wire_bytes(flat.shape[0], flat.dtype))
            for i, flat in enumerate(flats)
        ]
        means = send(*flats)
        for operation in operations:
            operation.complete()
        trace.end_step()
        return means

    return shown


def _wide(flat: tf.Tensor) -> tf.Tensor:
    """Half-precision models are averaged in float32, and rounded once a round."""
    return tf.cast(flat, tf.float32) if flat.dtype in (tf.float16, tf.bfloat16) else flat


def _momenta_part(settings: Settings, strategy: CoCoD) -> ModelAverage:
    """Return the momenta, which travel uncompressed: float16 makes zeros of second moments.

    They follow the pull-back alone: the momentum of an anchor could carry a second moment below
    zero. Progress can, so that these stop at zero.
    """

    def check() -> tuple[None, Description]:
        names = ", ".join(momentum.name for momentum in settings.momenta)
        return None, [("the optimizer's momenta, which are averaged", names or "none")]

    checked(check, f"{settings.tag}.momenta.names", settings.reduction.process_set)
    variables = [momentum.variable for momentum in settings.momenta]
    shapes = shapes_of(variables)
    groups, clamped = [], []
    for nonnegative in (False, True):
        indices = [i for i, m in enumerate(settings.momenta) if m.nonnegative == nonnegative]
        of_dtype = shapes.dtype_groups(indices)
        groups += of_dtype
        clamped += [nonnegative] * len(of_dtype)
    return ModelAverage(
        variables,
        Packing(shapes, groups),
        settings.reduction.lossless(),
        CoCoD(weights=strategy.weights, pull_back=strategy.pull_back),
        f"{settings.tag}.momenta",
        label="momenta.",
        nonnegative=clamped,
    )


def _as_cut(state: Arrays, fragment_of: Sequence[int], shapes: Shapes) -> Arrays:
    """Return a state as that of a model which is cut into these fragments.

    Of other fragments, what is kept between two rounds stays; of other variables nothing.
    """
    saved_of = [int(fragment) for fragment in state.get(FRAGMENTS, [0] * len(shapes))]
    if len(saved_of) != len(shapes):
        return {}
    saved = Packing(shapes, [group for groups in _cut(shapes, saved_of) for group in groups])
    kinds = (*IN_FLIGHT, *KEPT)
    sizes = {f"{kind}.{i}": n for kind in kinds for i, n in enumerate(saved.sizes)}
    own = {name: array for name, array in state.items() if name.partition(".")[0] in kinds}
    if any(array.size != sizes.get(name) for name, array in own.items()):
        return {}
    if saved_of == list(fragment_of):
        return state
    groups = [group for groups in _cut(shapes, fragment_of) for group in groups]
    cut: Arrays = {}
    for kind in KEPT:
        values: dict[int, npt.NDArray[Any]] = {}
        for i, group in enumerate(saved.groups):
            if f"{kind}.{i}" in state:
                ends = np.cumsum([shapes.numel[index] for index in group])
                pieces = np.split(state[f"{kind}.{i}"], ends[:-1])
                values |= dict(zip(group, pieces, strict=True))
        for i, group in enumerate(groups):
            if values.keys() >= set(group):
                cut[f"{kind}.{i}"] = np.concatenate([values[index] for index in group])
    return cut


def _cut(shapes: Shapes, fragment_of: Sequence[int]) -> list[list[list[int]]]:
    """Return for each fragment the indices of its variables, by dtype."""
    return [
        shapes.dtype_groups([i for i, own in enumerate(fragment_of) if own == fragment])
        for fragment in range(max(fragment_of, default=-1) + 1)
    ]


class CoCoDEngine(Engine):
    """Local steps, with the average of the round's start in flight behind them."""

    name = CoCoD.name
    is_local = True

    def __init__(self, settings: Settings, strategy: CoCoD) -> None:
        super().__init__(settings)
        shapes = settings.shapes
        self._turn, self._count = strategy.turn, strategy.fragments
        self._warmup_steps = strategy.warmup_steps
        # A model whose variables are all local has no fragment, and sends nothing.
        self._fragment_of = [0] * len(shapes)
        if self._count > 1:
            self._fragment_of = assign_fragments(shapes.nbytes, self._count)
        self._parts: list[ModelAverage] = []
        first, variables, reduction = 0, settings.variables, settings.reduction
        for fragment, groups in enumerate(_cut(shapes, self._fragment_of)):
            tag = f"{settings.tag}.models" + f".{fragment}" * (self._count > 1)
            packing = Packing(shapes, groups)
            part = ModelAverage(variables, packing, reduction, strategy, tag, fragment, first)
            self._parts.append(part)
            first += len(groups)
        if strategy.momentum == "average":
            momenta = _momenta_part(settings, strategy)
            if settings.momenta:
                self._parts.append(momenta)
        self._everyone = replace(reduction, weights=strategy.weights or ())
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
        return reduction.reduce_all(flats, f"{self.settings.tag}.{label}")

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
            part.assign(part.average_now(part.read()))
        self._local_steps.assign(0)

    def equalise(self, variables: Sequence[Any]) -> None:
        reduction, tag = self.settings.reduction.lossless(), self.settings.tag
        shapes = shapes_of(variables)
        packing = Packing(shapes, shapes.dtype_groups(range(len(shapes))))
        flats = packing.pack({i: tf.convert_to_tensor(raw(v)) for i, v in enumerate(variables)})
        wide = reduction.reduce_all([_wide(flat) for flat in flats], f"{tag}.equal")
        means = [tf.cast(mean, flat.dtype) for mean, flat in zip(wide, flats, strict=True)]
        for i, mean in packing.unpack(means).items():
            variables[i].assign(mean)

    def is_ahead(self) -> bool:
        return any(part.is_ahead for part in self._parts)

    def settle(self) -> None:
        for part in self._parts:
            part.settle()

    def forget(self) -> None:
        for part in self._parts:
            part.forget()
        self._local_steps.assign(0)

    def share(self) -> None:
        self.drain(lambda _: None)

    def state(self) -> Arrays:
        state = {"rounds": self._rounds.numpy(), "local_steps": self._local_steps.numpy()}
        if self._count > 1:
            state[FRAGMENTS] = np.array(self._fragment_of)
        for part in self._parts:
            state |= part.state()
        return state

    def load(self, state: Arrays) -> None:
        restore({"rounds": self._rounds, "local_steps": self._local_steps}, state)
        state = _as_cut(state, self._fragment_of, self.settings.shapes)
        turn = int(self._local_steps) // self._turn % self._count
        for part in self._parts:
            part.load(state, part.fragment == turn)
        # Else a round begins anew: momenta were left alone until now, or fragments were others.
        if not all(part.is_ahead for part in self._of(turn)):
            self._local_steps.assign(0)

    def _is_local(self) -> tf.Tensor:
        return self._rounds >= self._warmup_steps

    def _of(self, fragment: int) -> list[ModelAverage]:
        """Return the parts of a fragment; momenta belong to the only fragment."""
        return [part for part in self._parts if part.fragment == fragment]

    def _begin(self) -> tf.Operation:
        for part in self._of(0):
            tf.py_function(_turn(None, part), part.read(), [])
        return tf.no_op()

    def _next_turn(self, ended: int) -> tf.Operation:
        """Take a fragment's average in, and send the next fragment."""
        turns = zip(self._of(ended), self._of((ended + 1) % self._count), strict=True)
        for arriving, leaving in turns:
            flats = arriving.read() + (leaving.read() if leaving is not arriving else [])
            with tf.control_dependencies(flats):
                there = arriving.arrival()
            with tf.control_dependencies([there]):
                turn, dtypes = _turn(arriving, leaving), arriving.packing.dtypes
                models = tf.py_function(turn, flats, dtypes)
            arriving.assign(models)
        return tf.no_op()


def _within_node(settings: Settings, strategy: CoCoD) -> Reduction | None:
    """Return how the ranks of this node average gradients; None where it has one rank."""
    world = settings.reduction.process_set
    node_and_weights = find_node(agreement, f"{settings.tag}.node", world, strategy.weights)
    if node_and_weights is None:
        return None
    node, weights = node_and_weights
    # A node's own links are fast: nothing is compressed.
    return replace(settings.reduction.lossless(), process_set=node, weights=weights)


def _turn(arriving: ModelAverage | None, leaving: ModelAverage) -> Callable[..., Any]:
    """Return the end of a turn for a graph, which TensorFlow keeps for ever; it keeps no model."""
    begins = arriving is None
    weak = weakref.ref(arriving or leaving), weakref.ref(leaving)

    def call(*flats: tf.Tensor) -> Flats:
        arriving, leaving = (reference() for reference in weak)
        assert arriving is not None  # whoever runs the step has the optimizer
        assert leaving is not None
        arrived: Flats = []
        if not begins:
            count = len(arriving.packing.groups)
            arrived, flats = arriving.finish(flats[:count]), flats[count:]
        leaving.start(flats or arrived)  # with one fragment, what has just arrived
        return arrived

    return call
