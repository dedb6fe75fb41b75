"""What the ranks of `test_keras_unlike_ranks` do; each function is a case."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import horovod.tensorflow.keras as stock_keras
import keras
import numpy as np
import tensorflow as tf
from cases import Raised, run_cases
from keras_problem import BATCH, batch, loss_of, make_model, weights_of
from workers_keras_features import Found, data, overflow_on_one_rank

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.errors import RanksDisagreeError
from hvd_pipe.tensorflow.measuring.ready_times import _Sender

TURNS = "cocod:period=4,fragments=2"
IN_FLIGHT = ["pipe-sgd", "pipe-sgd:prediction=local", "cocod:period=3", TURNS]
OVERFLOWS = ["pipe-sgd:prediction=local", "pipe-sgd:prediction=previous", "cocod:period=4", TURNS]
WINDOWS: dict[str, tuple[Found, Found]] = {
    "Keras' accumulation": ({"gradient_accumulation_steps": 3}, {}),
    "passes": ({}, {"backward_passes_per_step": 3}),
}
STATISTICS = ["callback", "fit", "own loop"]


def is_last() -> bool:
    return bool(hvd.rank() == hvd.size() - 1)


def overflow_of_a_local_gradient() -> Found:
    shared, local = (keras.Variable(0.0, dtype="float32", name=name) for name in ("w", "own"))
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    inner.register_local_var(local)
    scaler = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    gradients = [tf.constant(4.0), tf.constant(np.inf if is_last() else 4.0)]
    scaler.apply(gradients, [shared, local])
    return {
        "shared": float(shared.numpy()),
        "scale": float(scaler.dynamic_scale),
        "iterations": int(inner.iterations),
    }


def stepped(strategy: str) -> tuple[Any, Any]:
    """A model in mid-training, with something in flight."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9), strategy=strategy
    )
    optimizer.build(model.trainable_variables)
    return model, optimizer


def train(model: Any, optimizer: Any, first: int, last: int) -> None:
    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    for number in range(first, last):
        step(*map(tf.constant, batch(hvd.rank(), number)))


def loaded_by_the_first(strategy: str) -> Found:
    """Horovod's recipe: rank 0 loads, and all get its variables."""
    model, optimizer = stepped(strategy)
    train(model, optimizer, 0, 5)
    other, resumed = stepped(strategy)
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(model=model, optimizer=optimizer).write(f"{folder}/own")
        if hvd.rank() == 0:
            tf.train.Checkpoint(model=other, optimizer=resumed).read(path)
    other.compile(resumed, "mse")
    x, y = data(hvd.rank())
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    other.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    return {"weights": weights_of(other), "iterations": int(resumed.iterations)}


def written_before_a_step(strategy: str) -> Found:
    """A checkpoint that is read and written again holds as much."""
    model, optimizer = stepped(strategy)
    train(model, optimizer, 0, 5)
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(model=model, optimizer=optimizer).write(f"{folder}/one")
        model, optimizer = stepped(strategy)
        saver = tf.train.Checkpoint(model=model, optimizer=optimizer)
        saver.read(path)
        path = saver.write(f"{folder}/two")
        other, resumed = stepped(strategy)
        tf.train.Checkpoint(model=other, optimizer=resumed).read(path)
    found = []
    for each, its in ((model, optimizer), (other, resumed)):
        train(each, its, 5, 12)
        its.synchronize()
        found.append(weights_of(each))
    return {"went on": found[0], "read again": found[1]}


def window_in_a_checkpoint(name: str) -> Found:
    """Saved between two passes of one gradient."""
    mine, ours = WINDOWS[name]

    def made() -> tuple[Any, Any]:
        weight = keras.Variable([0.0, 0.0], dtype="float32", name="w")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, **mine), **ours)
        optimizer.build([weight])
        return weight, optimizer

    def passes(weight: Any, optimizer: Any, first: int, last: int) -> None:
        for number in range(first, last):
            optimizer.apply([tf.constant([1.0, 2.0]) * (number + 1.0)], [weight])

    weight, optimizer = made()
    passes(weight, optimizer, 0, 4)
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(w=weight.value, optimizer=optimizer).write(f"{folder}/own")
        other, resumed = made()
        tf.train.Checkpoint(w=other.value, optimizer=resumed).read(path)
    passes(weight, optimizer, 4, 9)
    passes(other, resumed, 4, 9)
    return {"whole": weight.numpy(), "resumed": other.numpy()}


