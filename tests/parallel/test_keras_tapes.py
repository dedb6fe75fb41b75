"""Tapes with sources that are tensors, with several gradients a step, and of models that go."""

from __future__ import annotations

import weakref
from typing import Any

import keras
import keras_problem
import keras_reference
import numpy as np
import pytest
import tensorflow as tf
from keras_problem import OPTIMIZERS, batch, loss_of, make_model, weights_of
from keras_training import assert_alike, left_of, small_model
from on_ranks import on_ranks

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.tensorflow.sessions import share

N = 2
two = on_ranks(N, init=hvd.init)
modes = pytest.mark.parametrize("mode", ["eager", "function"])
strategies = pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd"])

STEPS = 4
MEAN = (N + 1) / 2  # of rank + 1 over the ranks
DUE = {
    "merged-gradient": MEAN * np.arange(1, STEPS + 1),
    "pipe-sgd": MEAN * np.arange(STEPS),
}
"""What each step's gradient is where the loss is (step + 1) (rank + 1) times a weight."""


def taken(step: Any, mode: str) -> Any:
    return tf.function(step) if mode == "function" else step


def factor_of(step: int) -> Any:
    return tf.constant((step + 1.0) * (hvd.rank() + 1))


@two
@pytest.mark.parametrize(
    ("strategy", "mode"),
    [("merged-gradient", "function"), ("pipe-sgd", "function"), ("pipe-sgd", "eager")],
)
def test_a_tape_trains_as_the_optimizer_does(strategy: str, mode: str) -> None:
    # Without weight decay: a tape returns zeros in Pipe-SGD's first step, and decay goes on.
    model, optimizer = make_model(), OPTIMIZERS["clipped"]()
    variables = model.trainable_variables
    optimizer.build(variables)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = hvd_tf.DistributedGradientTape(tape, strategy=strategy)
        optimizer.apply(tape.gradient(loss, variables), variables)

    run = taken(step, mode)
    for number in range(keras_problem.STEPS):
        run(*map(tf.constant, batch(hvd.rank(), number)))
    last = hvd_tf.drain_gradients(variables)
    assert (last is not None) == (strategy == "pipe-sgd")
    if last is not None:
        optimizer.apply(last, variables)
    wanted = keras_reference.trajectory(N, strategy, "clipped")[hvd.rank()][-1]
    np.testing.assert_allclose(weights_of(model), wanted, rtol=0, atol=1e-10)
    assert_alike(weights_of(model))


@two
def test_tapes_of_all_kinds() -> None:
    """Persistent, of one variable, of a structure, with sparse, missing and local gradients."""
    factor = hvd.rank() + 1.0
    w, v, unused = (tf.Variable([2.0, 3.0], name=name) for name in ("w", "v", "unused"))
    rows = tf.Variable(tf.ones((4, 2)), name="rows")
    with tf.GradientTape(persistent=True) as recorded:
        loss = factor * tf.reduce_sum(w * w)
        other = factor * tf.reduce_sum(v)
        looked = factor * tf.reduce_sum(tf.gather(rows, [hvd.rank()]))
    tape = hvd_tf.DistributedGradientTape(recorded)
    np.testing.assert_allclose(tape.gradient(loss, w), [MEAN * 4, MEAN * 6])
    named = tape.gradient(loss, {"w": w, "unused": unused})
    np.testing.assert_allclose(named["w"], [MEAN * 4, MEAN * 6])
    assert named["unused"] is None
    np.testing.assert_allclose(tape.gradient(other, [v])[0], [MEAN, MEAN])
    sparse = tf.convert_to_tensor(tape.gradient(looked, [rows])[0])
    np.testing.assert_allclose(sparse[:, 0], [1 / N, 2 / N, 0, 0])
    with tf.GradientTape() as recorded:
        loss = factor * (tf.reduce_sum(w) + tf.reduce_sum(v))
    tape = hvd_tf.DistributedGradientTape(recorded)
    tape.register_local_source(w)
    local, others = tape.get_local_and_global_gradients(loss, [w, v])
    np.testing.assert_allclose(local[0][1], factor / N)
    np.testing.assert_allclose(others[0][1], MEAN)


@two
@modes
@strategies
def test_sources_may_be_tensors(strategy: str, mode: str) -> None:
    """A tensor that is watched has no name when executed eagerly: AttributeError.

    A model of plain tensors; and a variable and a tensor together.
    """
    variable = tf.Variable([1.0, 1.0], name="variable")

    def step(weight: Any, factor: Any) -> Any:
        with tf.GradientTape() as recorded:
            recorded.watch(weight)
            loss = factor * tf.reduce_sum(weight * variable)
        tape = hvd_tf.DistributedGradientTape(recorded, strategy=strategy)
        return tape.gradient(loss, {"weight": weight, "variable": variable})

    run = taken(step, mode)
    for _ in range(2):  # what was drained is not returned once more by the first step after it
        gradients = [run(tf.constant([2.0, 3.0]), factor_of(number)) for number in range(STEPS)]
        due = list(DUE[strategy])
        last = hvd_tf.drain_gradients({"weight": tf.constant([0.0, 0.0]), "variable": variable})
        if strategy == "pipe-sgd":
            gradients, due = [*gradients, last], [*due, MEAN * STEPS]
        for gradient, mean in zip(gradients, due, strict=True):
            np.testing.assert_allclose(gradient["weight"], [mean, mean], rtol=1e-6)
            np.testing.assert_allclose(gradient["variable"], [2 * mean, 3 * mean], rtol=1e-6)


