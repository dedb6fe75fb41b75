"""Ways in which Keras scripts read and write weights and slots between two batches of ``fit``."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
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
    checkpoints: list[Any] = field(default_factory=list)

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
    def weights(self) -> list[Any]:
        found: list[Any] = self.model.trainable_variables
        return found

    @property
    def slots(self) -> list[Any]:
        """The optimizer's variables, but for iterations and the learning rate."""
        found: list[Any] = self.model.optimizer.variables[2:]
        return found

    @property
    def kernel(self) -> Any:
        """That of the last layer, whose update is late."""
        return self.model.layers[-1].kernel


Way = Callable[[Script], object]

READS: dict[str, Way] = {}
"""Each returns what it has read."""
WRITES: dict[str, Way] = {}
"""Each changes weights, slots or options."""
METADATA: dict[str, Way] = {}
"""Each asks for what is not a value."""


def total(arrays: Any) -> float:
    return float(sum(np.sum(np.asarray(each), dtype=np.float64) for each in arrays))


def read(name: str, look: Callable[[Script], Any]) -> None:
    READS[name] = look


def write(name: str) -> Callable[[Way], Way]:
    def add(look: Way) -> Way:
        WRITES[name] = look
        return look

    return add


read("kernel.numpy()", lambda s: total([s.kernel.numpy()]))
read("np.array(kernel)", lambda s: total([np.array(s.kernel)]))
read("kernel + 1", lambda s: total([(s.kernel + 1.0) * s.kernel]))
read("kernel[0]", lambda s: total([s.kernel[0]]))
read("kernel.value", lambda s: total([s.kernel.value.numpy()]))
read("float()", lambda s: float(s.kernel.value[0, 0]))
read("get_weights()", lambda s: total(s.model.get_weights()))
read("a layer's get_weights()", lambda s: total(s.model.layers[-1].get_weights()))
read("keras.ops", lambda s: total([keras.ops.sum(s.kernel)]))
read("tf.reduce_sum", lambda s: total([tf.reduce_sum(each) for each in s.kept]))
read("tf.matmul", lambda s: total([tf.matmul(s.kept[-2], s.kept[-2], transpose_b=True)]))
read("tf.raw_ops", lambda s: total([tf.raw_ops.ReadVariableOp(
    resource=s.kept[-2].handle, dtype=tf.float64)]))  # fmt: skip
read("a kept tf.Variable", lambda s: total([each.numpy() for each in s.kept]))
read("read_value()", lambda s: total([s.kept[-2].read_value()]))
read("gather", lambda s: total([tf.gather(s.kept[-2], [0, 1])]))
read("repr", lambda s: float(len(repr(s.kept[-2]))) * 0 + total([s.kept[-2].value()]))
read("a tf.function", lambda s: total([s.function()]))
read("a concrete function", lambda s: total([s.concrete()]))
read("model(x)", lambda s: total([s.model(s.x)]))
read("predict", lambda s: total([s.model.predict(s.x, verbose=0)]))
read("predict_on_batch", lambda s: total([s.model.predict_on_batch(s.x)]))
read("evaluate", lambda s: s.model.evaluate(s.x, s.y, verbose=0))
read("slots", lambda s: total([each.numpy() for each in s.slots]))
read("state_dict", lambda s: total(_numbers(s.model.get_state_tree("numpy_array"))))
read("deepcopy of a variable", lambda s: total([copy.deepcopy(s.kept[-2]).numpy()]))
read("deepcopy of the model", lambda s: total(copy.deepcopy(s.model).get_weights()))
read("pickle", lambda s: total(pickle.loads(pickle.dumps(s.model)).get_weights()))


def in_a_thread(script: Script) -> float:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: total(script.model.get_weights())).result()


READS["another thread"] = in_a_thread


def _numbers(tree: Any) -> list[Any]:
    # metrics and counters are not alike where one process computes what two ranks do
    return [
        each
        for name in ("trainable_variables", "optimizer_variables")
        for each in keras.tree.flatten(tree[name])
    ]


def _clone(script: Script) -> Any:
    if not script.models:
        script.models.append(keras.models.clone_model(script.model))
    return script.models[0]


def loaded(script: Script, name: str, save: str) -> float:
    """Return what is in a file of weights."""
    path = script.folder / name
    getattr(script.model, save)(path)
    other = keras.models.clone_model(script.model)
    other.load_weights(path)
    return total(other.get_weights())


read("save_weights", lambda s: loaded(s, "own.weights.h5", "save_weights"))
read("save", lambda s: loaded(s, "own.keras", "save"))


