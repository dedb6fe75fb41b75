"""Ranks that differ, and training that stops half-way: all decide alike, and nothing is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_problem import BATCH, batch, weights_of
from keras_training import (
    OVERFLOWING,
    Trainer,
    assert_alike,
    data,
    fit,
    overflow_on_one_rank,
    small_model,
)
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.tensorflow.measuring.ready_times import _Sender

N = 2
two = on_ranks(N, init=hvd.init)

BEGUN, STEPS = 5, 12  # steps before a checkpoint, and in all


def is_last() -> bool:
    return bool(hvd.rank() == N - 1)


def sgd(rate: float = 0.05, **options: Any) -> Any:
    return keras.optimizers.SGD(rate, **options)


def alone(model: Any, x: Any, y: Any) -> Any:
    """Train by ``fit`` without the broadcast callback."""
    return model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


@two
@pytest.mark.parametrize(
    "strategy", ["merged-gradient", "pipe-sgd:prediction=local", "cocod:period=4,fragments=2"]
)
def test_an_overflow_on_one_rank_leaves_the_update_out_on_all(strategy: str) -> None:
    """Keras' LossScaleOptimizer looks at local gradients: one rank would go its own way.

    Also where each rank steps by itself, and where a guess would carry it on for ever.
    """
    model = overflow_on_one_rank(strategy)
    assert_alike(weights_of(model))
    scaler = model.optimizer
    assert type(scaler).__name__ == "LossScaleOptimizer"
    assert_alike(scaler.dynamic_scale)
    assert_alike(scaler.inner_optimizer.iterations)
    if strategy == "merged-gradient":
        assert float(scaler.dynamic_scale) == 2.0**14
        assert int(scaler.inner_optimizer.iterations) == OVERFLOWING - 1


@two
def test_an_overflow_of_a_local_gradient_is_one_for_all() -> None:
    shared, local = (keras.Variable(0.0, dtype="float32", name=name) for name in ("w", "own"))
    inner = hvd.DistributedOptimizer(sgd(1.0))
    inner.register_local_var(local)
    scaler = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    gradients = [tf.constant(4.0), tf.constant(np.inf if is_last() else 4.0)]
    scaler.apply(gradients, [shared, local])
    assert (float(shared), float(scaler.dynamic_scale), int(inner.iterations)) == (0.0, 2.0, 0)


@two
@pytest.mark.parametrize("strategy", ["pipe-sgd:prediction=local", "cocod:period=4,fragments=2"])
def test_ranks_start_alike_when_the_first_alone_has_loaded(strategy: str, tmp_path: Path) -> None:
    """Horovod's recipe: rank 0 loads, and all get its variables, with something in flight."""
    begun, trainer = (Trainer(small_model, strategy=strategy) for _ in range(2))
    begun.train(0, BEGUN)
    if hvd.rank() == 0:
        trainer.saver.read(begun.saver.write(str(tmp_path / "own")))
    trainer.model.compile(trainer.optimizer, "mse")
    fit(trainer.model, *data(0, STEPS))
    assert_alike(weights_of(trainer.model))
    assert_alike(trainer.optimizer.iterations)


@two
@pytest.mark.parametrize("way", ["Keras' accumulation", "passes", "a keras file"])
def test_training_goes_on_between_two_passes(way: str, tmp_path: Path) -> None:
    ours = {"backward_passes_per_step": 3} if way == "passes" else {}
    plain = {} if ours else {"gradient_accumulation_steps": 3}

    def made() -> tuple[Any, Any]:
        model = small_model()
        model.compile(hvd.DistributedOptimizer(sgd(**plain), **ours), "mse")
        model.optimizer.build(model.trainable_variables)
        return model, tf.train.Checkpoint(model=model, optimizer=model.optimizer)

    (model, saver), (other, loader) = made(), made()
    alone(model, *data(0, 4))
    if way == "a keras file":
        model.save(tmp_path / "model.keras")
        other = hvd.load_model(tmp_path / "model.keras")
    else:
        loader.read(saver.write(str(tmp_path / "own")))
    before = weights_of(model)
    for each in (model, other):
        alone(each, *data(4, 9))
    np.testing.assert_array_equal(weights_of(other), weights_of(model))
    assert not np.array_equal(weights_of(model), before)


