"""A Keras model for pipelines, and its pipeline in one process, with all versions of all weights.

The model is never cut. The gradient of each microbatch is that of the whole model at the weights
that the mode's equation names, a version for each stage::

    g[b] = grad f_b(w_1[v_1(b)], ..., w_n[v_n(b)])

with ``v_s(b)`` in closed form where every stage has one worker, and as the schedule says where
stages are replicated. None of hvd_pipe's code but those schedules, which have tests of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvd_pipe.planning.instructions import Forward
from hvd_pipe.planning.schedule import schedule

keras.config.set_floatx("float64")

Batch = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]
Weights = dict[str, npt.NDArray[np.float64]]

METHODS = {"stash": "1f1b", "2bw": "2bw", "flush": "1f1b-flush"}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.6),
    "adam": lambda: keras.optimizers.Adam(0.01),
}
STAGES = {
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
"""Of 2 and 3 stages; what "norm" makes is used in the last one."""


class Round(keras.layers.Layer):  # type: ignore[misc]
    """What a message in bfloat16 makes of activations and their gradients."""

    def call(self, x: Any) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def rounded(x: Any) -> tuple[Any, Callable[[Any], Any]]:
            return _short(x), _short

        return rounded(x)


def _short(x: Any) -> Any:
    return tf.cast(tf.cast(x, tf.bfloat16), x.dtype)


def make_model(rounded: bool = False) -> Any:
    """Layers that weight versions go wrong in, a skip connection, and losses of layers.

    Args:
        rounded: What goes from the first to the second of two stages is rounded.
    """
    keras.utils.set_random_seed(3)
    layers = keras.layers
    images = layers.Input((5, 5, 1), name="images")
    conv = layers.Conv2D(2, 3, padding="same", activation="tanh", name="conv")
    conv.activity_regularizer = keras.regularizers.L2(0.01)
    norm = layers.BatchNormalization(name="norm")(conv(images))
    rows = layers.Reshape((5, 10), name="rows")(norm)
    lstm = layers.LSTM(4, return_sequences=True, kernel_regularizer="l2", name="lstm")(rows)
    if rounded:
        norm, lstm = Round()(norm), Round()(lstm)
    flat = layers.Flatten(name="flat")(layers.LayerNormalization(name="layer_norm")(lstm))
    both = layers.Concatenate(name="both")([flat, layers.Flatten(name="skip")(norm)])
    drop = layers.Dropout(0.2, seed=5, name="drop")(both)
    return keras.Model(images, layers.Dense(3, name="last")(drop))


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


def versions_of(
    mode: str, replicas: Sequence[int], minibatches: int, microbatches: int, in_transit: int = 0
) -> list[list[int]]:
    """For each stage: the version of each minibatch."""
    stages = len(replicas)
    if set(replicas) == {1}:
        late = {
            "stash": lambda s: (1 + in_transit) * (stages - 1 - s),
            "2bw": lambda s: 1,
            "flush": lambda s: 0,
        }[mode]
        return [[max(0, b - late(s)) for b in range(minibatches)] for s in range(stages)]
    found = [[-1] * minibatches for _ in replicas]
    for worker, program in schedule(
        METHODS[mode], replicas, minibatches, microbatches, in_transit
    ).programs.items():
        for step in program:
            if isinstance(step, Forward):
                found[worker.stage][step.minibatch] = step.version
    return found


@functools.cache
def _plain_model(rounded: bool) -> tuple[Any, Any]:
    """Return one model, and its gradients, for all references, as compiling costs seconds."""
    model = make_model(rounded)

    @tf.function
    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            added = loss + tf.add_n(model.losses)
        return loss, tape.gradient(added, model.trainable_variables)

    return model, gradients


class Reference:
    """All workers of a pipeline; there may be one at a time.

    Args:
        layers: Names of each stage's layers.
        replicas: Workers of each stage.
        mode: As `PipeDream` names it.
        optimizer_fn: Makes a stage's optimizer.
        microbatches: Of a minibatch.
        most: The largest norm of a gradient; of two straight stages, or in "flush".
        rounded: What crosses the cut between two stages is.
        in_transit: Minibatches between two stages.
    """

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
    ) -> None:
        model, self._gradients = _plain_model(rounded)
        self._most, self._in_transit = most, in_transit
        self._norms: list[list[float]] = [[] for _ in replicas]  # squared, by update
        self.clipped = 0
        """How often a gradient was longer."""
        _assign(model.variables, [v.numpy() for v in make_model().variables])
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
        epoch = len(self._norms[0])
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
            for s in stages:
                self._norms[s].append(sum(float((g * g).sum()) for g in own_gradients[s]))
            for s in stages:
                rounds[s].append(own_gradients[s])
                whole = 1 if m > 1 or self.mode != "stash" else self.replicas[s]
                if len(rounds[s]) == whole or b == len(batches) - 1:
                    mean = [sum(gs) / len(rounds[s]) for gs in zip(*rounds[s], strict=False)]
                    rounds[s] = []
                    factor = self._factor(s, b, epoch)
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

    def _factor(self, s: int, b: int, epoch: int) -> float:
        """Return what clipping makes of stage s's gradient of minibatch b.

        In "flush", of all stages' norms. Of two straight stages, each hears of the other's by
        messages: see ``serial`` in `workers_pipedream_clipping`.
        """
        if self._most is None:
            return 1.0
        at = epoch + b
        total = self._norms[s][at]
        if self.mode == "flush":
            total = sum(norms[at] for norms in self._norms)
        elif s == 0 and at:
            total += self._norms[1][at - 1]
        elif s == 1 and (b >= 2 or epoch):
            total += self._norms[0][at - 2 if b >= 2 else epoch - 1]
        factor = min(1.0, self._most / (total**0.5 + 1e-6))
        self.clipped += factor < 1.0
        return float(factor)


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
