"""Ways in which Keras scripts read and write weights and slots between two batches of ``fit``."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf


@dataclass
class Script:
    """A training script, between two of its batches.

    Args:
        model: A small network that has been built, in float64.
        x, y: A batch to evaluate on, each rank's own.
        folder: Of files, this rank's own.
        log: What was read: the way, and a number.
        models: Copies that are kept up to date.
    """

    model: Any
    x: Any
    y: Any
    folder: Path
    log: list[tuple[str, float]] = field(default_factory=list)
    models: list[Any] = field(default_factory=list)
    checkpoint: Any = None

    def __post_init__(self) -> None:
        """Keep what a script may have taken before it trains."""
        self.kept = [each.value for each in self.model.trainable_variables]
        self.function = tf.function(self._sum, autograph=False)
        self.concrete = tf.function(self._sum, autograph=False).get_concrete_function()
        self.clamp = tf.function(self._clamp, autograph=False)

    def _sum(self) -> Any:
        return tf.add_n([tf.reduce_sum(each) for each in self.kept])

    def _clamp(self) -> None:
        for each in self.kept:
            each.assign(tf.clip_by_value(each, -0.4, 0.4))

    @property
    def slots(self) -> list[Any]:
        """The optimizer's variables, but for iterations and the learning rate."""
        return list(self.model.optimizer.variables[2:])

    @property
    def kernel(self) -> Any:
        """That of the last layer, whose update is late."""
        return self.model.layers[-1].kernel

    @property
    def copy(self) -> Any:
        if not self.models:
            self.models.append(keras.models.clone_model(self.model))
        return self.models[0]


Way = Callable[[Script], object]


def total(arrays: Any) -> float:
    return float(sum(np.sum(np.asarray(each), dtype=np.float64) for each in arrays))


def numbers(tree: Any) -> list[Any]:
    # metrics and counters are not alike where one process computes what two ranks do
    return keras.tree.flatten([tree["trainable_variables"], tree["optimizer_variables"]])


def in_a_thread(s: Script) -> float:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: total(s.model.get_weights())).result()


def loaded(s: Script, name: str, save: str) -> float:
    """Return what is in a file of weights."""
    path = s.folder / name
    getattr(s.model, save)(path)
    other = keras.models.clone_model(s.model)
    other.load_weights(path)
    return total(other.get_weights())


def penalty(s: Script) -> float:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(s.kernel**3)
    return total([tape.gradient(loss, s.kernel)])


def checkpoint(s: Script) -> float:
    path = str(s.folder / "read")
    tf.train.Checkpoint(model=s.model, optimizer=s.model.optimizer).write(path)
    other = keras.models.clone_model(s.model)
    tf.train.Checkpoint(model=other).read(path).expect_partial()
    return total(other.get_weights())


READS: dict[str, Way] = {
    "kernel.numpy()": lambda s: total([s.kernel.numpy()]),
    "np.array(kernel)": lambda s: total([np.array(s.kernel)]),
    "kernel + 1": lambda s: total([(s.kernel + 1.0) * s.kernel]),
    "kernel[0]": lambda s: total([s.kernel[0]]),
    "kernel.value": lambda s: total([s.kernel.value.numpy()]),
    "float()": lambda s: float(s.kernel.value[0, 0]),
    "get_weights()": lambda s: total(s.model.get_weights()),
    "a layer's get_weights()": lambda s: total(s.model.layers[-1].get_weights()),
    "keras.ops": lambda s: total([keras.ops.sum(s.kernel)]),
    "tf.reduce_sum": lambda s: total([tf.reduce_sum(each) for each in s.kept]),
    "tf.matmul": lambda s: total([tf.matmul(s.kept[-2], s.kept[-2], transpose_b=True)]),
    "tf.raw_ops": lambda s: total(
        [tf.raw_ops.ReadVariableOp(resource=s.kept[-2].handle, dtype=tf.float64)]
    ),
    "a kept tf.Variable": lambda s: total([each.numpy() for each in s.kept]),
    "read_value()": lambda s: total([s.kept[-2].read_value()]),
    "gather": lambda s: total([tf.gather(s.kept[-2], [0, 1])]),
    "repr": lambda s: float(len(repr(s.kept[-2]))) * 0 + total([s.kept[-2].value()]),
    "a tf.function": lambda s: total([s.function()]),
    "a concrete function": lambda s: total([s.concrete()]),
    "model(x)": lambda s: total([s.model(s.x)]),
    "predict": lambda s: total([s.model.predict(s.x, verbose=0)]),
    "predict_on_batch": lambda s: total([s.model.predict_on_batch(s.x)]),
    "evaluate": lambda s: s.model.evaluate(s.x, s.y, verbose=0),
    "slots": lambda s: total([each.numpy() for each in s.slots]),
    "state_dict": lambda s: total(numbers(s.model.get_state_tree("numpy_array"))),
    "deepcopy of a variable": lambda s: total([copy.deepcopy(s.kept[-2]).numpy()]),
    "deepcopy of the model": lambda s: total(copy.deepcopy(s.model).get_weights()),
    "pickle": lambda s: total(pickle.loads(pickle.dumps(s.model)).get_weights()),
    "another thread": in_a_thread,
    "save_weights": lambda s: loaded(s, "own.weights.h5", "save_weights"),
    "save": lambda s: loaded(s, "own.keras", "save"),
    "a gradient of a function of weights": penalty,
    "tf.train.Checkpoint": checkpoint,
}
"""Each returns what it has read."""


