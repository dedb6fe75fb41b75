"""What CoCoD sends: flat vectors of models, and what becomes of them, outside of any graph.

    start(x_i)    the models as they are leave, in a thread of their own
    finish(x_i)   progress    x_i = mean + (x_i - x_i at the start)      CoCoD-SGD
                  outer       x_i = g + (x_i - x_i at the start)         DiLoCo's outer optimizer
                  pull-back   x_i = x_i - alpha (x_i - z)                Overlap-Local-SGD

With compression, the first round sends models as they are, and all others ``x_i - (last round's
mean)``, or ``x_i - g``: what is lost then is a part of a small difference, not of the model.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_pipe.runtime.consensus import Description
from hvd_pipe.strategy import CoCoD
from hvd_pipe.tensorflow.agree import checked
from hvd_pipe.tensorflow.arguments import shapes_of
from hvd_pipe.tensorflow.compression import Compression
from hvd_pipe.tensorflow.graphs import Arrays, restore
from hvd_pipe.tensorflow.measuring import timeline
from hvd_pipe.tensorflow.messages.buckets import Packing, Shapes
from hvd_pipe.tensorflow.messages.reduction import Feedback, Reduction
from hvd_pipe.tensorflow.strategies.base import Settings

Flats = Sequence[tf.Tensor]

IN_FLIGHT = ("start", "sent")
"""What begins the names in a `state` of what belongs to a round that is not over."""

KEPT = ("base", "anchor", "velocity", "outer", "outer_velocity")
"""The same of what goes from round to round; residuals have names of their own."""

_HALF = (tf.float16, tf.bfloat16)


class ModelAverage:
    """Averages flat vectors behind a round of local steps.

    Args:
        reduction: How they are averaged, but for weights.
        strategy: These, and what `finish` does.
        sizes: How many elements each vector has.
        tag: Begins the messages' names.
        nonnegative: For each vector, whether its values may not become negative; none of them by
            default.
    """

    def __init__(
        self,
        reduction: Reduction,
        strategy: CoCoD,
        sizes: Sequence[int],
        tag: str,
        nonnegative: Sequence[bool] | None = None,
    ) -> None:
        reduction = replace(reduction, weights=strategy.weights or ())
        self._alpha, self._beta = strategy.pull_back, strategy.anchor_momentum
        self._kept, self._outer = strategy.kept, None
        if strategy.outer != "none":
            self._outer = (strategy.outer_lr, strategy.outer_momentum)
        self._nonnegative = nonnegative or [False] * len(sizes)
        self._is_lossy = reduction.compression is not Compression.none and not reduction.alone
        self._feedback: list[Feedback | None] = [reduction.feedback(size) for size in sizes]
        self._sizes = list(sizes)
        nothing = [None] * len(self._feedback)
        self._name = f"{tag}.round"
        self._average = self._averaging(f"{tag}.round", reduction, self._feedback)
        self._average_exactly = self._averaging(f"{tag}.whole", reduction.lossless(), nothing)
        self._thread = _communication_thread()
        self._sent: Future[list[tf.Tensor]] | None = None
        self._changing = threading.Lock()
        with tf.init_scope(), tf.device("/cpu:0"):
            self._arrivals = tf.queue.FIFOQueue(1, [tf.bool], [()], name=f"{tag}.arrivals")
        self._start: list[tf.Tensor] = []
        self._base: list[tf.Tensor] = []
        self._anchor: list[tf.Tensor] = []
        self._velocity: list[tf.Tensor] = []

    def start(self, flats: Flats) -> None:
        """Send a snapshot."""
        self._start = [tf.identity(flat) for flat in flats]
        outgoing, average = [wide(flat) for flat in self._start], self._average
        if self._base:
            outgoing = [flat - base for flat, base in zip(outgoing, self._base, strict=True)]
        elif self._is_lossy:
            average = self._average_exactly
        timeline.active.ready(self._name)
        self._leave()
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
        means = self._arrive()
        if self._outer is not None:
            means = self._outer_moved(means, *self._outer)
        if self._is_lossy:
            self._base = means
        ends = [wide(flat) for flat in flats]
        if self._alpha is None:
            starts = [wide(flat) for flat in self._start]
            found = [m + (x - s) for m, x, s in zip(means, ends, starts, strict=True)]
        else:
            pull = self._alpha
            anchors = self._moved(means)
            found = [x - pull * (x - z) for x, z in zip(ends, anchors, strict=True)]
        self._start = []
        found = [
            tf.maximum(x, 0) if clamp else x
            for x, clamp in zip(found, self._nonnegative, strict=True)
        ]
        return [tf.cast(x, flat.dtype) for x, flat in zip(found, flats, strict=True)]

    def average_now(self, flats: Flats) -> list[tf.Tensor]:
        """Return the average of the models as they are, the same bits on every rank."""
        self.settle()
        means = self._average_exactly(*(wide(flat) for flat in flats))
        self._leave()
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
        self._leave()
        self._start = []
        self._thread.shutdown(wait=False)
        self._thread = _communication_thread()

    def state(self) -> Arrays:
        """Return copies of what the coming rounds need; waits for what has been sent."""
        flats_of = {
            "start": self._start,
            "sent": self._sent.result() if self._sent is not None else [],
            "base": self._base,
            **dict(zip(self._kept, (self._anchor, self._velocity), strict=False)),
        }
        found = {
            f"{label}.{i}": np.array(flat)
            for label, flats in flats_of.items()
            for i, flat in enumerate(flats)
        }
        return {**found, **{name: each.numpy() for name, each in self._residuals().items()}}

    def load(self, state: Arrays) -> None:
        """Go on from a `state`; one of other sizes holds nothing that means something here."""
        self.settle()
        sizes = {f".{i}": size for i, size in enumerate(self._sizes)}
        if any(
            each.size != sizes.get(name.removeprefix(label))
            for name, each in state.items()
            for label in (*IN_FLIGHT, *KEPT)
            if name.startswith(f"{label}.")
        ):
            state = {}

        def flats(label: str) -> list[tf.Tensor]:
            count = sum(name.startswith(f"{label}.") for name in state)
            return [tf.constant(state[f"{label}.{i}"]) for i in range(count)]

        self._start, self._base = flats("start"), flats("base")
        self._anchor, self._velocity = map(flats, self._kept or ("", ""))
        self._leave()
        sent = flats("sent")
        if sent:
            self._sent = Future()
            self._sent.set_result(sent)
            self._announce(self._sent)
        restore(self._residuals(), state)

    def _announce(self, sent: Future[list[tf.Tensor]]) -> None:
        with self._changing:
            if sent is self._sent:
                self._arrivals.enqueue(True)

    def _leave(self) -> None:
        """Let nobody wait for, or find, what has been sent."""
        with self._changing:
            self._sent = None
            if int(self._arrivals.size()):
                self._arrivals.dequeue()

    def _residuals(self) -> dict[str, tf.Variable]:
        """The residuals, by the names that they have in a `state`."""
        return {
            name: each
            for i, feedback in enumerate(self._feedback)
            if feedback is not None
            for name, each in feedback.named(str(i)).items()
        }

    def _arrive(self) -> list[tf.Tensor]:
        assert self._sent is not None
        means, self._sent = self._sent.result(), None
        if self._base:
            means = [mean + base for mean, base in zip(means, self._base, strict=True)]
        return means

    def _averaging(
        self, name: str, reduction: Reduction, feedbacks: Sequence[Feedback | None]
    ) -> Any:
        """Return a graph that averages: outside of one, operations have no names to meet by."""

        @tf.function  # type: ignore[untyped-decorator]
        def average(*flats: tf.Tensor) -> list[tf.Tensor]:
            return [
                reduction.reduce(flat, f"{name}.{i}", feedback)
                for i, (flat, feedback) in enumerate(zip(flats, feedbacks, strict=True))
            ]

        def shown(*flats: tf.Tensor) -> Any:
            trace = timeline.active
            # Traced before the message leaves. As each fragment has a function of its own,
            # TensorFlow would warn of a function that is traced again and again.
            sent = average.get_concrete_function(*flats)
            if not trace.is_on or reduction.alone:
                return sent(*flats)
            operations = [
                trace.launched(f"{name}.{i}", reduction.wire_bytes(flat.shape[0], flat.dtype))
                for i, flat in enumerate(flats)
            ]
            found = sent(*flats)
            for operation in operations:
                operation.complete()
            trace.end_step()  # a job that is stuck must have its last rounds on the disk
            return found

        return shown

    def _moved(self, means: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the anchors after v = beta v + (mean - z), z = z + v."""
        if not self._beta:
            return list(means)
        if not self._anchor:
            self._anchor = list(means)
            self._velocity = [tf.zeros_like(mean) for mean in means]
        self._velocity = [
            self._beta * v + (mean - z)
            for v, mean, z in zip(self._velocity, means, self._anchor, strict=True)
        ]
        self._anchor = [z + v for z, v in zip(self._anchor, self._velocity, strict=True)]
        return self._anchor

    def _outer_moved(
        self, means: Sequence[tf.Tensor], lr: float, momentum: float
    ) -> list[tf.Tensor]:
        """Return the outer models after u = mu u + d, g = g - lr (d + mu u), d = g - mean."""
        if not self._anchor:
            self._anchor = list(means)
            self._velocity = [tf.zeros_like(mean) for mean in means]
        changes = [g - mean for g, mean in zip(self._anchor, means, strict=True)]
        self._velocity = [momentum * u + d for u, d in zip(self._velocity, changes, strict=True)]
        self._anchor = [
            g - lr * (d + momentum * u)
            for g, d, u in zip(self._anchor, changes, self._velocity, strict=True)
        ]
        return self._anchor


