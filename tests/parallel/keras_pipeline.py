"""Keras models for pipelines, ranks that train them, and a pipeline in one process beside.

In the `Reference` the model is never cut. The gradient of each microbatch is that of the whole
model at the weights that the mode's equation names, a version for each stage::

    g[b] = grad f_b(w_1[v_1(b)], ..., w_n[v_n(b)])

with ``v_s(b)`` in closed form where every stage has one worker, and as the schedule says where
stages are replicated. It has none of hvd_pipe's code but those schedules, which have tests of
their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from on_ranks import gather
from pipeline_versions import versions_of

import hvd_pipe.tensorflow as hvd
from hvd_pipe.planning.stages import Partition, Stage
from hvd_pipe.tensorflow.pipedream import EpochStats, PipeDream
from hvd_pipe.tensorflow.pipedream.stage import KerasStage

keras.config.set_floatx("float64")

Batch = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]
Weights = dict[str, npt.NDArray[np.float64]]

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.6),
    "adam": lambda: keras.optimizers.Adam(0.01),
}
TOLERANCE = 1e-10
MINIBATCHES = 7
EPOCHS = 2

STAGES = {
    1: (("conv", "norm", "rows", "lstm", "layer_norm", "flat", "skip", "both", "drop", "last"),),
    2: (
        ("conv", "norm", "rows", "lstm"),
        ("layer_norm", "flat", "skip", "both", "drop", "last"),
    ),
    3: (
        ("conv", "norm"),
        ("rows", "lstm"),
        ("layer_norm", "flat", "skip", "both", "drop", "last"),
    ),
}
"""By how many; what "norm" makes is used in the last one."""
SMALL_STAGES = {2: ((0, 1, 2, 3), (4,)), 3: ((0, 1), (2, 3), (4,))}
"""Likewise of the small model, whose layers are named by Keras."""


class Round(keras.layers.Layer):  # type: ignore[misc]
    """What a message in bfloat16 makes of activations and their gradients."""

    def call(self, x: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def rounded(x: Any) -> tuple[Any, Callable[[Any], Any]]:
            return _short(x), _short

        return rounded(x)


def _short(x: Any) -> Any:
    return tf.cast(tf.cast(x, tf.bfloat16), x.dtype)


def make_model(rounded: bool = False, recurrent: bool = True) -> Any:
    """Layers that weight versions go wrong in, a skip connection, and losses of layers.

    What leaves the first of two stages may be `rounded`. The layer "lstm" is one, or (not
    `recurrent`) a dense one, which is compiled in half the time.
    """
    keras.utils.set_random_seed(3)
    layers = keras.layers
    images = layers.Input((5, 5, 1), name="images")
    conv = layers.Conv2D(2, 3, padding="same", activation="tanh", name="conv")
    conv.activity_regularizer = keras.regularizers.L2(0.01)
    norm = layers.BatchNormalization(name="norm")(conv(images))
    rows = layers.Reshape((5, 10), name="rows")(norm)
    options = {"kernel_regularizer": "l2", "name": "lstm"}
    if recurrent:
        lstm = layers.LSTM(4, return_sequences=True, **options)(rows)
    else:
        lstm = layers.Dense(4, "tanh", **options)(rows)
    if rounded:
        norm, lstm = Round()(norm), Round()(lstm)
    flat = layers.Flatten(name="flat")(layers.LayerNormalization(name="layer_norm")(lstm))
    both = layers.Concatenate(name="both")([flat, layers.Flatten(name="skip")(norm)])
    drop = layers.Dropout(0.2, seed=5, name="drop")(both)
    return keras.Model(images, layers.Dense(3, name="last")(drop))


def make_small() -> Any:
    """A model that is compiled quickly, for what is no equation."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((5, 5, 1)),
            layers.Flatten(),
            layers.Dense(4, "tanh"),
            layers.Dropout(0.2),
            layers.BatchNormalization(),
            layers.Dense(3),
        ],
        name="small",
    )


def make_batches(count: int, samples: int = 8, last: int = 5) -> list[Batch]:
    """Minibatches, the last one short."""
    generator = np.random.default_rng(11)
    sizes = [samples] * (count - 1) + [last]
    return [
        (generator.standard_normal((size, 5, 5, 1)), generator.integers(0, 3, size))
        for size in sizes
    ]


loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def values_of(model: Any) -> Weights:
    """All variables by path, seeds left out, copied."""
    return {
        each.path: np.array(each.numpy()) for each in model.variables if "seed" not in each.path
    }


@functools.cache
def _plain_model(rounded: bool, recurrent: bool) -> tuple[Any, Any, list[npt.NDArray[Any]]]:
    """Return one model for all references, its gradients, and what its variables begin with.

    Compiling costs seconds, so it is done once for batches of all sizes.
    """
    model = make_model(rounded, recurrent)
    sizes = tf.TensorSpec((None, 5, 5, 1), tf.float64), tf.TensorSpec((None,), tf.int64)

    @tf.function(input_signature=sizes)
    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            added = loss + tf.add_n(model.losses)
        return loss, tape.gradient(added, model.trainable_variables)

    return model, gradients, [np.array(v.numpy()) for v in model.variables]


