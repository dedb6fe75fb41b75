"""``strategy="auto"`` and plans under ``fit``, case by case; see `test_keras_auto`."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from cases import Raised, run_cases
from keras_problem import BATCH, OPTIMIZERS, STEPS, batch, make_model, weights_of

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.planning.choice import OwnTimes
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.methods import spell
from hvd_pipe.tensorflow.measuring.ready_times import JobTimes, ReadyTimes
from hvd_pipe.tensorflow.strategies import auto_choice, replan

Found = dict[str, Any]

MEASURED = 4
SWITCH = 3 + MEASURED  # the step after which the choice is made
ALL = f"auto:allow=merged-gradient/pipe-sgd/cocod,steps={MEASURED}"
FREE, SOME, DEAR = 1e-6, 3.0, 19.0
"""Seconds of an all-reduce, where the slowest worker computes for 4."""
SLEEP = 0.03
WAIT = 0.9
"""Seconds for messages, by which the best plan has two: see `raced`."""


class Lines(logging.Handler):
    """Keeps what hvd_pipe logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("hvd_pipe")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def taken(self) -> list[str]:
        logging.getLogger("hvd_pipe").removeHandler(self)
        return [line for line in self.lines if line.startswith("auto")]


class Record(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the weights after every batch, and calls what is to happen after one of them."""

    def __init__(self, at: int = -1, then: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.weights: list[Any] = []
        self._at, self._then = at, then

    def on_train_batch_end(self, number: int, logs: Any = None) -> None:
        self.weights.append(weights_of(self.model))
        if len(self.weights) == self._at and self._then is not None:
            self._then()


def data(first: int = 0, last: int = STEPS) -> tuple[Any, Any]:
    parts = [batch(hvd.rank(), step) for step in range(first, last)]
    x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    return x, y


def compiled(strategy: str, optimizer: Any = None, **arguments: Any) -> Any:
    model = make_model()
    optimizer = OPTIMIZERS["momentum"]() if optimizer is None else optimizer
    model.compile(hvd.DistributedOptimizer(optimizer, strategy=strategy, **arguments), "mse")
    return model


def fit(model: Any, x: Any, y: Any, *callbacks: Any, **options: Any) -> Any:
    callbacks = (hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, callbacks=list(callbacks), **options)


def chosen_of(model: Any) -> str | None:
    chosen = optimizer_of(model)._hvd_pipe.chosen
    return None if chosen is None else str(spell(chosen))


def optimizer_of(model: Any) -> Any:
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


@contextmanager
def forced(seconds: float, others: float | None = None) -> Iterator[None]:
    """Let an all-reduce take so long, and the last rank compute for 4 s, the others for 0.04 s.

    Args:
        seconds: Of an all-reduce, as rank 0 sees it.
        others: As the other ranks see it.
    """
    last = hvd.rank() == hvd.size() - 1
    compute = 4.0 if last else 0.04
    mine = seconds if hvd.rank() == 0 or others is None else others

    def ready(times: ReadyTimes) -> list[float]:
        last = times._count - 1
        return [compute / 2 * (last - index) / last for index in range(times._count)]

    def own(times: JobTimes) -> OwnTimes:
        return OwnTimes(compute / 2, ready(times), 0.0)

    comm = CommModel.linear(1e-6, mine / 592)  # the model has 592 bytes

    def planned(tried: Any, gradients: Any, find: Any, method: str, **_: Any) -> tuple[Any, bool]:
        return find(comm, method, None), True

    with (
        mock.patch.object(replan, "measure_comm", return_value=comm),
        mock.patch.object(replan, "next_plan", planned),
        mock.patch.object(ReadyTimes, "seconds", ready),
        mock.patch.object(JobTimes, "own", own),
    ):
        yield


@contextmanager
def traces() -> Iterator[list[str]]:
    """Collect the names of the engines that the step is traced with; once for each new function.

    TensorFlow traces a new function twice where that makes variables.
    """
    found: list[str] = []
    mixin = hvd.callbacks.DistributedMixin
    exchange, renew = mixin._hvd_pipe_step, keras.Model.make_train_function

    def step(self: Any, session: Any, *rest: Any) -> Any:
        if not found or found[-1] == "anew":
            found.append(session.engine.name)
        return exchange(self, session, *rest)

    def make(self: Any, force: bool = False) -> Any:
        if force:
            found.append("anew")
        return renew(self, force)

    with (
        mock.patch.object(mixin, "_hvd_pipe_step", step),
        mock.patch.object(keras.Model, "make_train_function", make),
    ):
        yield found


def run(strategy: str, seconds: float, others: float | None = None) -> Found:
    """Every record of this rank, after every batch, and at the end."""
    model, record, heard = compiled(strategy), Record(), Lines()
    with forced(seconds, others), traces() as traced:
        fit(model, *data(), record)
    return {
        "records": np.array([*record.weights, weights_of(model)]),
        "chosen": chosen_of(model),
        "lines": heard.taken(),
        "traced": traced,
        "plan": model.optimizer.plan and model.optimizer.plan.buckets,
    }


def measured(**options: Any) -> Found:
    """All is as it is: whatever is chosen, it learns, and ranks end equal."""
    heard = Lines()
    model = compiled(ALL, keras.optimizers.Adam(0.02))
    x, _ = data(0, 60)
    y = np.tanh(x @ np.linspace(-1.0, 1.0, 18).reshape(6, 3))
    model.compile(model.optimizer, "mse", steps_per_execution=options.pop("executed", 1))
    history = fit(model, x, y, epochs=3, **options)
    return {
        "chosen": chosen_of(model),
        "weights": weights_of(model),
        "losses": history.history["loss"],
        "lines": heard.taken(),
    }


def in_pieces() -> Found:
    """``fit`` is called several times while auto measures, with new callbacks each time."""
    model, records = compiled(ALL), []
    with forced(SOME), traces() as traced:
        for first in range(0, STEPS, 4):
            record = Record()
            fit(model, *data(first, first + 4), record)
            records += record.weights
    return {"chosen": chosen_of(model), "traced": traced, "weights": weights_of(model)}


def accumulating(strategy: str) -> Found:
    """The choice is made between two passes of a step."""
    model = compiled(strategy, keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    with forced(SOME):
        fit(model, *data())
    return {"chosen": chosen_of(model), "weights": weights_of(model)}


def embedding(strategy: str) -> Found:
    """Rows of an embedding travel sparse while auto measures, and dense under what it chooses."""
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [keras.layers.Input((2,), dtype="int32"), keras.layers.Embedding(12, 3),
         keras.layers.Flatten(), keras.layers.Dense(1)]
    )  # fmt: skip
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), strategy=strategy), "mse")
    rows = np.random.default_rng(hvd.rank()).integers(0, 12, (STEPS * BATCH, 2))
    with forced(SOME):
        fit(model, rows, rows.sum(axis=1, keepdims=True) / 12.0)
    return {"chosen": chosen_of(model), "weights": weights_of(model)}


def scaled() -> Found:
    """Under mixed_float16, Keras puts a LossScaleOptimizer around ours."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(f"auto:allow=pipe-sgd,steps={MEASURED}", keras.optimizers.SGD(0.05))
    finally:
        keras.config.set_dtype_policy("float64")
    fit(model, *data())
    return {
        "class": type(model.optimizer).__name__,
        "chosen": chosen_of(model),
        "weights": weights_of(model),
    }


def resumed(saved: int, others_load: bool = True) -> Found:
    """From a checkpoint of each rank's own, against a run without a break."""
    with tempfile.TemporaryDirectory() as folder, forced(SOME):
        model = compiled(ALL)
        optimizer = model.optimizer
        saver = tf.train.Checkpoint(model=model, optimizer=optimizer)
        record = Record(saved, lambda: saver.write(f"{folder}/own"))
        fit(model, *data(), record)
        other, again = compiled(ALL), Record()
        other.optimizer.build(other.trainable_variables)
        if others_load or hvd.rank() == 0:
            loader = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
            loader.read(f"{folder}/own").expect_partial()
        loaded = chosen_of(other)
        try:
            fit(other, *data(saved), again)
        except hvd.RanksDisagreeError as error:
            return {"said": str(error)}
    return {
        "loaded": loaded,
        "chosen": chosen_of(other),
        "whole": np.array([*record.weights[saved:], weights_of(model)]),
        "resumed": np.array([*again.weights, weights_of(other)]),
    }


def failing_on_rank_0() -> str:
    model = compiled(ALL)
    broken = mock.patch.object(auto_choice, "predict", side_effect=ValueError("no choice"))
    try:
        with forced(SOME), broken:
            fit(model, *data())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Slow(keras.layers.Layer):  # type: ignore[misc]
    """Sleeps on the last rank: in forward, and twice as long in backward."""

    def call(self, x: Any) -> Any:
        slow = hvd.rank() == hvd.size() - 1

        def wait(seconds: float, x: Any) -> Any:
            def sleep(x: Any) -> Any:
                time.sleep(seconds if slow else 0.0)
                return x

            found = tf.numpy_function(sleep, [x], x.dtype)
            found.set_shape(x.shape)
            return found

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def through(x: Any) -> Any:
            return wait(SLEEP, x), lambda g: wait(2 * SLEEP, g)

        return through(x)

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


class SlowSGD(keras.optimizers.SGD):  # type: ignore[misc]
    """Sleeps before each variable's update."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        def sleep(gradient: Any) -> Any:
            time.sleep(SLEEP)
            return gradient

        slow = tf.numpy_function(sleep, [gradient], gradient.dtype)
        slow.set_shape(gradient.shape)
        super().update_step(slow, variable, learning_rate)


def seen_by_rank_0(executed: int) -> Found | None:
    """What rank 0 predicts from: the last rank is slow."""
    layers = keras.layers
    model = keras.Sequential([layers.Input((6,)), layers.Dense(5), Slow(), layers.Dense(3)])
    optimizer = hvd.DistributedOptimizer(SlowSGD(0.01), strategy=ALL)
    model.compile(optimizer, "mse", steps_per_execution=executed)
    predicted = mock.Mock(wraps=auto_choice.predict)
    with mock.patch.object(auto_choice, "predict", predicted):
        fit(model, *data(0, SWITCH * executed))
    if hvd.rank() != 0:
        assert not predicted.called
        return None
    profile = predicted.call_args_list[0].args[1]
    return {
        "forward": profile.forward_s,
        "ready": profile.ready_times().tolist(),
        "order": profile.gradient_order(),
        "update": profile.update_s,
    }


def left_out() -> list[str]:
    heard = Lines()
    allow = "merged-gradient/merged-gradient:overlap=forward/pipe-sgd/cocod"
    model = compiled(f"auto:allow={allow},steps={MEASURED}", op=hvd.Sum)
    with forced(DEAR):
        fit(model, *data(0, SWITCH))
    model.optimizer.synchronize()
    return [*heard.taken(), str(chosen_of(model))]


def raced(third_s: float) -> Found:
    """Three plans are tried; what each rank sees of them is given.

    Args:
        third_s: A step of the third plan on the last rank. On the first one it is the fastest.
    """
    model, record = compiled("merged-gradient"), Record()
    is_first = hvd.rank() == 0
    # In each step but one, one of the ranks waits for as little as messages take.
    waits = [WAIT, WAIT, 9.0, 9.0, 9.0] if is_first else [9.0, 9.0, WAIT, WAIT, 9.0]
    noise = np.zeros(5) if is_first else np.array([-0.2, -0.1, 0.0, 0.1, 0.2])
    steps = iter([3.0 + noise, 2.0 + 0 * noise, (1.0 if is_first else third_s) + 0 * noise])
    recorded, planned = replan.Replan._recorded, mock.Mock(wraps=replan.next_plan)

    def seen(self: Any, engine: Any) -> Any:
        engine.times.waits, engine.times.step_s = waits, next(steps).tolist()
        return recorded(self, engine)

    def ready(times: ReadyTimes) -> list[float]:
        return [0.4 * (5 - index) for index in range(6)]

    with (
        mock.patch.object(replan.Replan, "_recorded", seen),
        mock.patch.object(ReadyTimes, "seconds", ready),
        mock.patch.object(replan, "next_plan", planned),
        traces() as traced,
    ):
        fit(model, *data(), record)
    trials = planned.call_args.args[0] if is_first else []
    return {
        "records": np.array([*record.weights, weights_of(model)]),
        "traced": traced,
        "plan": model.optimizer.plan,
        "trials": [(each.wait_s, each.error_s) for each in trials],
    }


CASES: dict[str, Callable[[], Any]] = {
    "merged-gradient": partial(run, ALL, FREE, DEAR),
    "pipe-sgd": partial(run, ALL, SOME, DEAR),
    "cocod": partial(run, ALL, DEAR, FREE),
    "default": partial(run, f"auto:steps={MEASURED}", DEAR),
    "plan": partial(run, "merged-gradient", SOME, FREE),
    "raced": partial(raced, 4.0),
    "raced, the third wins": partial(raced, 1.5),
    "given plan": partial(run, "merged-gradient:plan=wfbp", SOME),
    "measured": measured,
    "measured, several steps": partial(measured, executed=4),
    "in pieces": in_pieces,
    "accumulating": partial(accumulating, ALL),
    "accumulating pipe-sgd": partial(accumulating, "pipe-sgd:warmup_steps=5"),
    "embedding": partial(embedding, f"auto:allow=pipe-sgd,steps={MEASURED}"),
    "embedding pipe-sgd": partial(embedding, f"pipe-sgd:warmup_steps={SWITCH}"),
    "scaled": scaled,
    "resumed": partial(resumed, SWITCH + 3),
    "resumed before": partial(resumed, 4),
    "resumed on rank 0": partial(resumed, SWITCH + 3, False),
    "failing": failing_on_rank_0,
    "seen by rank 0": partial(seen_by_rank_0, 1),
    "seen by rank 0, several steps": partial(seen_by_rank_0, 3),
    "left out": left_out,
}


def everything() -> dict[str, Any | Raised]:
    hvd.init()
    return run_cases(CASES)


def alone() -> Found:
    """One worker has nothing to choose and measures nothing."""
    hvd.init()
    model = compiled(ALL)
    unwanted = mock.patch.object(replan, "measure_comm", side_effect=AssertionError)
    with unwanted, traces() as traced:
        fit(model, *data())
    return {"chosen": chosen_of(model), "traced": traced, "weights": weights_of(model)}