@two
def test_each_list_of_variables_has_passes_of_its_own() -> None:
    first, second = (keras.Variable(0.0, dtype="float32", name=name) for name in ("a", "b"))
    optimizer = hvd.DistributedOptimizer(sgd(1.0), backward_passes_per_step=2)
    optimizer.build([first, second])
    for _ in range(2):
        optimizer.apply([tf.constant(1.0)], [first])
        optimizer.apply([tf.constant(10.0)], [second])
    assert [float(first), float(second)] == [-2.0, -20.0]


@two
def test_what_a_codec_has_lost_stays_with_its_bucket(tmp_path: Path) -> None:
    """It must not be added to another bucket's gradients."""

    def made(bucket_bytes: int, steps: int) -> Trainer:
        strategy = hvd.MergedGradient(bucket_bytes=bucket_bytes)
        compression = hvd.Int8(chunk=16, error_feedback=True)
        trainer = Trainer(small_model, strategy=strategy, compression=compression)
        trainer.train(0, steps)
        return trainer

    def lost(trainer: Trainer) -> float:
        (session,) = trainer.optimizer._hvd_pipe
        return sum(float(np.abs(each).sum()) for each in session.engine.state().values())

    trained, resumed = made(100, 3), made(300, 1)
    resumed.saver.read(trained.saver.write(str(tmp_path / "own")))
    assert lost(trained) > 0
    assert lost(resumed) == 0


@two
def test_a_step_may_broadcast_twice() -> None:
    ones = [tf.Variable(float(hvd.rank())) for _ in range(3)]
    others = [tf.Variable(10.0 + hvd.rank()) for _ in range(3)]

    @tf.function
    def step() -> None:
        hvd_tf.broadcast_variables(ones, root_rank=1)
        hvd_tf.broadcast_variables(others, root_rank=1)

    step()
    assert [float(each) for each in (*ones, *others)] == [1.0] * 3 + [11.0] * 3


@two
def test_epochs_of_unlike_length_are_refused() -> None:
    """The rank with more batches would wait for ever."""
    model = small_model()
    model.compile(hvd.DistributedOptimizer(sgd()), "mse")
    words = "(?s)the batches of an epoch.*rank 0 has 4.*rank 1 has 3"
    with pytest.raises(RanksDisagreeError, match=words):
        fit(model, *data(0, 3 if is_last() else 4))


