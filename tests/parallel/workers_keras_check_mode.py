"""Keras and tapes under the checks of `runtime.check_mode`, for test_keras_check_mode.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import Raised, run_cases
from keras_problem import BATCH, OPTIMIZERS, Weights, batch, loss_of, make_model, weights_of

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.runtime import check_mode

SEEDS = 20
STEPS = 6
FAULTY = 3  # the batch after which a fault is planted

BATTERY = (
    ("fit", "merged-gradient:bucket_bytes=64"),
    ("fit", "pipe-sgd"),
    ("fit", "cocod:period=2"),
    ("fit", "cocod:period=2,fragments=2"),
    ("tape", "pipe-sgd:bucket_bytes=64"),
)


@contextmanager
def checks(seed: int | None) -> Iterator[None]:
    """As if the job had been started with these delays, or with none and no checks."""
    before = check_mode.active
    check_mode.active = check_mode.OFF if seed is None else check_mode.Check(seed, hvd.rank())
    try:
        yield
    finally:
        check_mode.active = before


Case = tuple[str, str]
Then = Callable[[Any, int], None]


def battery() -> dict[Case, list[Weights] | Raised]:
    """Of each case: a run without checks, then one with those of each seed."""
    hvd.init()
    return run_cases({case: partial(with_every_seed, *case) for case in BATTERY})


def with_every_seed(mode: str, strategy: str) -> list[Weights]:
    """One model for all seeds, as tracing its step costs seconds: put back before each run."""
    run = {"fit": Fit, "tape": Tape}[mode]
    with checks(None):
        found = [run(strategy)(STEPS)]
    with checks(0):
        checked = run(strategy)
        start = [np.array(each) for each in checked.variables]
        for seed in range(SEEDS):
            check_mode.active = check_mode.Check(seed, hvd.rank())
            for each, value in zip(checked.variables, start, strict=True):
                each.assign(value)
            found.append(checked(STEPS))
    return found


class Fit:
    """Training by ``fit``; returns the weights after every batch, and after the end."""

    def __init__(self, strategy: str) -> None:
        self.model = make_model()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), strategy=strategy)
        optimizer.build(self.model.trainable_variables)
        self.model.compile(optimizer, "mse")
        self.variables = [*self.model.variables, *optimizer.variables]

    def __call__(self, steps: int, then: Then | None = None) -> Weights:
        records = []

        class Each(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, number: int, logs: Any = None) -> None:
                records.append(weights_of(self.model))
                if then is not None:
                    then(self.model, len(records) - 1)

        data = [batch(hvd.rank(), step) for step in range(steps)]
        x, y = (np.concatenate(parts) for parts in zip(*data, strict=True))
        options: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
        self.model.fit(x, y, callbacks=[Each()], **options)
        return np.array([*records, weights_of(self.model)])


class Tape:
    """The same in a loop with a tape."""

    def __init__(self, strategy: str) -> None:
        self.model, self._optimizer = make_model(), OPTIMIZERS["sgd"]()
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

    def __call__(self, steps: int, then: Then | None = None) -> Weights:
        records = []
        for number in range(steps):
            self._step(*map(tf.constant, batch(hvd.rank(), number)))
            records.append(weights_of(self.model))
            if then is not None:
                then(self.model, number)
        last = hvd_tf.drain_gradients(self.model.trainable_variables)
        if last is not None:
            self._apply(last)
        return np.array([*records, weights_of(self.model)])


def nudge(model: Any, number: int) -> None:
    """Change one weight of rank 1 in its last bits."""
    if (hvd.rank(), number) == (1, FAULTY):
        bias = model.trainable_variables[3]
        bias.assign(np.add(bias.numpy(), [0.0, 1e-14, 0.0, 0.0]))


def said(run: type[Fit | Tape], strategy: str, then: Then | None = nudge) -> str:
    """What training ends in, with a weight that is changed by hand."""
    try:
        run(strategy)(2 * check_mode.COMPARE_STEPS, then)
    except (hvd.HvdPipeError, tf.errors.OpError) as error:
        return str(error)
    return "nothing was raised"


def unequal_average() -> str:
    """CoCoD's last average is not the same on rank 1."""
    from hvd_pipe.tensorflow.strategies.model_average import ModelAverage  # noqa: PLC0415

    plain = ModelAverage.average_now

    def average_now(self: ModelAverage, flats: Any) -> Any:
        return [flat * (1 + 1e-14 * hvd.rank()) for flat in plain(self, flats)]

    ModelAverage.average_now = average_now  # type: ignore[method-assign]
    try:
        return said(Fit, "cocod:period=2", None)
    finally:
        ModelAverage.average_now = plain  # type: ignore[method-assign]


def joined(strategy: str) -> tuple[Weights, int]:
    """Rank 0 makes five steps more before ``hvd.join()``, and all go on from its weights.

    Returns the weights at the end, and how often replicas were compared.
    """
    from hvd_pipe.tensorflow.checking import Replicas  # noqa: PLC0415

    plain, compared = Replicas._check, 0

    def check(self: Replicas, everyone: Any, steps: Any) -> Any:
        nonlocal compared
        compared += 1
        return plain(self, everyone, steps)

    Replicas._check = check  # type: ignore[method-assign]
    try:
        run = Tape(strategy)
        run(7 if hvd.rank() else check_mode.COMPARE_STEPS + 2)
        last = int(hvd_tf.join())
        hvd_tf.broadcast_variables(run.variables, root_rank=last)
        run(2 * check_mode.COMPARE_STEPS + 4)
    finally:
        Replicas._check = plain  # type: ignore[method-assign]
    return weights_of(run.model), compared


JOINED = ("merged-gradient",)
FAULTS: dict[str, Callable[[], str]] = {
    "fit, merged-gradient": partial(said, Fit, "merged-gradient"),
    "fit, pipe-sgd": partial(said, Fit, "pipe-sgd"),
    "tape, merged-gradient": partial(said, Tape, "merged-gradient"),
    "fit, cocod": unequal_average,
}


def faults() -> dict[Any, Any]:
    """Started with HVD_PIPE_CHECK=1: what each fault leads to."""
    hvd.init()
    assert check_mode.active.on
    joins = {("joined", strategy): partial(joined, strategy) for strategy in JOINED}
    return run_cases({**joins, **FAULTS})
