"""HVD_PIPE_CHECK for Keras and tapes: delays change no bit, and planted faults show.

``test_check_mode`` sets the variable itself, which no adapter reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_problem import Weights, make_model, weights_of
from keras_training import Trainer, assert_alike, checks, small_model
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.runtime import check_mode
from hvd_pipe.tensorflow.checking import Replicas
from hvd_pipe.tensorflow.strategies.cocod import ModelAverage

two = on_ranks(2, init=hvd.init)

STEPS = 6
FAULTY = 3  # the batch after which a fault is planted

Then = Callable[[Any, int], object]


class Run(Trainer):
    """A loop that returns the weights after every step, and at the end; "tape" distributes one."""

    def __init__(self, strategy: str, make: Callable[[], Any] = small_model) -> None:
        self._is_tape = strategy.startswith("tape ")
        super().__init__(make, tape=self._is_tape, strategy=strategy.removeprefix("tape "))

    def __call__(self, steps: int, then: Then = lambda *_: None) -> Weights:
        records = []
        for number in range(steps):
            self.train(number, number + 1)
            records.append(weights_of(self.model))
            then(self.model, number)
        if self._is_tape:
            last = hvd_tf.drain_gradients(self.model.trainable_variables)
            if last is not None:
                self.optimizer.apply(last, self.model.trainable_variables)
        return np.array([*records, self.finish()])


@two
@pytest.mark.parametrize(
    "strategy",
    [
        "merged-gradient:bucket_bytes=64",
        "pipe-sgd",
        "cocod:period=2,fragments=2",
        "tape pipe-sgd:bucket_bytes=64",
    ],
)
def test_delays_change_no_bit(strategy: str) -> None:
    """One model for all seeds, as tracing its step costs seconds: put back before each run."""
    with checks(None):
        plain = Run(strategy, make_model)(STEPS)
    assert np.isfinite(plain).all()
    assert not np.array_equal(plain[0], plain[-1])  # it did learn something
    with checks(0):
        checked = Run(strategy, make_model)
        start = [np.array(each) for each in checked.variables]
        for seed in range(6):
            check_mode.active = check_mode.Check(seed, hvd.rank())
            for each, value in zip(checked.variables, start, strict=True):
                each.assign(value)
            assert np.array_equal(checked(STEPS), plain), f"seed {seed}"


@two
def test_ranks_compare_in_the_same_steps_after_a_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has joined takes part in no comparison; then all count from there.

    Rank 0 makes five steps more before ``hvd.join()``, and all go on from its weights.
    """
    plain, compared = Replicas._check, []

    def check(self: Replicas, everyone: Any, steps: Any) -> Any:
        compared.append(steps)
        return plain(self, everyone, steps)

    monkeypatch.setattr(Replicas, "_check", check)
    with checks(0):
        run = Run("tape merged-gradient")
        run(7 if hvd.rank() else check_mode.COMPARE_STEPS + 2)
        last = int(hvd_tf.join())
        hvd_tf.broadcast_variables(run.variables, root_rank=last)
        run(2 * check_mode.COMPARE_STEPS + 4)
    assert gather(len(compared)) == [2, 2]
    assert_alike(weights_of(run.model))


def nudge(model: Any, number: int) -> None:
    """Change one weight of rank 1 in its last bits."""
    if (hvd.rank(), number) == (1, FAULTY):
        bias = model.trainable_variables[-1]
        bias.assign(np.add(bias.numpy(), [0.0, 1e-14, 0.0]))


def assert_told(run: Run, what: str, then: Then = lambda *_: None) -> None:
    """Training ends as weights differ."""
    words = f"disagree on the weight of .*{what}.*: rank 0 has checksum .*; rank 1 has checksum "
    with pytest.raises((hvd.HvdPipeError, tf.errors.OpError), match=f"(?s)ranks {words}"):
        run(2 * check_mode.COMPARE_STEPS, then)


@two
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd", "tape merged-gradient"])
def test_replicas_that_differ(strategy: str) -> None:
    """One rank's weight was changed by hand, in its last bits: training went on with it."""
    with checks(0):
        assert_told(Run(strategy), "bias", nudge)


@two
def test_averages_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """CoCoD's last average is not the same on rank 1."""
    plain = ModelAverage.average_now

    def average_now(self: ModelAverage, flats: Any) -> Any:
        return [flat * (1 + 1e-14 * hvd.rank()) for flat in plain(self, flats)]

    monkeypatch.setattr(ModelAverage, "average_now", average_now)
    with checks(0):
        assert_told(Run("cocod:period=2"), "")
