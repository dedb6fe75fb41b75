"""Keras' and Horovod's features under every strategy, on ranks that differ: all decide alike."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import keras_reference
import numpy as np
import pytest
import tensorflow as tf
from codec_reference import emulated
from keras_problem import BATCH, OPTIMIZERS, STEPS, batch, make_model, weights_of
from keras_training import (
    OVERFLOWING,
    Trainer,
    assert_alike,
    data,
    fit,
    overflow_on_one_rank,
    short_trials,
    small_model,
)
from on_ranks import gather, on_ranks

import hvd_pipe
import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime.gradient_index import SKIP_STEPS
from hvd_pipe.tensorflow.measuring.ready_times import _Sender
from hvd_pipe.tensorflow.messages.reduction import Reduction

N = 2
two = on_ranks(N, init=hvd.init)

MAX_FUNCTIONS, MAX_FILES = 15, 7
OURS = f"{Path(hvd_pipe.__file__).parent}/"
MEAN = 1.5  # of rank + 1 over the ranks
CODED, CODED_ROUNDS = 1000, 4  # elements, no whole slices; rounds
EXACT = ("merged-gradient", "pipe-sgd", "cocod:period=3")


def is_last() -> bool:
    return bool(hvd.rank() == N - 1)


def sgd(rate: float = 0.05, **options: Any) -> Any:
    return keras.optimizers.SGD(rate, **options)


def alone(model: Any, x: Any, y: Any, **options: Any) -> Any:
    """Train without a broadcast."""
    return model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **options)


def fitted(optimizer: Any, make: Callable[[], Any] = make_model, **options: Any) -> Any:
    model = make()
    model.compile(optimizer, "mse", **options)
    alone(model, *data())
    return model


def assert_trained(model: Any, strategy: str, optimizer: str = "momentum") -> None:
    """Its weights are the reference's, and all ranks'."""
    assert_alike(weights_of(model))
    wanted = keras_reference.trajectory(N, strategy, optimizer)[hvd.rank()][-1]
    np.testing.assert_allclose(weights_of(model), wanted, rtol=0, atol=1e-10)


@two
@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        pytest.param({"steps_per_execution": 4}, "pipe-sgd", id="several steps-pipe-sgd"),
        pytest.param({"steps_per_execution": 4}, "cocod:period=3", id="several steps-cocod"),
        pytest.param({"run_eagerly": True}, "cocod:period=3", id="eagerly-cocod"),
    ],
)
def test_fit_trains_alike_however_it_runs(options: dict[str, Any], strategy: str) -> None:
    """Engines do not know who calls `apply`."""
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), strategy=strategy)
    assert_trained(fitted(optimizer, **options), strategy)
    assert int(optimizer.iterations) == STEPS


@two
@pytest.mark.parametrize("way", ["eager", "traced"])
def test_a_step_calls_few_functions_in_few_files(way: str) -> None:
    """A ratchet: a reader follows a gradient through these (docs/architecture.md draws them).

    The step is not the optimizer's first one: that one compares the ranks' variables.
    """
    weights = [keras.Variable(np.zeros(3), name=name) for name in "abcdef"]
    gradients = [tf.ones(3, tf.float64)] * 6
    optimizer = hvd.DistributedOptimizer(sgd(0.05, momentum=0.9))
    optimizer.apply(gradients, weights)
    functions: dict[tuple[str, str], None] = {}

    def note(frame: Any, event: str, _: object) -> None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and path.startswith(OURS) and not name.endswith(("comp>", "genexpr>")):
            functions[path.removeprefix(OURS), frame.f_code.co_qualname] = None

    def step() -> None:
        sys.setprofile(note)
        try:
            optimizer.apply(gradients, weights)
        finally:
            sys.setprofile(None)

    if way == "traced":
        tf.function(step, autograph=False).get_concrete_function()
    else:
        step()
    listed = "\n".join(f"{file}: {name}" for file, name in functions)
    assert 0 < len(functions) <= MAX_FUNCTIONS, listed
    assert len({file for file, _ in functions}) <= MAX_FILES, listed


@two
def test_xla_is_never_chosen_for_a_distributed_optimizer() -> None:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(sgd(0.1)), "mse", jit_compile="auto")
    assert not model.jit_compile


@two
@pytest.mark.parametrize("strategy", EXACT[:2])
def test_a_gradient_that_one_rank_lacks_counts_as_zero(strategy: str) -> None:
    shared, lacked = (keras.Variable(np.zeros(2), name=name) for name in ("shared", "lacked"))
    optimizer = hvd.DistributedOptimizer(sgd(1.0), strategy=strategy)
    gradient = tf.ones(2, tf.float64) * (hvd.rank() + 1.0)
    for _ in range(3):
        mine = None if hvd.rank() == N - 1 else gradient
        optimizer.apply([gradient, mine], [shared, lacked])
    optimizer.synchronize()
    np.testing.assert_allclose(shared, -3 * MEAN)
    np.testing.assert_allclose(lacked, -3 * 1.0 / N)


@two
@pytest.mark.parametrize(
    ("case", "stale"), [("sparse", False), ("dense", False), ("pipe-sgd", True)]
)
def test_rows_of_an_embedding_are_averaged(case: str, stale: bool) -> None:
    """Each rank looks up other rows."""
    keras.utils.set_random_seed(5)
    layer = keras.layers.Embedding(12, 3)
    layer.build()
    optimizer = hvd.DistributedOptimizer(
        sgd(0.5),
        strategy="pipe-sgd" if stale else "merged-gradient",
        sparse_as_dense=case == "dense",
    )
    table = np.array(layer.embeddings)

    @tf.function
    def step(rows: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(rows) ** 2)
        gradients = tape.gradient(loss, [layer.embeddings])
        optimizer.apply(gradients, [layer.embeddings])

    for number in range(3):
        step(tf.constant([hvd.rank(), hvd.rank() + number, 11]))
    optimizer.synchronize()
    assert_alike(layer.embeddings)
    pending = np.zeros_like(table)
    for number in range(3):
        gradient = np.zeros_like(table)
        for rank in range(N):
            for row in (rank, rank + number, 11):
                gradient[row] += 2 * table[row] / N
        table -= 0.5 * (pending if stale else gradient)
        pending = gradient
    if stale:
        table -= 0.5 * pending
    np.testing.assert_allclose(layer.embeddings, table, rtol=0, atol=1e-12)


class MaxScaled:
    """A compressor of a user's own: 127 levels up to a message's largest value.

    Nothing else may travel with gradients: values far below the largest become zero.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        scale = tf.reduce_max(tf.abs(tensor)) / 127
        return tf.round(tf.math.divide_no_nan(tensor, scale)) * scale, None

    @staticmethod
    def decompress(tensor: Any, context: None) -> Any:
        return tensor


