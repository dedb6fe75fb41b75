"""HVD_PIPE_CHECK for Keras and tapes: delays change no bit, and planted faults show.

``test_check_mode`` sets the variable itself, which no adapter reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_problem import BATCH, OPTIMIZERS, Weights, batch, loss_of, make_model, weights_of
from keras_training import assert_alike, checks, data, small_model
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.runtime import check_mode
from hvd_pipe.tensorflow.checking import Replicas
from hvd_pipe.tensorflow.strategies.model_average import ModelAverage

two = on_ranks(2, init=hvd.init)

STEPS = 6
FAULTY = 3  # the batch after which a fault is planted

Then = Callable[[Any, int], None]


def nothing(model: Any, number: int) -> None:
    """Is what happens after a batch where nothing else does."""


class Fit:
    """Training by ``fit``; returns the weights after every batch, and after the end."""

    def __init__(self, strategy: str, make: Callable[[], Any] = small_model) -> None:
        self.model = make()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), strategy=strategy)
        optimizer.build(self.model.trainable_variables)
        self.model.compile(optimizer, "mse")
        self.variables = [*self.model.variables, *optimizer.variables]

    def __call__(self, steps: int, then: Then = nothing) -> Weights:
        records = []

        def after(number: int, logs: object) -> None:
            records.append(weights_of(self.model))
            then(self.model, number)

        x, y = data(0, steps)
        options: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=after)
        self.model.fit(x, y, callbacks=[callback], **options)
        return np.array([*records, weights_of(self.model)])


class Tape:
    """The same in a loop with a tape."""

    def __init__(self, strategy: str, make: Callable[[], Any] = small_model) -> None:
        self.model, self._optimizer = make(), OPTIMIZERS["sgd"]()
        self._optimizer.build(self.model.trainable_variables)
        self.variables = [*self.model.variables, *self._optimizer.variables]

        @tf.function  # type: ignore[untyped-decorator]
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as plain:
                loss = loss_of(self.model, x, y)
            mine = hvd_tf.DistributedGradientTape(plain, strategy=strategy)
            self._apply(mine.gradient(loss, self.model.trainable_variables))

        self._step = step

    def _apply(self, gradients: Any) -> None:
        pairs = zip(gradients, self.model.trainable_variables, strict=True)
        self._optimizer.apply_gradients(pairs)

    def __call__(self, steps: int, then: Then = nothing) -> Weights:
        records = []
        for number in range(steps):
            self._step(*map(tf.constant, batch(hvd.rank(), number)))
            records.append(weights_of(self.model))
            then(self.model, number)
        last = hvd_tf.drain_gradients(self.model.trainable_variables)
        if last is not None:
            self._apply(last)
        return np.array([*records, weights_of(self.model)])


@two
@pytest.mark.parametrize(
    ("run", "strategy"),
    [
        (Fit, "merged-gradient:bucket_bytes=64"),
        (Fit, "pipe-sgd"),
        # nightly: its fragments take turns in the next one
        pytest.param(Fit, "cocod:period=2", marks=pytest.mark.nightly),
        (Fit, "cocod:period=2,fragments=2"),
        (Tape, "pipe-sgd:bucket_bytes=64"),
    ],
)
@pytest.mark.parametrize(
    "seeds",
    # nightly: more of the same
    [range(6), pytest.param(range(6, 20), marks=pytest.mark.nightly)],
    ids=["few seeds", "more seeds"],
)
def test_delays_change_no_bit(run: type[Fit | Tape], strategy: str, seeds: range) -> None:
    """One model for all seeds, as tracing its step costs seconds: put back before each run."""
    with checks(None):
        plain = run(strategy, make_model)(STEPS)
    assert np.isfinite(plain).all()
    assert not np.array_equal(plain[0], plain[-1])  # it did learn something
    with checks(0):
        checked = run(strategy, make_model)
        start = [np.array(each) for each in checked.variables]
        for seed in seeds:
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
        run = Tape("merged-gradient")
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


def assert_told(run: Fit | Tape, what: str, then: Then = nothing) -> None:
    """Training ends as weights differ."""
    words = f"disagree on the weight of .*{what}.*: rank 0 has checksum .*; rank 1 has checksum "
    with pytest.raises((hvd.HvdPipeError, tf.errors.OpError), match=f"(?s)ranks {words}"):
        run(2 * check_mode.COMPARE_STEPS, then)


@two
@pytest.mark.parametrize(
    ("run", "strategy"),
    [(Fit, "merged-gradient"), (Fit, "pipe-sgd"), (Tape, "merged-gradient")],
)
def test_replicas_that_differ(run: type[Fit | Tape], strategy: str) -> None:
    """One rank's weight was changed by hand, in its last bits: training went on with it."""
    with checks(0):
        assert_told(run(strategy), "bias", nudge)


@two
def test_averages_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """CoCoD's last average is not the same on rank 1."""
    plain = ModelAverage.average_now

    def average_now(self: ModelAverage, flats: Any) -> Any:
        return [flat * (1 + 1e-14 * hvd.rank()) for flat in plain(self, flats)]

    monkeypatch.setattr(ModelAverage, "average_now", average_now)
    with checks(0):
        assert_told(Fit("cocod:period=2"), "")