class OwnStep(keras.Sequential):  # type: ignore[misc]
    """`fit` does not know what such a model trains."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@two
@pytest.mark.parametrize("cls", [OwnStep, keras.Sequential])
def test_a_rank_may_have_built_its_optimizer_before(cls: type[Any]) -> None:
    """Names of messages counted traces; that rank had fewer, and all ranks waited for ever.

    A function that creates variables is traced twice; where they exist already, once. Under
    ``fit`` of Keras' own step the optimizer is built by then.
    """
    calls = []

    def loss(y: Any, output: Any) -> Any:
        calls.append(1)
        return keras.losses.mean_squared_error(y, output)

    layers = [keras.layers.Dense(3), hvd_tf.SyncBatchNormalization(dtype="float64")]
    keras.utils.set_random_seed(7)
    model = cls([keras.layers.Input((6,)), *layers])
    optimizer = hvd.DistributedOptimizer(sgd(momentum=0.9))
    model.compile(optimizer, loss)
    if is_last():
        optimizer.build(model.trainable_variables)
    alone(model, *data(0, 3))
    assert_alike(weights_of(model))
    assert len(calls) == (2 if cls is OwnStep and not is_last() else 1)


@two
def test_groups_of_other_variables_are_refused() -> None:
    """Lists of the same sizes, of other variables."""
    weights = [keras.Variable(np.zeros(2), name=name) for name in ("a", "b", "c")]
    first, *rest = reversed(weights) if is_last() else weights
    optimizer = hvd.DistributedOptimizer(sgd(1.0), groups=[[first], list(rest)])
    with pytest.raises(RanksDisagreeError, match="groups") as raised:
        optimizer.apply([tf.zeros(2, tf.float64) for _ in weights], weights)
    assert "[[0], [1, 2]]" in str(raised.value)


@two
def test_a_forgotten_broadcast_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    for each in model.trainable_variables:
        each.assign(each + hvd.rank())
    model.compile(hvd.DistributedOptimizer(sgd()), "mse")
    with caplog.at_level("WARNING", logger="hvd_pipe"):
        alone(model, *data(0, 3))
    said = [each.getMessage() for each in caplog.records if each.name.startswith("hvd_pipe")]
    if hvd.rank() == 0:
        assert any("BroadcastGlobalVariablesCallback(0)" in text for text in said)
    else:
        assert said == []


@two
@pytest.mark.parametrize("way", ["callback", "fit", "own loop"])
def test_statistics_are_averaged_with_the_weights(way: str) -> None:
    """Without the callback, and in own loops, rank 0's were saved beside averaged weights.

    BatchNormalization's, which local steps leave unequal.
    """
    steps, inputs = 4, 6
    layers = keras.layers

    def make() -> Any:
        norm = layers.BatchNormalization(center=False, scale=False)
        return keras.Sequential([layers.Input((inputs,)), norm, layers.Dense(3)])

    # Its optimizer is built: else the callback broadcasts after a step.
    trainer = Trainer(make, strategy="cocod:period=2")
    if way == "own loop":
        trainer.train(0, steps)
        trainer.finish()
    else:
        trainer.model.compile(trainer.optimizer, "mse")
        (fit if way == "callback" else alone)(trainer.model, *data(0, steps))
    for each in trainer.model.non_trainable_variables:
        assert_alike(each)
    mean = np.zeros(inputs)
    for number in range(steps):
        x = np.concatenate([batch(rank, number)[0] for rank in range(N)])
        mean = 0.99 * mean + 0.01 * x.mean(axis=0)
    np.testing.assert_allclose(trainer.model.non_trainable_variables[0], mean, rtol=0, atol=1e-10)


@two
def test_memory_that_one_rank_lacks_is_missed_on_every_rank() -> None:
    """Under Keras, the other ranks went on to measure, and waited for it."""
    sender = _Sender(hvd.global_process_set, "memory")
    lacks = mock.patch("tensorflow.zeros", side_effect=MemoryError("too little"))
    kind, words = (
        (MemoryError, "^too little$")
        if is_last()
        else (HvdPipeError, "^rank 1 could not allocate 4000 bytes")
    )
    with lacks if is_last() else contextlib.nullcontext(), pytest.raises(kind, match=words):
        sender.allocate(1000)


# Variables that are a rank's own: they do not travel, so that ranks need not have the same.

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
    plain = sgd(1.0, momentum=0.5)
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
        sgd(0.05, momentum=0.5, use_ema=True),
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
    optimizer = hvd.DistributedOptimizer(sgd(0.1))
    if hvd.rank() == 1:
        optimizer.register_local_var(weight)
    with pytest.raises(hvd.RanksDisagreeError, match=r"(?s)rank 0 has 2.*rank 1 has 1"):
        optimizer.apply([tf.zeros(3, tf.float64)] * 2, [weight, other])


@two
@pytest.mark.parametrize("strategy", [*STRATEGIES, "pipe-sgd:prediction=local"])
def test_all_variables_may_be_local(strategy: str) -> None:
    """Where nothing was sent, ``tf.stack([])`` raised, and a plan of no buckets."""
    weight = keras.Variable(np.zeros(hvd.rank() + 2), name="weight")
    optimizer = hvd.DistributedOptimizer(sgd(1.0), strategy=strategy, scale_local_gradients=False)
    optimizer.register_local_var(weight)
    for number in range(3):
        optimizer.apply([tf.ones(weight.shape, tf.float64) * (number + 1.0)], [weight])
    optimizer.synchronize()
    np.testing.assert_allclose(weight, -6.0)


def averaging() -> Any:
    return sgd(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)


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
    inner = hvd.DistributedOptimizer(sgd(1.0), strategy="pipe-sgd", scale_local_gradients=False)
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