CODECS = {
    "fp16": hvd.Compression.fp16,
    "bf16": hvd.Compression.bf16,
    "int8": hvd.Compression.int8,
    "int8 and feedback": hvd.Int8(chunk=16, error_feedback=True),
    "a user's own": MaxScaled,
}


@two
@pytest.mark.parametrize(
    ("codec", "strategy"),
    [  # every codec, and every strategy, as strategies hand their messages to one `Reduction`
        ("fp16", "pipe-sgd"),
        ("bf16", "merged-gradient"),
        ("int8", "pipe-sgd"),
        ("int8 and feedback", "cocod:period=3"),
        ("a user's own", "merged-gradient"),
    ],
)
def test_compression_loses_little(codec: str, strategy: str) -> None:
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["sgd"](), compression=CODECS[codec], strategy=strategy
    )
    weights = weights_of(fitted(optimizer))
    assert_alike(weights)
    exact = keras_reference.trajectory(N, strategy, "sgd")[hvd.rank()][-1]
    assert 1e-9 < np.abs(weights - exact).max() < 0.05


@two
def test_coded_averages_are_those_of_two_phases() -> None:
    """Ranks encode, slices are summed and encoded again, and what is lost is added next time.

    Up to rounding, by which a few values may lie a step of the code apart.
    """
    codec = hvd.Int8(chunk=16, error_feedback=True)
    reduction = Reduction(compression=codec)
    feedback = reduction.feedback(CODED)

    @tf.function
    def average(flat: Any) -> Any:
        return reduction.reduce(flat, "coded", feedback)

    lost = np.zeros((N + 1, CODED), np.float32)
    for number in range(CODED_ROUNDS):
        everyone = [
            np.random.default_rng([rank, number]).standard_normal(CODED).astype(np.float32)
            for rank in range(N)
        ]
        wanted = emulated(codec, everyone, lost=lost)
        coded = average(tf.constant(everyone[hvd.rank()])).numpy()
        assert np.mean(np.abs(coded - wanted) > 1e-5) < 0.01