def assign(variables: Sequence[Any], value: Callable[[Any], Any]) -> None:
    for each in variables:
        each.assign(value(each))


def pruned(variable: Any) -> Any:
    array = variable.numpy()
    return array * (np.abs(array) > 0.02)


def decay(s: Script) -> None:
    for each in s.model.trainable_variables:
        each.assign_sub(0.01 * np.ones(each.shape))


def grow(s: Script) -> None:
    for each in s.kept:
        each.assign_add(0.01 * np.ones(each.shape))


def swapped(s: Script) -> None:
    for mean, weight in zip(s.copy.weights, s.model.weights, strict=True):
        mean.assign(0.9 * mean + 0.1 * weight)
    before = s.model.get_weights()
    s.model.set_weights(s.copy.get_weights())
    loss = s.model.evaluate(s.x, s.y, verbose=0)
    s.log.append(("an EMA, swapped in and back", loss))
    s.model.set_weights(before)


def look_ahead(s: Script) -> None:
    for slow, fast in zip(s.copy.weights, s.model.weights, strict=True):
        slow.assign_add(0.5 * (fast - slow))
        fast.assign(slow)


def load(s: Script) -> None:
    path = s.folder / "load.weights.h5"
    (s.model.load_weights if path.exists() else s.model.save_weights)(path)


def go_back(s: Script) -> None:
    path = str(s.folder / "back")
    if s.checkpoint:
        s.checkpoint.read(path)
    else:
        s.checkpoint = tf.train.Checkpoint(model=s.model, optimizer=s.model.optimizer)
        s.checkpoint.write(path)


def load_slots(s: Script) -> None:
    store: dict[str, Any] = {}
    s.model.optimizer.save_own_variables(store)
    arrays = {name: np.array(each) for name, each in store.items()}
    for name in list(arrays)[2:]:
        arrays[name] = 0.9 * arrays[name]
    s.model.optimizer.load_own_variables(arrays)


def set_rate(s: Script) -> None:
    s.model.optimizer.learning_rate = 0.97 * float(s.model.optimizer.learning_rate)


WRITES: dict[str, Way] = {
    "set_weights of another model": lambda s: s.copy.set_weights(s.model.get_weights()),
    "assign": lambda s: assign(
        s.model.trainable_variables, lambda each: keras.ops.clip(each, -0.5, 0.5)
    ),
    "assign to one that is not read": lambda s: s.kernel.assign(np.full(s.kernel.shape, 0.1)),
    "assign_sub": decay,
    "assign_add of a kept tf.Variable": grow,
    "set_weights": lambda s: s.model.set_weights([0.99 * w for w in s.model.get_weights()]),
    "a mask": lambda s: assign(s.model.trainable_variables, pruned),
    "scatter_nd_update": lambda s: s.kept[-2].scatter_nd_update([[0, 0]], [0.2]),
    "a tf.function that assigns": lambda s: s.clamp(),
    "an EMA, swapped in and back": swapped,
    "Lookahead": look_ahead,
    "load_weights": load,
    "a checkpoint that is read again": go_back,
    "slots cleared": lambda s: assign(s.slots, lambda each: np.zeros(each.shape)),
    "slots loaded": load_slots,
    "another learning rate": set_rate,
}
"""Each changes weights, slots or options."""

METADATA: dict[str, Way] = {
    "shapes": lambda s: [(each.shape, each.path) for each in s.model.trainable_variables],
    "count_params()": lambda s: s.model.count_params(),
    "iterations": lambda s: int(s.model.optimizer.iterations),
    "summary()": lambda s: s.model.summary(print_fn=lambda *_, **__: None),
    "trainable": lambda s: [layer.trainable for layer in s.model.layers],
}
"""Each asks for what is not a value."""

WAYS = READS | WRITES | METADATA


def look(script: Script, name: str) -> None:
    """Do as the way of this name does, and note what it has read."""
    value = WAYS[name](script)
    if name in READS:
        assert isinstance(value, float)
        script.log.append((name, value))