@write("set_weights of another model")
def copied(script: Script) -> None:
    _clone(script).set_weights(script.model.get_weights())


def penalty(script: Script) -> float:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(script.kernel**3)
    return total([tape.gradient(loss, script.kernel)])


READS["a gradient of a function of weights"] = penalty


def checkpoint(script: Script) -> float:
    path = str(script.folder / "read")
    tf.train.Checkpoint(model=script.model, optimizer=script.model.optimizer).write(path)
    other = keras.models.clone_model(script.model)
    tf.train.Checkpoint(model=other).read(path).expect_partial()
    return total(other.get_weights())


READS["tf.train.Checkpoint"] = checkpoint


@write("assign")
def clamp(script: Script) -> None:
    for each in script.weights:
        each.assign(keras.ops.clip(each, -0.5, 0.5))


@write("assign to one that is not read")
def constant(script: Script) -> None:
    script.kernel.assign(np.full(script.kernel.shape, 0.1))


@write("assign_sub")
def decay(script: Script) -> None:
    for each in script.weights:
        each.assign_sub(0.01 * np.ones(each.shape))


@write("assign_add of a kept tf.Variable")
def grow(script: Script) -> None:
    for each in script.kept:
        each.assign_add(0.01 * np.ones(each.shape))


@write("set_weights")
def scaled(script: Script) -> None:
    script.model.set_weights([0.99 * each for each in script.model.get_weights()])


@write("a mask")
def pruned(script: Script) -> None:
    for each in script.weights:
        array = each.numpy()
        each.assign(array * (np.abs(array) > 0.02))


@write("scatter_nd_update")
def scatter(script: Script) -> None:
    script.kept[-2].scatter_nd_update([[0, 0]], [0.2])


@write("a tf.function that assigns")
def by_function(script: Script) -> None:
    script.clamp()


@write("an EMA, swapped in and back")
def swapped(script: Script) -> None:
    means = _clone(script)
    pairs = list(zip(means.weights, script.model.weights, strict=True))
    for mean, weight in pairs:
        mean.assign(0.9 * mean + 0.1 * weight)
    before = script.model.get_weights()
    script.model.set_weights(means.get_weights())
    loss = script.model.evaluate(script.x, script.y, verbose=0)
    script.log.append(("an EMA, swapped in and back", loss))
    script.model.set_weights(before)


@write("Lookahead")
def look_ahead(script: Script) -> None:
    for slow, fast in zip(_clone(script).weights, script.model.weights, strict=True):
        slow.assign_add(0.5 * (fast - slow))
        fast.assign(slow)


@write("load_weights")
def load(script: Script) -> None:
    path = script.folder / "load.weights.h5"
    if path.exists():
        script.model.load_weights(path)
    else:
        script.model.save_weights(path)


@write("a checkpoint that is read again")
def go_back(script: Script) -> None:
    path = str(script.folder / "back")
    if not script.checkpoints:
        found = tf.train.Checkpoint(model=script.model, optimizer=script.model.optimizer)
        found.write(path)
        script.checkpoints.append(found)
    else:
        script.checkpoints[0].read(path)


@write("slots cleared")
def cleared(script: Script) -> None:
    for each in script.slots:
        each.assign(np.zeros(each.shape))


@write("slots loaded")
def loaded_slots(script: Script) -> None:
    store: dict[str, Any] = {}
    script.model.optimizer.save_own_variables(store)
    found = {name: np.array(each) for name, each in store.items()}
    for name in list(found)[2:]:
        found[name] = 0.9 * found[name]
    script.model.optimizer.load_own_variables(found)


@write("another learning rate")
def rate(script: Script) -> None:
    script.model.optimizer.learning_rate = 0.97 * float(script.model.optimizer.learning_rate)


METADATA["shapes"] = lambda s: [(each.shape, each.dtype, each.path) for each in s.weights]
METADATA["count_params()"] = lambda s: s.model.count_params()
METADATA["iterations"] = lambda s: int(s.model.optimizer.iterations)
METADATA["summary()"] = lambda s: s.model.summary(print_fn=lambda *_, **__: None)
METADATA["trainable"] = lambda s: [layer.trainable for layer in s.model.layers]

WAYS: dict[str, Way] = {**READS, **WRITES, **METADATA}


def look(script: Script, name: str) -> None:
    """Do as the way of this name does, and note what it has read."""
    found = WAYS[name](script)
    if name in READS:
        assert isinstance(found, float)
        script.log.append((name, found))
