"""Variables that are a rank's own: they do not travel, so that ranks need not have the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_training import data, fit
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd

two = on_ranks(2, init=hvd.init)

STRATEGIES = ["merged-gradient", "pipe-sgd", "cocod:period=2", "cocod:period=2,momentum=average"]
GRADIENTS = (1.0, 2.0, -3.0, 0.5)


def descent(gradients: list[float], momentum: float = 0.5) -> float:
    """Where these gradients lead a weight of 0, with a learning rate of 1."""
    weight = velocity = 0.0
    for gradient in gradients:
        velocity = momentum * velocity - gradient
        weight += velocity
    return weight


@two
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_may_have_tables_of_unlike_shapes(strategy: str) -> None:
    """A model-parallel table was refused, as ranks had other shapes of it, and other numbers."""
    rank = hvd.rank()  # has so many tables and one more, of so many rows and two more
    tables = [keras.Variable(np.zeros((rank + 2, 3)), name="table") for _ in range(rank + 1)]
    shared = keras.Variable(np.zeros(2), name="table")
    plain = keras.optimizers.SGD(1.0, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(plain, strategy=strategy, scale_local_gradients=False)
    for each in tables:
        optimizer.register_local_var(each)
    variables = [*tables, shared]

    @tf.function(autograph=False)
    def step(factor: Any) -> None:
        gradients = [tf.ones_like(each.value) * factor * (rank + 1.0) for each in variables]
        optimizer.apply(gradients, variables)

    for number in range(3):
        step(tf.constant(number + 1.0, tf.float64))
    optimizer.synchronize()
    own = descent([(rank + 1.0) * step for step in (1, 2, 3)])
    for each in tables:
        assert each.shape == (rank + 2, 3)
        np.testing.assert_allclose(each, own, rtol=0, atol=1e-12)
    mean = descent([1.5 * step for step in (1, 2, 3)])
    np.testing.assert_allclose(shared, mean, rtol=0, atol=1e-12)


@two
def test_layers_of_a_rank_are_neither_broadcast_nor_averaged() -> None:
    """Slots, moving averages and statistics of local layers have unlike shapes as well."""

    def mean(values: Any) -> Any:
        return keras.ops.mean(values, axis=1, keepdims=True)

    layers = keras.layers
    keras.utils.set_random_seed(hvd.rank())
    own = layers.Dense(hvd.rank() + 3, use_bias=False, name="own")
    norm = layers.BatchNormalization(name="own_norm")
    model = keras.Sequential([layers.Input((6,)), own, norm, layers.Lambda(mean), layers.Dense(3)])
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.5, use_ema=True),
        backward_passes_per_step=2,
        local_layers=[own, norm],
        strategy="cocod:period=2",
    )
    began = own.kernel.numpy().copy()
    model.compile(optimizer, "mse")
    fit(model, *data(0, 6), epochs=2)
    assert own.kernel.shape == began.shape
    assert np.all(own.kernel.numpy() != began)
    first, second = gather(np.concatenate([np.ravel(each) for each in model.layers[-1].weights]))
    np.testing.assert_array_equal(first, second)
    assert norm.moving_mean.shape == (hvd.rank() + 3,)


@two
def test_a_tape_leaves_layers_of_unlike_shapes_alone() -> None:
    rank = hvd.rank()
    own = keras.layers.Dense(rank + 2, use_bias=False, kernel_initializer="ones")
    shared = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    own.build((None, 2))
    shared.build((None, 1))
    x = tf.ones((1, 2), tf.float64) * (rank + 1.0)
    with tf.GradientTape() as recorded:
        hidden = tf.reduce_sum(own(x), axis=1, keepdims=True)
        loss = tf.reduce_sum(shared(hidden))
    tape = hvd_tf.PartialDistributedGradientTape(
        recorded, local_layers=own, scale_local_gradients=False
    )
    mine, ours = tape.gradient(loss, [own.kernel.value, shared.kernel.value])
    np.testing.assert_allclose(mine, np.full((2, rank + 2), rank + 1.0))
    np.testing.assert_allclose(ours, [[np.mean(gather(float(hidden[0, 0])))]])


@two
def test_a_variable_that_is_local_on_one_rank_only_is_told() -> None:
    weight, other = (keras.Variable(np.zeros(3), name=name) for name in ("weight", "other"))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    if hvd.rank() == 1:
        optimizer.register_local_var(weight)
    with pytest.raises(hvd.RanksDisagreeError, match=r"(?s)rank 0 has 2.*rank 1 has 1"):
        optimizer.apply([tf.zeros(3, tf.float64)] * 2, [weight, other])


@two
@pytest.mark.parametrize("strategy", [*STRATEGIES, "pipe-sgd:prediction=local"])
def test_all_variables_may_be_local(strategy: str) -> None:
    """Where nothing was sent, ``tf.stack([])`` raised, and a plan of no buckets."""
    weight = keras.Variable(np.zeros(hvd.rank() + 2), name="weight")
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), strategy=strategy, scale_local_gradients=False
    )
    optimizer.register_local_var(weight)
    for number in range(3):
        optimizer.apply([tf.ones(weight.shape, tf.float64) * (number + 1.0)], [weight])
    optimizer.synchronize()
    np.testing.assert_allclose(weight, -6.0)


def averaging() -> Any:
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)


RATE = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)


@two
@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        pytest.param(lambda: keras.optimizers.Adam(RATE), "pipe-sgd", id="adam"),
        pytest.param(
            *(lambda: keras.optimizers.Adam(RATE), "pipe-sgd:warmup_steps=2"), id="adam, warm"
        ),
        pytest.param(lambda: keras.optimizers.Nadam(RATE), "pipe-sgd", id="nadam"),
        pytest.param(averaging, "pipe-sgd:warmup_steps=2", id="ema"),
    ],
)
def test_a_table_on_one_rank_leaves_what_is_shared_alone(
    make: Callable[[], Any], strategy: str
) -> None:
    """The first step of Pipe-SGD applies a table's gradient alone, and counted as an update.

    Where one rank had a table, its bias correction, learning rate and moving averages were a step
    ahead of the others', and shared weights left each other.
    """
    weight, serial = keras.Variable(np.zeros(2), name="weight"), make()
    for factor in GRADIENTS:
        serial.apply([tf.ones(2, tf.float64) * factor * 1.5], [weight])
    optimizer = hvd.DistributedOptimizer(make(), strategy=strategy)
    shared, *tables = variables = with_a_table_on_rank_1(optimizer)

    @tf.function(autograph=False)
    def step(factor: Any) -> None:
        factor *= hvd.rank() + 1.0
        optimizer.apply([tf.ones_like(each.value) * factor for each in variables], variables)

    for factor in GRADIENTS:
        step(tf.constant(factor, tf.float64))
    optimizer.synchronize()
    assert int(optimizer.iterations) == len(GRADIENTS)
    np.testing.assert_allclose(shared, weight, rtol=0, atol=1e-12)
    assert all(np.any(each) for each in tables)


def with_a_table_on_rank_1(optimizer: Any) -> list[Any]:
    """Return a rank's variables; the second one, which rank 1 alone has, is local."""
    variables = [keras.Variable(np.zeros(2), name="shared")]
    if hvd.rank() == 1:
        variables.append(keras.Variable(np.zeros(3), name="table"))
        optimizer.register_local_var(variables[1])
    return variables