def window_in_a_keras_file() -> Found:
    def made() -> Any:
        model = make_model()
        plain = keras.optimizers.SGD(0.05, gradient_accumulation_steps=3)
        model.compile(hvd.DistributedOptimizer(plain), "mse")
        return model

    x, y = data(hvd.rank(), 9)
    model = made()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.keras"
        model.fit(x[: 4 * BATCH], y[: 4 * BATCH], batch_size=BATCH, shuffle=False, verbose=0)
        model.save(file)
        other = hvd.load_model(file)
    for each in (model, other):
        each.fit(x[4 * BATCH :], y[4 * BATCH :], batch_size=BATCH, shuffle=False, verbose=0)
    return {"whole": weights_of(model), "resumed": weights_of(other)}


def loaded_into_other_buckets() -> Found:
    """What was lost of one bucket must not be added to another's gradients."""

    def made(bucket_bytes: int) -> tuple[Any, Any]:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.05),
            strategy=hvd.MergedGradient(bucket_bytes=bucket_bytes),
            compression=hvd.Int8(chunk=16, error_feedback=True),
        )
        optimizer.build(model.trainable_variables)
        return model, optimizer

    def lost(optimizer: Any) -> list[float]:
        (session,) = optimizer._hvd_pipe
        return [float(np.abs(each).sum()) for each in session.engine.state().values()]

    model, optimizer = made(100)
    train(model, optimizer, 0, 3)
    other, resumed = made(300)
    train(other, resumed, 0, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(model=model, optimizer=optimizer).write(f"{folder}/own")
        tf.train.Checkpoint(model=other, optimizer=resumed).read(path)
    return {"before": sum(lost(optimizer)), "after": sum(lost(resumed))}


def stock_horovod() -> Found:
    """The same script, by Horovod 0.28.1's own optimizer."""
    model = make_model()
    model.compile(stock_keras.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    began = weights_of(model)
    x, y = data(hvd.rank(), 4)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return {"began": began, "weights": weights_of(model)}


def windows_of_two_lists() -> Found:
    first, second = (keras.Variable(0.0, dtype="float32", name=name) for name in ("a", "b"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.build([first, second])
    for _ in range(2):
        optimizer.apply([tf.constant(1.0)], [first])
        optimizer.apply([tf.constant(10.0)], [second])
    return {"weights": [float(first.numpy()), float(second.numpy())]}


def two_broadcasts_in_a_step() -> Found:
    ones = [tf.Variable(float(hvd.rank())) for _ in range(3)]
    others = [tf.Variable(10.0 + hvd.rank()) for _ in range(3)]

    @tf.function
    def step() -> None:
        hvd_tf.broadcast_variables(ones, root_rank=1)
        hvd_tf.broadcast_variables(others, root_rank=1)

    step()
    return {"values": [float(each.numpy()) for each in (*ones, *others)]}


def unlike_epochs() -> Found:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    x, y = data(hvd.rank(), 3 if is_last() else 4)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    try:
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=callbacks)
    except RanksDisagreeError as error:
        return {"error": str(error)}
    return {"error": ""}


class OwnStep(keras.Sequential):  # type: ignore[misc]
    """`fit` does not know what such a model trains."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def traces(cls: type[Any]) -> Found:
    """A function that creates variables is traced twice; where they exist already, once."""
    calls = []

    def loss(y: Any, found: Any) -> Any:
        calls.append(1)
        return keras.losses.mean_squared_error(y, found)

    model = cls([*make_model().layers, hvd_tf.SyncBatchNormalization(dtype="float64")])
    x, y = data(hvd.rank(), 3)
    model.build((None, *x.shape[1:]))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    model.compile(optimizer, loss)
    if is_last():
        optimizer.build(model.trainable_variables)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    return {"weights": weights_of(model), "traces": len(calls)}


def unlike_groups() -> Found:
    """Lists of the same sizes, of other variables."""
    weights = [keras.Variable(np.zeros(2), name=name) for name in ("a", "b", "c")]
    first, *rest = reversed(weights) if is_last() else weights
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=[[first], list(rest)])
    try:
        optimizer.apply([tf.zeros(2, tf.float64) for _ in weights], weights)
    except RanksDisagreeError as error:
        return {"error": str(error)}
    return {"error": ""}


def forgotten_broadcast() -> Found:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hvd_pipe").addHandler(handler)
    try:
        model = make_model()
        for each in model.trainable_variables:
            each.assign(each + hvd.rank())
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
        x, y = data(hvd.rank(), 3)
        model.fit(x, y, batch_size=BATCH, verbose=0)
    finally:
        logging.getLogger("hvd_pipe").removeHandler(handler)
    return {"said": said}


def statistics_after_cocod(way: str) -> Found:
    """BatchNormalization's, which local steps leave unequal; and their mean over the ranks."""
    keras.utils.set_random_seed(7)
    norm = keras.layers.BatchNormalization(center=False, scale=False)
    model = keras.Sequential([keras.layers.Input((6,)), norm, keras.layers.Dense(3)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), strategy="cocod:period=2")
    optimizer.build(model.trainable_variables)  # else the callback broadcasts after a step
    x, y = data(hvd.rank(), 4)
    if way == "own loop":
        train(model, optimizer, 0, 4)
        optimizer.synchronize()
    else:
        model.compile(optimizer, "mse")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(
            x,
            y,
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
            callbacks=callbacks if way == "callback" else [],
        )
    mean = np.zeros(6)
    for number in range(4):
        mean = 0.99 * mean + 0.01 * x[number * BATCH : (number + 1) * BATCH].mean(axis=0)
    return {
        "statistics": [np.array(each) for each in model.non_trainable_variables],
        "mean here": mean,
    }


def optimizers_beside_the_compiled() -> Found:
    """A model that trains its parts by optimizers of its own, as GANs do."""

    class Pair(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = [make_model(), make_model()]
            self.first, self.second = (
                hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), strategy=name)
                for name in ("pipe-sgd", "cocod:period=4")
            )
            for part, optimizer in zip(self.parts, (self.first, self.second), strict=True):
                optimizer.build(part.trainable_variables)
            self.built = True

        def train_step(self, pair: Any) -> Found:
            x, y = pair
            for part, optimizer in zip(self.parts, (self.first, self.second), strict=True):
                with tf.GradientTape() as tape:
                    loss = loss_of(part, x, y)
                gradients = tape.gradient(loss, part.trainable_variables)
                optimizer.apply(gradients, part.trainable_variables)
            return {"loss": loss}

    model = Pair()
    model.compile(jit_compile=False)
    x, y = data(hvd.rank(), 7)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    return {
        "weights": [weights_of(part) for part in model.parts],
        "updates": [int(model.first.iterations), int(model.second.iterations)],
    }


def memory_that_one_rank_lacks() -> Found:
    """Rank 1 cannot allocate what all-reduces are measured with."""
    sender = _Sender(hvd.global_process_set, "memory")
    lacks = mock.patch("tensorflow.zeros", side_effect=MemoryError("too little"))
    try:
        with lacks if hvd.rank() == 1 else contextlib.nullcontext():
            sender.allocate(1000)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


def observations() -> dict[str, Found | Raised]:
    hvd.init()
    cases: dict[str, Any] = {}
    for name in OVERFLOWS:
        cases[f"overflow {name}"] = lambda name=name: overflow_on_one_rank(name)
    for name in IN_FLIGHT:
        cases[f"loaded {name}"] = lambda name=name: loaded_by_the_first(name)
        cases[f"written {name}"] = lambda name=name: written_before_a_step(name)
    for name in WINDOWS:
        cases[f"window {name}"] = lambda name=name: window_in_a_checkpoint(name)
    for name in STATISTICS:
        cases[f"statistics {name}"] = lambda name=name: statistics_after_cocod(name)
    cases |= {
        "local overflow": overflow_of_a_local_gradient,
        "window in a file": window_in_a_keras_file,
        "buckets": loaded_into_other_buckets,
        "stock": stock_horovod,
        "two lists": windows_of_two_lists,
        "two broadcasts": two_broadcasts_in_a_step,
        "unlike epochs": unlike_epochs,
        "unlike groups": unlike_groups,
        "unlike traces": lambda: traces(OwnStep),
        "one trace": lambda: traces(keras.Sequential),
        "forgotten": forgotten_broadcast,
        "no memory": memory_that_one_rank_lacks,
        "optimizers": optimizers_beside_the_compiled,
    }
    return run_cases(cases)
