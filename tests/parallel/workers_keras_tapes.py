"""What ranks do with tapes that are used in unusual ways; each function is a case."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras_problem import make_model
from workers_keras_features import Found

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.tensorflow.sessions import share

STRATEGIES = ["merged-gradient", "pipe-sgd"]
MODES = ["eager", "function"]
STEPS = 4


def taken(step: Any, mode: str) -> Any:
    return tf.function(step) if mode == "function" else step


def tensors(strategy: str, mode: str) -> Found:
    """A model of plain tensors; and a variable and a tensor together."""
    rank, seen = hvd.rank(), []
    variable = tf.Variable([1.0, 1.0], name="variable")

    def step(weight: Any, factor: Any) -> Any:
        with tf.GradientTape() as recorded:
            recorded.watch(weight)
            loss = factor * tf.reduce_sum(weight * variable)
        tape = hvd_tf.DistributedGradientTape(recorded, strategy=strategy)
        return tape.gradient(loss, {"weight": weight, "variable": variable})

    run = taken(step, mode)
    for number in range(STEPS):
        found = run(tf.constant([2.0, 3.0]), tf.constant((number + 1.0) * (rank + 1)))
        seen.append([found["weight"].numpy(), found["variable"].numpy()])
    last = hvd_tf.drain_gradients({"weight": tf.constant([0.0, 0.0]), "variable": variable})
    if last is not None:
        seen.append([last["weight"].numpy(), last["variable"].numpy()])
    return {"seen": np.array(seen)}


def two_losses(strategy: str, mode: str, way: str) -> Found:
    """Two gradients of the same variables in one step, each applied by itself."""
    w = tf.Variable(tf.ones(3), name="w")
    seen: list[list[Any]] = []

    def step(factor: Any) -> Any:
        if way == "persistent":
            with tf.GradientTape(persistent=True) as recorded:
                one, other = factor * tf.reduce_sum(w), 100.0 * factor * tf.reduce_sum(w)
            tape = again = hvd_tf.DistributedGradientTape(recorded, strategy=strategy)
        else:
            with tf.GradientTape() as recorded, tf.GradientTape() as second:
                one, other = factor * tf.reduce_sum(w), 100.0 * factor * tf.reduce_sum(w)
            tape = hvd_tf.DistributedGradientTape(recorded, strategy=strategy)
            again = hvd_tf.DistributedGradientTape(second, strategy=strategy)
        return tape.gradient(one, [w])[0], again.gradient(other, [w])[0]

    run = taken(step, mode)
    for number in range(STEPS):
        found = run(tf.constant((number + 1.0) * (hvd.rank() + 1)))
        seen.append([each.numpy()[0] for each in found])
    last = hvd_tf.drain_gradients([w])
    return {"seen": np.array(seen), "drained": 0.0 if last is None else last[0].numpy()[0]}


def a_tape_that_is_used_for_all_steps() -> Found:
    """Persistent, wrapped once, and recorded anew in each step."""
    w = tf.Variable(1.0, name="w")
    seen = []
    recorded = tf.GradientTape(persistent=True)
    tape = hvd_tf.DistributedGradientTape(recorded, strategy="pipe-sgd")
    for number in range(STEPS):
        with tape:
            tape.reset()
            loss = (number + 1.0) * (hvd.rank() + 1) * w
        seen.append(float(tape.gradient(loss, [w])[0]))
    last = hvd_tf.drain_gradients([w])
    return {"seen": seen, "drained": float(last[0])}


def applied_twice() -> Found:
    """Two gradients of the same variables in one graph, applied by one optimizer."""
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
        step(tf.constant((number + 1.0) * (hvd.rank() + 1)))
    return {"weight": np.array(weight), "rows": np.array(rows)}


def models_that_are_gone(mode: str) -> Found:
    """Models that come and go in one process, as in a search of hyperparameters."""
    gone = []
    for number in range(3):
        model = make_model()
        variables = model.trainable_variables
        groups = [variables[:2], variables[2:]] if number == 2 else None

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
    return {"kept": left_of(gone)}


def left_of(dropped: Sequence[weakref.ref[Any]]) -> int:
    """Collect until all is gone, for some seconds at most; return how many are left.

    A thread may just have sent what the last step left.
    """
    deadline = time.monotonic() + 10.0
    while any(each() is not None for each in dropped) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return sum(each() is not None for each in dropped)


def shared_after_one_rank_has_dropped_a_model() -> Found:
    """Hosts change in an elastic job, where rank 1 has collected a model that rank 0 has not."""
    kept, dropped = tf.Variable(tf.ones(2), name="kept"), tf.Variable(tf.ones(3), name="dropped")
    for each in (dropped, kept):
        with tf.GradientTape() as recorded:
            loss = (hvd.rank() + 1.0) * tf.reduce_sum(each)
        hvd_tf.DistributedGradientTape(recorded, strategy="pipe-sgd").gradient(loss, [each])
    left = {"kept": kept}
    if hvd.rank() == 0:
        left["dropped"] = dropped
    reference = weakref.ref(dropped)
    del dropped, recorded, loss, each
    assert left_of([reference] if hvd.rank() else []) == 0
    share()
    found = {}
    for name, each in left.items():
        ((_, session),) = vars(each)["_hvd_pipe_sessions"].values()
        found[name] = session.engine.state()["gradient.0"]
    hvd_tf.drain_gradients([kept])
    return found


CASES: dict[str, tuple[Any, ...]] = {
    **{f"tensors {s} {m}": (tensors, s, m) for s in STRATEGIES for m in MODES},
    **{
        f"two losses {s} {m} {way}": (two_losses, s, m, way)
        for s in STRATEGIES
        for m in MODES
        for way in ("persistent", "two tapes")
    },
    "gone on one rank": (shared_after_one_rank_has_dropped_a_model,),
    "one tape": (a_tape_that_is_used_for_all_steps,),
    "applied twice": (applied_twice,),
    **{f"gone {m}": (models_that_are_gone, m) for m in MODES},
}