class Reference:
    """All workers of a pipeline; there may be one at a time. "flush" alone may clip (`most`)."""

    def __init__(
        self,
        layers: Sequence[Sequence[str]],
        replicas: Sequence[int],
        mode: str,
        optimizer_fn: Callable[[], Any],
        microbatches: int = 1,
        most: float | None = None,
        rounded: bool = False,
        in_transit: int = 0,
        recurrent: bool = True,
    ) -> None:
        model, self._gradients, first = _plain_model(rounded, recurrent)
        self._most, self._in_transit = most, in_transit
        self.clipped = 0
        """How often a gradient was longer."""
        _assign(model.variables, first)
        self.model, self.mode = model, mode
        self.replicas, self.microbatches = tuple(replicas), microbatches
        own = [[v for n in names for v in model.get_layer(n).variables] for names in layers]
        self.weights = [[v for v in one if v.trainable] for one in own]
        self.state = [[v for v in one if not v.trainable] for one in own]
        self.newest = [[v.numpy() for v in one] for one in self.weights]
        self.states = [
            [[v.numpy() for v in one] for _ in range(width)]
            for one, width in zip(self.state, replicas, strict=True)
        ]
        self.optimizers = [optimizer_fn() for _ in replicas]
        for s, optimizer in enumerate(self.optimizers):
            optimizer.build(self.weights[s])
            if mode == "stash":
                scale = self.replicas[s] / self.replicas[0]
                optimizer.learning_rate = float(optimizer.learning_rate) * scale

    def train_epoch(self, batches: Sequence[Batch]) -> float:
        """Fill the pipeline, drain it, and return the mean loss of the minibatches."""
        m, stages = self.microbatches, range(len(self.replicas))
        history = [[one] for one in self.newest]
        version = versions_of(self.mode, self.replicas, len(batches), m, self._in_transit)
        rounds: list[list[list[Any]]] = [[] for _ in stages]
        losses = []
        for b, (x, y) in enumerate(batches):
            for s in stages:
                _assign(self.weights[s], history[s][version[s][b]])
            found, total = None, 0.0
            parts = zip(np.array_split(x, m), np.array_split(y, m), strict=True)
            for k, (own_x, own_y) in enumerate(parts):
                replica = [(b * m + k) % width for width in self.replicas]
                for s in stages:
                    _assign(self.state[s], self.states[s][replica[s]])
                loss, gradient = self._gradients(tf.constant(own_x), tf.constant(own_y))
                share = len(own_x) / len(x)
                total += float(loss) * share
                shared = [share * np.array(tf.convert_to_tensor(g)) for g in gradient]
                found = shared if found is None else list(map(np.add, found, shared))
                for s in stages:
                    self.states[s][replica[s]] = [v.numpy() for v in self.state[s]]
            losses.append(total)
            by_id = {id(v): g for v, g in zip(self.model.trainable_variables, found, strict=False)}
            own_gradients = [[by_id[id(v)] for v in self.weights[s]] for s in stages]
            squared = sum(float((g * g).sum()) for one in own_gradients for g in one)
            for s in stages:
                rounds[s].append(own_gradients[s])
                whole = 1 if m > 1 or self.mode != "stash" else self.replicas[s]
                if len(rounds[s]) == whole or b == len(batches) - 1:
                    mean = [sum(gs) / len(rounds[s]) for gs in zip(*rounds[s], strict=False)]
                    rounds[s] = []
                    if self._most is not None:  # in "flush", by the norm over all stages
                        factor = min(1.0, self._most / (squared**0.5 + 1e-6))
                        self.clipped += factor < 1.0
                        mean = [g * factor for g in mean]
                    _assign(self.weights[s], history[s][-1])
                    self.optimizers[s].apply([tf.constant(g) for g in mean], self.weights[s])
                    history[s].append([v.numpy() for v in self.weights[s]])
        self.newest = [one[-1] for one in history]
        for s in stages:
            _assign(self.weights[s], self.newest[s])
            means = [sum(each) / len(each) for each in zip(*self.states[s], strict=False)]
            for variable, mean, mine in zip(self.state[s], means, self.states[s][0], strict=False):
                variable.assign(mean if "float" in variable.dtype else mine)
        return float(np.mean(losses))


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


# On ranks.


class Case(NamedTuple):
    """A pipeline, and some of its options."""

    mode: str
    replicas: tuple[int, ...]
    optimizer: str
    most: float | None = None
    short: bool = False
    recompute: bool = False
    in_transit: int = 0

    def __str__(self) -> str:
        changed = [
            f"{name}={value}"
            for name, value in self._asdict().items()
            if value != self._field_defaults.get(name)
        ]
        return " ".join(
            ["-".join(map(str, self.replicas)), self.mode, self.optimizer, *changed[3:]]
        )