@two
@pytest.mark.parametrize(
    ("arguments", "factor", "passes"),
    [
        pytest.param({}, MEAN, 1, id="average"),
        pytest.param({"op": hvd.Sum}, N * MEAN, 1, id="sum"),
        pytest.param({"gradient_predivide_factor": 2.0}, MEAN, 1, id="predivide"),
        pytest.param({"backward_passes_per_step": 3}, 3 * MEAN + 3, 3, id="passes"),
        pytest.param(
            {"backward_passes_per_step": 3, "average_aggregated_gradients": True},
            *(MEAN + 1, 3),
            id="averaged passes",
        ),
    ],
)
def test_arguments_mean_what_they_mean_to_horovod(
    arguments: dict[str, Any], factor: float, passes: int
) -> None:
    """What gradients of rank + 1 do to weights of 0, with a learning rate of 1."""
    weight, local = (keras.Variable(np.zeros(3), name=name) for name in ("weight", "local"))
    optimizer = hvd.DistributedOptimizer(sgd(1.0), **arguments)
    optimizer.register_local_var(local)
    for number in range(passes):
        gradient = tf.constant([1.0, 2.0, 3.0], tf.float64) * (hvd.rank() + 1 + number)
        optimizer.apply([gradient, gradient], [weight, local])
    np.testing.assert_allclose(weight, -factor * np.array([1.0, 2.0, 3.0]))
    if not arguments:
        np.testing.assert_allclose(local, -(hvd.rank() + 1) / N * np.array([1.0, 2.0, 3.0]))
    assert int(optimizer.iterations) == passes


@two
def test_groups_are_messages() -> None:
    weights = [keras.Variable(np.zeros(3), name=name) for name in "abcde"]
    optimizer = hvd.DistributedOptimizer(sgd(1.0), groups=2)
    optimizer.apply([tf.ones(3, tf.float64) * (hvd.rank() + 1) for _ in weights], weights)
    assert len(optimizer.plan.buckets) == 2
    np.testing.assert_allclose(weights, np.full((5, 3), -MEAN))


@two
@pytest.mark.parametrize("both", [False, True], ids=["planning", "planning twice"])
def test_the_planning_callback_plans_once_by_its_own_name(both: bool) -> None:
    """Beside a broadcast callback, which has one as well, no step is counted twice."""
    tried_for = 3  # steps of a plan
    callbacks: list[Any] = [hvd.callbacks.PlanningCallback()]
    callbacks += [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if both else []
    plans: list[Plan] = []
    model = small_model()
    optimizer = hvd.DistributedOptimizer(sgd(0.05))
    model.compile(optimizer, "mse")
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda number, logs: plans.append(optimizer.plan)
    )
    with short_trials():
        alone(model, *data(0, SKIP_STEPS + 2 * tried_for + 1), callbacks=[*callbacks, watch])
    assert_alike(weights_of(model))
    assert gather(plans) == [plans] * N
    planned = next(i for i, plan in enumerate(plans, 1) if plan.tried)
    trials = len(plans[-1].tried)
    assert planned == SKIP_STEPS + trials * tried_for
    assert 1 <= trials <= 2
    changes = [i for i, (one, other) in enumerate(pairwise(plans), 2) if one != other]
    assert changes == [planned - n * tried_for for n in reversed(range(trials))]


@two
def test_the_broadcast_callback_makes_ranks_start_alike() -> None:
    model = small_model()
    for each in model.trainable_variables:
        each.assign_add(each * 0 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(
        sgd(0.05 * (1 + hvd.rank()), momentum=0.9), strategy="pipe-sgd"
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    history = alone(model, *data(), epochs=2, callbacks=callbacks)
    assert_alike(weights_of(model))
    assert_alike(history.history["mae"])


@two
def test_the_warm_up_callback_raises_the_learning_rate() -> None:
    model, rates = small_model(), []
    model.compile(hvd.DistributedOptimizer(sgd(0.1, momentum=0.9)), "mse")
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda number, logs: rates.append(
            float(model.optimizer.learning_rate)
        )
    )
    callbacks = [hvd.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=2), watch]
    alone(model, *data(0, 4), epochs=3, callbacks=callbacks)
    epochs = np.arange(8) / 4 + 1 / 4
    np.testing.assert_allclose(rates[:8], 0.8 / N * (epochs * (N - 1) / 2 + 1))
    np.testing.assert_allclose(rates[8:], 0.8)


# Ranks that differ, and training that stops half-way.


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
    begun.train(0, 5)
    if hvd.rank() == 0:
        trainer.saver.read(begun.saver.write(str(tmp_path / "own")))
    trainer.model.compile(trainer.optimizer, "mse")
    fit(trainer.model, *data(0, 12))
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