@two
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_an_overflow_in_a_table_of_one_rank_is_one_on_all(mode: str) -> None:
    """Ranks without a table did not vote in Pipe-SGD's first step, and the others waited."""
    inner = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), strategy="pipe-sgd", scale_local_gradients=False
    )
    shared, *tables = variables = with_a_table_on_rank_1(inner)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    optimizer.build(variables)

    def step(factor: Any, own: Any) -> None:
        scale = tf.cast(optimizer.dynamic_scale.value, tf.float64)
        found = [tf.ones_like(shared.value) * factor * (hvd.rank() + 1.0) * scale]
        found += [tf.ones_like(each.value) * own * scale for each in tables]
        optimizer.apply(found, variables)

    run = tf.function(step, autograph=False) if mode == "function" else step
    for factor, own in zip(GRADIENTS, (np.inf, *GRADIENTS[1:]), strict=True):
        run(tf.constant(factor, tf.float64), tf.constant(own, tf.float64))
    inner.synchronize()
    np.testing.assert_allclose(shared, -1.5 * sum(GRADIENTS), rtol=0, atol=1e-12)
    assert float(optimizer.dynamic_scale) == 4.0
    assert int(optimizer.step_counter) == len(GRADIENTS) - 1
    for table in tables:
        np.testing.assert_allclose(table, -sum(GRADIENTS[1:]))