@two
@modes
@strategies
@pytest.mark.parametrize("persistent", [True, False], ids=["persistent", "two tapes"])
def test_several_gradients_of_a_step_lose_nothing(
    persistent: bool, strategy: str, mode: str
) -> None:
    """Of the same variables, one a hundred times the other.

    Under pipe-sgd, a persistent tape returned the gradient of one loss for the other's. Each of
    two tapes is a step of Pipe-SGD; in one graph, their messages had the same names at once.
    """
    w = tf.Variable(tf.ones(3), name="w")

    def step(factor: Any) -> Any:
        with tf.GradientTape(persistent=persistent) as recorded, tf.GradientTape() as second:
            one, other = factor * tf.reduce_sum(w), 100.0 * factor * tf.reduce_sum(w)
        tape = again = hvd_tf.DistributedGradientTape(recorded, strategy=strategy)
        if not persistent:
            again = hvd_tf.DistributedGradientTape(second, strategy=strategy)
        return tape.gradient(one, [w])[0], again.gradient(other, [w])[0]

    run = taken(step, mode)
    pairs = [[each.numpy()[0] for each in run(factor_of(number))] for number in range(STEPS)]
    last = hvd_tf.drain_gradients([w])
    drained = 0.0 if last is None else float(last[0][0])
    due = DUE[strategy]
    if persistent or strategy == "merged-gradient":
        np.testing.assert_allclose(pairs, np.stack([due, 100 * due], 1), rtol=1e-6)
    total = np.sum(pairs) + drained
    np.testing.assert_allclose(total, 101 * MEAN * sum(range(1, STEPS + 1)), rtol=1e-6)


@two
def test_hosts_may_change_when_one_rank_has_dropped_a_model() -> None:
    """Each rank's collector takes a dropped model at its own time.

    The rank that still had it averaged what that had in flight, alone, and waited for ever. Hosts
    change in an elastic job; here rank 1 has collected a model that rank 0 has not.
    """
    kept, dropped = tf.Variable(tf.ones(2), name="kept"), tf.Variable(tf.ones(3), name="dropped")
    for each in (dropped, kept):
        with tf.GradientTape() as recorded:
            loss = (hvd.rank() + 1.0) * tf.reduce_sum(each)
        hvd_tf.DistributedGradientTape(recorded, strategy="pipe-sgd").gradient(loss, [each])
    in_flight = {"kept": (kept, MEAN)}
    if hvd.rank() == 0:
        in_flight["dropped"] = dropped, 1.0
    reference = weakref.ref(dropped)
    del dropped, recorded, loss, each
    assert left_of([reference] if hvd.rank() else []) == 0
    share()
    for each, gradient in in_flight.values():
        ((_, session),) = vars(each)["_hvd_pipe_sessions"].values()
        np.testing.assert_allclose(session.engine.state()["gradient.0"], gradient)
    hvd_tf.drain_gradients([kept])


@two
def test_a_tape_may_be_recorded_anew_in_each_step() -> None:
    """Persistent, and wrapped once."""
    w = tf.Variable(1.0, name="w")
    gradients = []
    recorded = tf.GradientTape(persistent=True)
    tape = hvd_tf.DistributedGradientTape(recorded, strategy="pipe-sgd")
    for number in range(STEPS):
        with tape:
            tape.reset()
            loss = factor_of(number) * w
        gradients.append(float(tape.gradient(loss, [w])[0]))
    np.testing.assert_allclose(gradients, DUE["pipe-sgd"])
    np.testing.assert_allclose(hvd_tf.drain_gradients([w])[0], MEAN * STEPS)


@two
def test_an_optimizer_may_be_applied_twice_in_a_graph() -> None:
    """To two gradients of the same variables."""
    weight = keras.Variable(np.zeros(3), dtype="float32", name="weight")
    rows = keras.Variable(np.zeros((4, 2)), dtype="float32", name="rows")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))

    @tf.function
    def step(factor: Any) -> None:
        with tf.GradientTape(persistent=True) as tape:
            one = factor * tf.reduce_sum(weight.value)
            one += factor * tf.reduce_sum(tf.gather(rows.value, [hvd.rank()]))
            other = 100.0 * one
        both = [tape.gradient(each, [weight.value, rows.value]) for each in (one, other)]
        for gradients in both:
            optimizer.apply(gradients, [weight, rows])

    for number in range(STEPS):
        step(factor_of(number))
    total = 101 * sum(range(1, STEPS + 1))
    np.testing.assert_allclose(weight, np.full(3, -MEAN * total), rtol=1e-6)
    wanted = [-(rank + 1) / N * total for rank in range(N)]
    np.testing.assert_allclose(np.array(rows)[:N, 0], wanted, rtol=1e-6)


@two
@modes
def test_models_that_were_taped_are_let_go(mode: str) -> None:
    """What a tape had in flight was kept by the process for ever, and with it every model.

    Models come and go in one process in a search of hyperparameters.
    """
    gone = []
    for number in range(3):
        model = small_model()
        variables = model.trainable_variables
        groups = [variables[:1], variables[1:]] if number == 2 else None

        def step(model: Any = model, variables: Any = variables, groups: Any = groups) -> Any:
            with tf.GradientTape() as recorded:
                loss = tf.reduce_sum(model(tf.ones((2, 6), tf.float64)))
            tape = hvd_tf.DistributedGradientTape(recorded, strategy="pipe-sgd", groups=groups)
            return tape.gradient(loss, variables)

        run = taken(step, mode)
        for _ in range(2):
            run()
        gone.append(weakref.ref(variables[-1]))
        del model, variables, step, run, groups
    keras.backend.clear_session()
    assert left_of(gone) == 0