def apply(make: Callable[[list[Any]], Any], *names: str) -> None:
    """A step of an optimizer that is made for variables of these names."""
    weights = [keras.Variable(np.zeros(3), name=name) for name in names]
    make(weights).apply([tf.zeros(3, tf.float64) for _ in weights], weights)


def grouped(weights: list[Any]) -> Any:
    """Lists of the same sizes, of other variables."""
    first, *rest = reversed(weights) if is_last() else weights
    return hvd.DistributedOptimizer(sgd(), groups=[[first], list(rest)])


def with_local(weights: list[Any]) -> Any:
    optimizer = hvd.DistributedOptimizer(sgd())
    if is_last():
        optimizer.register_local_var(weights[0])
    return optimizer


def with_momenta(weights: list[Any]) -> Any:
    plain = sgd(momentum=0.0 if is_last() else 0.9)
    return hvd.DistributedOptimizer(plain, strategy="cocod:momentum=average")


def of_epochs() -> None:
    """The rank with more batches would wait for ever."""
    model = small_model()
    model.compile(hvd.DistributedOptimizer(sgd()), "mse")
    fit(model, *data(0, 3 if is_last() else 4))


def of_shapes() -> None:
    """AutoGraph puts an error of a traced step into one of its own."""
    make = small_model if is_last() else make_model
    Trainer(make, strategy="cocod:period=4,fragments=2").train(0, 1)


UNLIKE: dict[str, tuple[Callable[[], object], str]] = {
    "momenta": (lambda: apply(with_momenta, "weight"), r"weight\.momentums"),
    "groups": (lambda: apply(grouped, "a", "b", "c"), r"groups.*\[\[0\], \[1, 2\]\]"),
    "local": (lambda: apply(with_local, "weight", "other"), "rank 0 has 2.*rank 1 has 1"),
    "epochs": (of_epochs, "the batches of an epoch.*rank 0 has 4.*rank 1 has 3"),
    "shapes": (of_shapes, "ranks disagree on .*variables that are not local"),
}


@two
@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_that_differ_are_told(name: str) -> None:
    call, words = UNLIKE[name]
    with pytest.raises(Exception, match=f"(?s){words}") as raised:
        call()
    keras.utils.clear_session()  # ranks have made other models, which names count
    assert "RanksDisagreeError" in f"{raised.type.__name__}: {raised.value}"


@two
def test_what_one_rank_does_wrong_is_told_to_all() -> None:
    kind, words = RanksDisagreeError, "rank 1 was given something wrong"
    if is_last():
        kind, words = ValueError, "groups"  # type: ignore[assignment]
    with pytest.raises(kind, match=words) as raised:
        hvd.DistributedOptimizer(sgd(), groups=0 if is_last() else 1)
    assert type(raised.value) is kind


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
@pytest.mark.parametrize(
    ("is_all_local", "is_graph"),
    [(False, True), (True, False), (True, True)],
    ids=["shared, too", "all local", "all local, graph"],
)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "pipe-sgd:prediction=local"])
def test_ranks_may_have_tables_of_unlike_shapes(
    strategy: str, is_all_local: bool, is_graph: bool
) -> None:
    """A model-parallel table was refused, as ranks had other shapes of it, and other numbers.

    Where nothing was sent, ``tf.stack([])`` raised, and a plan of no buckets. So did CoCoD in a
    graph: a ``tf.py_function`` without results returns an operation instead of a list.
    """
    rank = hvd.rank()  # has so many tables and one more, of so many rows and two more
    tables = [keras.Variable(np.zeros((rank + 2, 3)), name="table") for _ in range(rank + 1)]
    shared = [] if is_all_local else [keras.Variable(np.zeros(2), name="table")]
    plain = sgd(1.0, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(plain, strategy=strategy, scale_local_gradients=False)
    for each in tables:
        optimizer.register_local_var(each)
    variables = [*tables, *shared]

    def step(factor: Any) -> None:
        gradients = [tf.ones_like(each.value) * factor * (rank + 1.0) for each in variables]
        optimizer.apply(gradients, variables)

    taken = tf.function(step, autograph=False) if is_graph else step
    for number in range(3):
        taken(tf.constant(number + 1.0, tf.float64))
    optimizer.synchronize()
    for each, factor in [
        *((each, rank + 1.0) for each in tables),
        *((each, 1.5) for each in shared),
    ]:
        wanted = descent([factor * number for number in (1, 2, 3)])
        np.testing.assert_allclose(each, wanted, rtol=0, atol=1e-12)


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
