"""Keras' and Horovod's features under every strategy, on ranks that differ on purpose."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import keras_reference
import numpy as np
import pytest
import tensorflow as tf
from codec_reference import emulated
from keras_problem import BATCH, OPTIMIZERS, STEPS, make_model, weights_of
from keras_training import Trainer, assert_alike, data, short_trials, small_model
from on_ranks import gather, on_ranks

import hvd_pipe
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.errors import RanksDisagreeError
from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime.bucket_planner import SKIP_STEPS
from hvd_pipe.tensorflow.messages.reduction import Reduction

N = 2
two = on_ranks(N, init=hvd.init)

MAX_FUNCTIONS, MAX_FILES = 15, 7
OURS = f"{Path(hvd_pipe.__file__).parent}/"
MEAN = 1.5  # of rank + 1 over the ranks
CODED, CODED_ROUNDS = 1000, 4  # elements, no whole slices; rounds
SAVED = 13  # steps before a checkpoint
EXACT = ("merged-gradient", "pipe-sgd", "cocod:period=3")
MOMENTA = "cocod:period=3,momentum=average"


def sgd(rate: float, **options: Any) -> Any:
    return keras.optimizers.SGD(rate, **options)


def fit(model: Any, steps: int = STEPS, **options: Any) -> Any:
    """Train on this rank's data, without a broadcast."""
    x, y = data(0, steps)
    return model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, **options)


def fitted(optimizer: Any, make: Callable[[], Any] = make_model, **options: Any) -> Any:
    model = make()
    model.compile(optimizer, "mse", **options)
    fit(model)
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
        fit(model, SKIP_STEPS + 2 * tried_for + 1, callbacks=[*callbacks, watch])
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
    history = fit(model, epochs=2, callbacks=callbacks)
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
    fit(model, 4, epochs=3, callbacks=callbacks)
    epochs = np.arange(8) / 4 + 1 / 4
    np.testing.assert_allclose(rates[:8], 0.8 / N * (epochs * (N - 1) / 2 + 1))
    np.testing.assert_allclose(rates[8:], 0.8)


@two
@pytest.mark.parametrize(
    "strategy",
    [
        "merged-gradient",
        "pipe-sgd",
        "pipe-sgd:prediction=local",
        MOMENTA,
        "cocod:period=4,fragments=2",
    ],
)
def test_a_checkpoint_goes_on_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    """Of each rank's own, also where it was read and written again. A plain optimizer reads it."""
    compression = hvd.Int8(chunk=16, error_feedback=True)
    whole, between, resumed = (
        Trainer(small_model, strategy=strategy, compression=compression) for _ in range(3)
    )
    whole.train(0, SAVED)
    path = whole.saver.write(str(tmp_path / "own"))
    between.saver.read(path)
    resumed.saver.read(between.saver.write(str(tmp_path / "again")))
    for trainer in (whole, resumed):
        trainer.train(SAVED, STEPS)
    np.testing.assert_array_equal(resumed.finish(), whole.finish())
    plain_model, plain = small_model(), sgd(0.05, momentum=0.9)
    plain.build(plain_model.trainable_variables)
    tf.train.Checkpoint(model=plain_model, optimizer=plain).read(path)
    # Pipe-SGD's last gradient was in flight.
    assert int(plain.iterations) == SAVED - strategy.startswith("pipe-sgd")


@two
def test_ranks_with_unlike_momenta_are_told() -> None:
    weight = keras.Variable(np.zeros(3), name="weight")
    plain = sgd(0.1, momentum=0.9 if hvd.rank() == 0 else 0.0)
    optimizer = hvd.DistributedOptimizer(plain, strategy=MOMENTA)
    with pytest.raises(RanksDisagreeError, match=r"(?s)weight\.momentums"):
        optimizer.apply([tf.zeros(3, tf.float64)], [weight])


@two
def test_what_one_rank_does_wrong_is_told_to_all() -> None:
    last = hvd.rank() == N - 1
    kind, words = (ValueError, "groups") if last else (
        RanksDisagreeError, "rank 1 was given something wrong"
    )  # fmt: skip
    with pytest.raises(kind, match=words) as raised:
        hvd.DistributedOptimizer(sgd(0.1), groups=0 if last else 1)
    assert type(raised.value) is kind
