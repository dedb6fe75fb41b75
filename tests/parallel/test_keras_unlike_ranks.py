"""Ranks that differ, and training that stops half-way: all decide alike, and nothing is lost."""

from __future__ import annotations

import contextlib
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
from on_ranks import on_ranks

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
@pytest.mark.parametrize(
    ("mine", "ours"),
    [({"gradient_accumulation_steps": 3}, {}), ({}, {"backward_passes_per_step": 3})],
    ids=["Keras' accumulation", "passes"],
)
def test_a_checkpoint_between_two_passes_goes_on(
    mine: dict[str, Any], ours: dict[str, Any], tmp_path: Path
) -> None:
    def made() -> tuple[Any, Any, Any]:
        weight = keras.Variable([0.0, 0.0], dtype="float32", name="w")
        optimizer = hvd.DistributedOptimizer(sgd(1.0, **mine), **ours)
        optimizer.build([weight])
        return weight, optimizer, tf.train.Checkpoint(w=weight.value, optimizer=optimizer)

    def passes(weight: Any, optimizer: Any, first: int, last: int) -> None:
        for number in range(first, last):
            optimizer.apply([tf.constant([1.0, 2.0]) * (number + 1.0)], [weight])

    (weight, optimizer, saver), (other, resumed, loader) = made(), made()
    passes(weight, optimizer, 0, 4)
    loader.read(saver.write(str(tmp_path / "own")))
    passes(weight, optimizer, 4, 9)
    passes(other, resumed, 4, 9)
    np.testing.assert_array_equal(other, weight)
    assert np.all(np.array(weight) != 0)


@two
def test_a_keras_file_between_two_passes_goes_on(tmp_path: Path) -> None:
    model = small_model()
    model.compile(hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=3)), "mse")
    alone(model, *data(0, 4))
    model.save(tmp_path / "model.keras")
    other = hvd.load_model(tmp_path / "model.keras")
    for each in (model, other):
        alone(each, *data(4, 9))
    np.testing.assert_array_equal(weights_of(other), weights_of(model))


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
