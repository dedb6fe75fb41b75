"""What ranks do with variables that are theirs alone; each function is a case."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras_problem import BATCH
from workers_keras_features import Found, data

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.errors import RanksDisagreeError

STRATEGIES = ["merged-gradient", "pipe-sgd", "cocod:period=2", "cocod:period=2,momentum=average"]


def optimizer_of_unlike_tables(strategy: str) -> Found:
    """Rank r has r + 1 tables of r + 2 rows, and a weight that all share."""
    rank = hvd.rank()
    tables = [keras.Variable(np.zeros((rank + 2, 3)), name="table") for _ in range(rank + 1)]
    shared = keras.Variable(np.zeros(2), name="table")
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0, momentum=0.5), strategy=strategy, scale_local_gradients=False
    )
    for each in tables:
        optimizer.register_local_var(each)
    variables = [*tables, shared]

    @tf.function
    def step(factor: Any) -> None:
        gradients = [tf.ones_like(each.value) * factor * (rank + 1.0) for each in variables]
        optimizer.apply(gradients, variables)

    for number in range(3):
        step(tf.constant(number + 1.0, tf.float64))
    optimizer.synchronize()
    return {"tables": [np.array(each) for each in tables], "shared": np.array(shared)}


def partial_optimizer() -> Found:
    """Under ``fit``, with momenta of other shapes, accumulation, and a broadcast."""
    rows = hvd.rank() + 3
    keras.utils.set_random_seed(hvd.rank())
    own = keras.layers.Dense(rows, use_bias=False, name="own")
    norm = keras.layers.BatchNormalization(name="own_norm")
    model = keras.Sequential(
        [keras.layers.Input((6,)), own, norm, keras.layers.Lambda(_mean), keras.layers.Dense(3)]
    )
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.5, use_ema=True),
        backward_passes_per_step=2,
        local_layers=[own, norm],
        strategy="cocod:period=2",
    )
    began = own.kernel.numpy().copy()
    model.compile(optimizer, "mse")
    x, y = data(hvd.rank(), 6)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return {
        "began": began,
        "own": own.kernel.numpy(),
        "statistics": norm.moving_mean.numpy(),
        "shared": np.concatenate([each.numpy().ravel() for each in model.layers[-1].weights]),
    }


def _mean(values: Any) -> Any:
    return keras.ops.mean(values, axis=1, keepdims=True)


def tape_of_unlike_layers() -> Found:
    own = keras.layers.Dense(hvd.rank() + 2, use_bias=False, kernel_initializer="ones")
    shared = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    own.build((None, 2))
    shared.build((None, 1))
    x = tf.ones((1, 2), tf.float64) * (hvd.rank() + 1.0)
    with tf.GradientTape() as recorded:
        hidden = tf.reduce_sum(own(x), axis=1, keepdims=True)
        loss = tf.reduce_sum(shared(hidden))
    tape = hvd_tf.PartialDistributedGradientTape(
        recorded, local_layers=own, scale_local_gradients=False
    )
    mine, ours = tape.gradient(loss, [own.kernel.value, shared.kernel.value])
    return {"own": np.array(mine), "shared": np.array(ours), "hidden": float(hidden[0, 0])}


def local_on_one_rank_only() -> Found:
    weight, other = (keras.Variable(np.zeros(3), name=name) for name in ("weight", "other"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    if hvd.rank() == 1:
        optimizer.register_local_var(weight)
    try:
        optimizer.apply([tf.zeros(3, tf.float64)] * 2, [weight, other])
    except RanksDisagreeError as error:
        return {"error": str(error)}
    return {"error": ""}


def nothing_is_shared(strategy: str) -> Found:
    """All variables are local, and an optimizer is asked to finish what is in flight."""
    weight = keras.Variable(np.zeros(hvd.rank() + 2), name="weight")
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), strategy=strategy, scale_local_gradients=False
    )
    optimizer.register_local_var(weight)
    for number in range(3):
        optimizer.apply([tf.ones(weight.shape, tf.float64) * (number + 1.0)], [weight])
    optimizer.synchronize()
    return {"weight": np.array(weight)}


GRADIENTS = (1.0, 2.0, -3.0, 0.5)


def plain(name: str) -> Any:
    """Make an optimizer whose updates depend on how many there have been."""
    kind = name.partition(",")[0]
    if kind == "ema":
        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    return {"adam": keras.optimizers.Adam, "nadam": keras.optimizers.Nadam}[kind](rate)


COUNTING = {
    "adam": "pipe-sgd",
    "adam, warm": "pipe-sgd:warmup_steps=2",
    "nadam": "pipe-sgd",
    "ema": "pipe-sgd:warmup_steps=2",
}


def counted_alike(name: str) -> Found:
    """Rank 1 alone has a table; all share a weight."""
    rank, shared = hvd.rank(), keras.Variable(np.zeros(2), name="shared")
    variables = [shared]
    optimizer = hvd.DistributedOptimizer(plain(name), strategy=COUNTING[name])
    if rank == 1:
        variables.append(keras.Variable(np.zeros(3), name="table"))
        optimizer.register_local_var(variables[1])

    @tf.function
    def step(factor: Any) -> None:
        gradients = [tf.ones_like(each.value) * factor * (rank + 1.0) for each in variables]
        optimizer.apply(gradients, variables)

    for factor in GRADIENTS:
        step(tf.constant(factor, tf.float64))
    optimizer.synchronize()
    return {
        "shared": np.array(shared),
        "tables": [np.array(each) for each in variables[1:]],
        "iterations": int(optimizer.iterations),
    }


def scaled_on_one_rank(mode: str) -> Found:
    """Rank 1 alone has a table, whose first gradient overflows."""
    rank, shared = hvd.rank(), keras.Variable(np.zeros(2), name="shared")
    variables = [shared]
    inner = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), strategy="pipe-sgd", scale_local_gradients=False
    )
    if rank == 1:
        variables.append(keras.Variable(np.zeros(3), name="table"))
        inner.register_local_var(variables[1])
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    optimizer.build(variables)

    def step(factor: Any, own: Any) -> None:
        scale = tf.cast(optimizer.dynamic_scale.value, tf.float64)
        found = [tf.ones_like(shared.value) * factor * (rank + 1.0) * scale]
        found += [tf.ones_like(each.value) * own * scale for each in variables[1:]]
        optimizer.apply(found, variables)

    run = tf.function(step) if mode == "function" else step
    for factor, own in zip(GRADIENTS, (np.inf, *GRADIENTS[1:]), strict=True):
        run(tf.constant(factor, tf.float64), tf.constant(own, tf.float64))
    inner.synchronize()
    return {
        "shared": np.array(shared),
        "tables": [np.array(each) for each in variables[1:]],
        "scale": float(optimizer.dynamic_scale),
        "counter": int(optimizer.step_counter),
    }


CASES: dict[str, tuple[Any, ...]] = {
    **{f"counted alike {name}": (counted_alike, name) for name in COUNTING},
    **{f"scaled {mode}": (scaled_on_one_rank, mode) for mode in ("eager", "function")},
    **{f"unlike tables {name}": (optimizer_of_unlike_tables, name) for name in STRATEGIES},
    "partial optimizer": (partial_optimizer,),
    "partial tape": (tape_of_unlike_layers,),
    "local on one rank": (local_on_one_rank_only,),
    **{
        f"nothing shared {name}": (nothing_is_shared, name)
        for name in [*STRATEGIES, "pipe-sgd:prediction=local"]
    },
}