def _communication_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="hvd_pipe.cocod")


def wide(flat: tf.Tensor) -> tf.Tensor:
    """Half-precision models are averaged in float32, and rounded once a round."""
    return tf.cast(flat, tf.float32) if flat.dtype in _HALF else flat


# What CoCoD averages: the model, whole or in fragments, and the optimizer's momenta.
#
# In a state, the vectors of all fragments are numbered one after another, and ``fragments`` has
# the fragment of each variable; where that is missing, there is one.


FRAGMENTS = "fragments"
"""The name in a state of the variables' fragments."""


@dataclass(frozen=True)
class Part:
    """Variables that are averaged together: a fragment of the model, or the momenta.

    Args:
        variables: By index.
        packing: How its own ones lie in flat vectors.
        average: What becomes of these.
        fragment: Whose turn is its turn.
        first: The number of its first vector in a state.
        label: Begins the names of its state.
    """

    variables: Sequence[tf.Variable]
    packing: Packing
    average: ModelAverage
    fragment: int = 0
    first: int = 0
    label: str = ""

    def flats(self) -> list[tf.Tensor]:
        """Read the variables."""
        own = (index for group in self.packing.groups for index in group)
        return self.packing.pack({i: tf.convert_to_tensor(self.variables[i]) for i in own})

    def assign(self, flats: Sequence[tf.Tensor]) -> None:
        """Give the variables what lies in the vectors."""
        for flat, size in zip(flats, self.packing.sizes, strict=True):
            flat.set_shape([size])
        for index, value in self.packing.unpack(flats).items():
            self.variables[index].assign(value)

    def state(self) -> Arrays:
        """Return copies of what the coming rounds need."""
        found = {}
        for name, each in self.average.state().items():
            kind, _, number = name.rpartition(".")
            found[f"{self.label}{kind}.{self.first + int(number)}"] = each
        return found

    def load(self, state: Arrays, in_turn: bool) -> None:
        """Go on from a state of all parts; what is in flight is taken ``in_turn`` only."""
        own = {}
        for name, each in state.items():
            kind, _, text = name.removeprefix(self.label).rpartition(".")
            if not name.startswith(self.label) or not text.isdigit():
                continue
            number = int(text) - self.first
            if number in range(len(self.packing.groups)) and (in_turn or kind not in IN_FLIGHT):
                own[f"{kind}.{number}"] = each
        self.average.load(own)


