"""Keras: messages leave as early as they can, and are waited for as late as the strategy says."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from in_turn import LONG_S, one_after_the_other
from on_ranks import on_ranks

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.tensorflow.messages.reduction import Reduction

two = on_ranks(2, init=hvd.init)

TOGETHER, STEPS = 3, 9


@two
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_round_of_cocod_waits_for_what_was_sent_before_it(mode: str) -> None:
    """Rank 1 begins the steps that rank 0 has ended; the first rounds make what they need."""

    def trained(ahead: bool) -> Any:
        weight = keras.Variable(np.zeros(3), dtype="float64", name="weight")
        plain = keras.optimizers.SGD(0.125)
        optimizer = hvd.DistributedOptimizer(plain, strategy="cocod:period=2")
        optimizer.build([weight])

        def step(gradient: tf.Tensor) -> None:
            optimizer.apply([gradient], [weight])

        step = tf.function(step) if mode == "function" else step
        for number in range(STEPS):
            gradient = tf.ones(3, tf.float64) * float(number * (1 + hvd.rank()))
            if ahead and number >= TOGETHER:
                one_after_the_other(partial(step, gradient))
            else:
                step(gradient)
        optimizer.synchronize()
        return weight.numpy()

    np.testing.assert_array_equal(trained(True), trained(False))


class Arrival:
    """Lets a graph wait, in each step, until a message of this step has arrived.

    Args:
        monkeypatch: Undoes this at the end of the test.
        ending: Of the message's name.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
        # Waiting for a queue takes none of the threads that run operations.
        self._arrivals = tf.queue.FIFOQueue(1, [tf.bool], [()])
        reduce = Reduction.reduce

        def noted(reduction: Reduction, flat: Any, name: str, feedback: Any = None) -> Any:
            reduced = reduce(reduction, flat, name, feedback)
            if not name.endswith(ending):
                return reduced
            with tf.control_dependencies([reduced]):
                there = tf.numpy_function(self._announce, [], tf.int32, stateful=True)
            with tf.control_dependencies([there]):
                return tf.identity(reduced)

        monkeypatch.setattr(Reduction, "reduce", noted)

    def _announce(self) -> Any:
        self._arrivals.enqueue(True)
        return np.int32(0)

    def before(self, value: Any) -> Any:
        """Return a value when the message has arrived."""
        with tf.control_dependencies([self._arrivals.dequeue()]):
            return tf.identity(value)

    def run(self, step: Any, *arguments: Any) -> None:
        """Make a step, which fails where it waits for ever."""
        give_up = threading.Timer(LONG_S, self._arrivals.close, [True])
        give_up.start()
        step(*arguments)
        give_up.cancel()


@two
def test_a_message_leaves_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the last layer arrives before that of the first one is there."""
    arrival = Arrival(monkeypatch, ".gradients.0")
    first, last = weights = [keras.Variable(np.full(2, v), name=f"w{v}") for v in (2.0, 3.0)]
    plain = keras.optimizers.SGD(0.125)
    optimizer = hvd.DistributedOptimizer(plain, strategy="merged-gradient:plan=wfbp")
    optimizer.build(weights)

    @tf.function(jit_compile=False)
    def step(x: tf.Tensor) -> None:
        optimizer.apply([arrival.before(x * last), x * first], weights)

    wanted = [each.numpy() for each in weights]
    for number in range(1, 4):
        arrival.run(step, tf.constant(float(number * (1 + hvd.rank())), first.dtype))
        mean = 1.5 * number
        wanted = [w - 0.125 * mean * v for w, v in zip(wanted, wanted[::-1], strict=True)]
        np.testing.assert_allclose([each.numpy() for each in weights], wanted, rtol=1e-6)


@two
def test_a_message_of_pipe_sgd_travels_behind_the_forward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The average of the step before arrives before this step has a gradient."""
    arrival = Arrival(monkeypatch, ".gradients.0")
    weight = keras.Variable(np.zeros(2), name="weight")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), strategy="pipe-sgd")
    optimizer.build([weight])

    @tf.function(jit_compile=False)
    def step(gradient: tf.Tensor) -> None:
        optimizer.apply([arrival.before(gradient)], [weight])

    total = 0.0
    for number in range(1, 4):
        arrival.run(step, tf.ones(2, weight.dtype) * float(number * (1 + hvd.rank())))
        np.testing.assert_array_equal(weight.numpy(), -total)
        total += 1.5 * number