def plan_of(replicas: Sequence[int], stages: Sequence[Sequence[str]]) -> Partition:
    """Return a plan of so many workers for each stage."""
    parts = tuple(
        Stage(tuple(names), width, 0.0, 0, 0, 0, 0, 0.0)
        for names, width in zip(stages, replicas, strict=True)
    )
    return Partition(parts, sum(replicas), 0.0, 0.0, 0.0, "paper", (1,) * len(replicas))


def engine_of(
    mode: str, replicas: tuple[int, ...], optimizer: str, model: Any = None, **options: Any
) -> PipeDream:
    """Make a pipeline of the small model, or of another one that is given."""
    if model is None:
        model = make_small()
        places = SMALL_STAGES[len(replicas)]
        stages = [[model.layers[place].name for place in some] for some in places]
    else:
        stages = STAGES[len(replicas)]
    usual: dict[str, Any] = {
        "optimizer_fn": OPTIMIZERS[optimizer],
        "plan": plan_of(replicas, stages),
        "microbatches": None if mode == "stash" else 4,
        "metric_fn": keras.metrics.sparse_categorical_accuracy,
        "progress": False,
    }
    return PipeDream(model, loss_fn, mode=mode, **(usual | options))


class Run(NamedTuple):
    """Losses, all weights and an evaluation after them; and what was held at a time.

    The most versions of weights, and whether a tape was, where outputs had left.
    """

    losses: list[float]
    weights: Weights
    evaluated: EpochStats
    versions: int
    tapes: set[bool]


def train(case: Case, transport: str = "auto", recurrent: bool = True) -> Run:
    versions, tapes = [1], set()
    update, output = KerasStage.update, KerasStage.output

    def updated(stage: Any, version: int, keep: bool) -> None:
        update(stage, version, keep)
        versions.append(len(stage._versions))

    def sent(stage: Any, index: Any) -> Any:
        message = output(stage, index)
        if pending := stage._pending.get(index):
            tapes.add(pending.tape is not None or bool(pending.outputs))
        return message

    engine = engine_of(
        *case[:3],
        model=make_model(recurrent=recurrent),
        transport=transport,
        max_grad_norm=case.most,
        wire_dtype="bfloat16" if case.short else None,
        recompute=case.recompute,
        in_transit=case.in_transit,
    )
    batches = make_batches(MINIBATCHES)
    with mock.patch.multiple(KerasStage, update=updated, output=sent):
        losses = [engine.train_epoch(batches).loss for _ in range(EPOCHS)]
    stats = engine.evaluate(make_unseen())
    return Run(losses, values_of(engine.gather()), stats, max(versions), tapes)


def make_unseen() -> list[Batch]:
    """To evaluate on: the last minibatch cannot be cut as the others are."""
    return make_batches(3, last=1)


def check(case: Case, transport: str = "auto", recurrent: bool = True) -> None:
    """Train; rank 0 compares all ranks with the reference."""
    everyone = gather(train(case, transport, recurrent))
    if hvd.rank() == 0:
        compare(case, recurrent, everyone)
    keras.utils.clear_session()  # names count models, of which rank 0 has made more


def compare(case: Case, recurrent: bool, ranks: Sequence[Run]) -> None:
    """Compare losses, weights and the evaluation of each rank with the reference."""
    reference = Reference(
        STAGES[len(case.replicas)],
        case.replicas,
        case.mode,
        OPTIMIZERS[case.optimizer],
        1 if case.mode == "stash" else 4,
        case.most,
        case.short,
        case.in_transit,
        recurrent,
    )
    batches = make_batches(MINIBATCHES)
    wanted = [reference.train_epoch(batches) for _ in range(EPOCHS)]
    if case.most is not None:
        assert MINIBATCHES < reference.clipped < 2 * EPOCHS * MINIBATCHES
    x, y = (np.concatenate(parts) for parts in zip(*make_unseen(), strict=True))
    output = reference.model(x, training=False)
    right = float(np.mean(np.argmax(output, axis=-1) == y))
    for run in ranks:
        assert run.losses == pytest.approx(wanted, abs=TOLERANCE)
        assert difference(run.weights, values_of(reference.model)) <= TOLERANCE
        assert run.evaluated.loss == pytest.approx(float(loss_fn(y, output)), abs=TOLERANCE)
        assert (run.evaluated.metric, run.evaluated.samples) == (pytest.approx(right), len(x))
    assert set().union(*(run.tapes for run in ranks)) <= {not case.recompute}
    if (set(case.replicas) == {1} and not case.in_transit) or case.mode != "stash":
        most = {"stash": len(case.replicas), "2bw": 2, "flush": 1}[case.mode]
        assert max(run.versions for run in ranks) == most


def difference(found: Weights, wanted: Weights) -> float:
    """The largest one of two models' values."""
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted)