def model_parts(settings: Settings, strategy: CoCoD, fragment_of: Sequence[int]) -> list[Part]:
    """Return the fragments of a model."""
    shapes = settings.shapes
    parts, first = [], 0
    for fragment, groups in enumerate(_cut(shapes, fragment_of)):
        packing = Packing(shapes, groups)
        tag = f"{settings.tag}.models" + f".{fragment}" * (strategy.fragments > 1)
        average = ModelAverage(settings.reduction, strategy, packing.sizes, tag)
        parts.append(Part(settings.variables, packing, average, fragment, first))
        first += len(groups)
    return parts


def momenta_part(settings: Settings, strategy: CoCoD) -> Part:
    """Return the momenta, which travel uncompressed: float16 makes zeros of second moments.

    They follow the pull-back, but no momentum of an anchor or an outer optimizer, which could
    carry a second moment below zero. Progress can, so that these stop at zero.
    """

    def check() -> tuple[None, Description]:
        names = ", ".join(each.name for each in settings.momenta)
        return None, [("the optimizer's momenta, which are averaged", names or "none")]

    checked(check, f"{settings.tag}.momenta.names", settings.reduction.process_set)
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
    return Part(variables, packing, average, label="momenta.")


def as_cut(state: Arrays, fragment_of: Sequence[int], shapes: Shapes) -> Arrays:
    """Return a state as that of a model which is cut into these fragments.

    Of a model in other fragments, all that is kept between two rounds stays, such as anchors: what
    was in flight is dropped, and residuals. Of other variables nothing stays.
    """
    saved_of = [int(each) for each in state.get(FRAGMENTS, [0] * len(shapes))]
    if len(saved_of) != len(shapes):
        return {}
    saved = Packing(shapes, [group for groups in _cut(shapes, saved_of) for group in groups])
    sizes = {f"{kind}.{i}": n for kind in (*IN_FLIGHT, *KEPT) for i, n in enumerate(saved.sizes)}
    if any(
        each.size != sizes.get(name)
        for name, each in state.items()
        if name.startswith(tuple(f"{kind}." for kind in (*IN_FLIGHT, *KEPT)))
    ):
        return {}
    if saved_of == list(fragment_of):
        return state
    groups = [group for groups in _cut(shapes, fragment_of) for group in groups]
    found: Arrays = {}
    for kind in KEPT:
        values: dict[int, npt.NDArray[Any]] = {}
        for i, group in enumerate(saved.groups):
            if f"{kind}.{i}" in state:
                ends = np.cumsum([shapes.numel[index] for index in group])
                pieces = np.split(state[f"{kind}.{i}"], ends[:-1])
                values |= dict(zip(group, pieces, strict=True))
        for i, group in enumerate(groups):
            if values.keys() >= set(group):
                found[f"{kind}.{i}"] = np.concatenate([values[index] for index in group])
    return found


def _cut(shapes: Shapes, fragment_of: Sequence[int]) -> list[list[list[int]]]:
    """Return for each fragment the indices of its variables, by dtype."""
    return [
        shapes.dtype_groups([i for i, own in enumerate(fragment_of) if own == fragment])
        for fragment in range(max(fragment_of, default=0) + 1)
    ]
