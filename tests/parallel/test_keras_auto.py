"""``strategy="auto"`` and plans under ``fit``: what is computed, and that ranks go together."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import keras_reference
import numpy as np
import pytest
import tensorflow as tf
from keras_problem import OPTIMIZERS, STEPS, make_model, weights_of
from keras_training import (
    Record,
    assert_alike,
    data,
    embedding_data,
    embedding_model,
    fit,
    optimizer_of,
    seen,
    small_model,
)
from logged import Lines
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.planning.choice import OwnTimes
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.methods import spell
from hvd_pipe.tensorflow.measuring.ready_times import ReadyTimes
from hvd_pipe.tensorflow.strategies import replan

N = 2
two = on_ranks(N, init=hvd.init)

MEASURED = 4
SWITCH = 3 + MEASURED  # the step after which the choice is made
ALL = f"auto:allow=merged-gradient/pipe-sgd/cocod,steps={MEASURED}"
FREE, SOME, DEAR = 1e-6, 3.0, 19.0
"""Seconds of an all-reduce, where the slowest worker computes for 4."""
SLEEP = 0.02
WAIT = 0.9
"""Seconds for messages, by which the best plan has two."""
TWICE = ["merged-gradient", "anew", "merged-gradient"]  # as usual, then with what measures


def compiled(strategy: str, make: Any = small_model, **arguments: Any) -> Any:
    model = make()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), strategy=strategy, **arguments)
    model.compile(optimizer, "mse")
    return model


def chosen_of(model: Any) -> str | None:
    chosen = optimizer_of(model)._hvd_pipe.chosen
    return None if chosen is None else str(spell(chosen))


@contextmanager
def forced(seconds: float, others: float | None = None) -> Iterator[None]:
    """Let an all-reduce take so long, and the last rank compute for 4 s, the others for 0.04 s.

    Args:
        seconds: Of an all-reduce, as rank 0 sees it.
        others: As the other ranks see it.
    """
    compute = 4.0 if hvd.rank() == N - 1 else 0.04
    mine = seconds if hvd.rank() == 0 or others is None else others

    def ready(times: ReadyTimes) -> list[float]:
        last = times._count - 1
        return [compute / 2 * (last - index) / last for index in range(times._count)]

    def own(times: ReadyTimes) -> OwnTimes:
        return OwnTimes(compute / 2, ready(times), 0.0)

    def comm(total_bytes: int, *_: object) -> CommModel:
        return CommModel.linear(1e-6, mine / total_bytes)

    def planned(tried: Any, gradients: Any, find: Any, method: str, **_: Any) -> tuple[Any, bool]:
        return find(comm(sum(gradients.bytes)), method, None), True

    with (
        mock.patch.object(replan, "measure_comm", comm),
        mock.patch.object(replan, "next_plan", planned),
        mock.patch.object(ReadyTimes, "seconds", ready),
        mock.patch.object(ReadyTimes, "own", own),
    ):
        yield


@contextmanager
def traces() -> Iterator[list[str]]:
    """Collect the names of the engines that the step is traced with; once for each new function.

    TensorFlow traces a new function twice where that makes variables.
    """
    names: list[str] = []
    mixin = hvd.callbacks.DistributedMixin
    exchange, renew = mixin._hvd_pipe_step, keras.Model.make_train_function

    def step(self: Any, session: Any, *rest: Any) -> Any:
        if not names or names[-1] == "anew":
            names.append(session.engine.name)
        return exchange(self, session, *rest)

    def make(self: Any, force: bool = False) -> Any:
        if force:
            names.append("anew")
        return renew(self, force)

    with (
        mock.patch.object(mixin, "_hvd_pipe_step", step),
        mock.patch.object(keras.Model, "make_train_function", make),
    ):
        yield names


def assert_trajectory(model: Any, record: Record, strategy: str) -> None:
    """The weights after every batch are the reference's, and those at the end all ranks'.

    Synchronous ranks have the same weights after every batch.
    """
    records = np.array([*record.weights, weights_of(model)])
    wanted = keras_reference.trajectory(N, strategy, "momentum")[hvd.rank()]
    np.testing.assert_allclose(records, wanted, rtol=0, atol=1e-10)
    assert_alike(records if strategy == "merged-gradient" else records[-1])


@two
@pytest.mark.parametrize(
    ("seconds", "others", "chosen", "equal_to", "calls"),
    [
        # Steps count over all calls of fit: each has its own callbacks, which once began to
        # measure anew.
        (FREE, DEAR, "merged-gradient", "merged-gradient", (4, 10)),
        (SOME, DEAR, "pipe-sgd", f"pipe-sgd:warmup_steps={SWITCH}", (4,)),
        (DEAR, FREE, "cocod:period=5", f"cocod:period=5,warmup_steps={SWITCH}", ()),
    ],
    ids=["merged-gradient", "pipe-sgd", "cocod"],
)
def test_all_ranks_go_on_with_rank_0s_choice(
    seconds: float, others: float, chosen: str, equal_to: str, calls: tuple[int, ...]
) -> None:
    """Rank 0 computes fast, the last rank slowly, and each sees another network.

    With its own times alone, rank 0 would take CoCoD even where Pipe-SGD hides everything.
    """
    model, record, heard = compiled(ALL, make_model), Record(), Lines()
    with forced(seconds, others), traces() as traced:
        for first, last in zip((0, *calls), (*calls, STEPS), strict=True):
            fit(model, *data(first, last), record)
    lines, method = heard.taken(), chosen.partition(":")[0]
    assert chosen_of(model) == chosen
    assert traced == [*TWICE, "anew", method]
    assert_trajectory(model, record, equal_to)
    assert len(lines) == (1 if hvd.rank() == 0 else 0)
    predicted = rf"auto: chose {method}\S*: predicted [\d.]+ ms a step \(.*, .*\)"
    assert all(re.fullmatch(predicted, line) for line in lines)


@two
@pytest.mark.parametrize("given", ["", ":plan=wfbp"], ids=["planned", "a given plan is kept"])
def test_merged_gradient_is_planned_from_the_slowest_ranks_times(given: str) -> None:
    """Free as rank 0's network were, one message would do; its own times leave no time either."""
    model, record = compiled(f"merged-gradient{given}", make_model), Record()
    with forced(SOME, FREE), traces() as traced:
        fit(model, *data(), record)
    plan = model.optimizer.plan.buckets
    assert traced == (["merged-gradient"] if given else [*TWICE, "anew", "merged-gradient"])
    assert len(plan) == 6 if given else len(plan) > 1  # all in one, before
    assert gather(plan) == [plan] * N
    assert chosen_of(model) is None
    assert_trajectory(model, record, "merged-gradient")


@two
def test_the_plan_that_the_slowest_rank_is_fastest_with_stays() -> None:
    """Rank 0, which decides, is fastest with the third of the plans that are tried.

    A wait is the median of what the last rank waits in each step: each rank waits for long in most
    steps, and in each step but one, one of them waits for as little as messages take.
    """
    model, record = compiled("merged-gradient", make_model), Record()
    is_first = hvd.rank() == 0
    waits = [WAIT, WAIT, 9.0, 9.0, 9.0] if is_first else [9.0, 9.0, WAIT, WAIT, 9.0]
    noise = np.zeros(5) if is_first else np.array([-0.2, -0.1, 0.0, 0.1, 0.2])
    steps = [3.0 + noise, 2.0, 1.0 if is_first else 4.0]
    planned = mock.Mock(wraps=replan.next_plan)
    with (
        seen(steps.__getitem__, waits),
        mock.patch.object(replan, "next_plan", planned),
        traces() as traced,
    ):
        fit(model, *data(), record)
    assert traced == [*TWICE, *3 * ["anew", "merged-gradient"]]
    assert_trajectory(model, record, "merged-gradient")
    plan = model.optimizer.plan
    assert gather(plan) == [plan] * N
    assert plan.tried == ((1, 3.0), (6, 2.0), (2, 4.0))
    assert len(plan.buckets) == 6
    assert "tried" in str(plan)
    if is_first:
        trials = planned.call_args.args[0]
        assert [each.wait_s for each in trials] == [WAIT] * 3
        error, *others = (each.error_s for each in trials)
        assert error == pytest.approx(1.253 * 1.4826 * 0.1 / 5**0.5)
        assert others == [0.0, 0.0]


@two
@pytest.mark.parametrize(
    ("kind", "auto", "wanted"),
    [
        # The choice is made between two passes of a step.
        ("accumulating", ALL, "pipe-sgd:warmup_steps=5"),
        # Rows travel sparse while auto measures, and dense under what it chooses.
        (
            "embedding",
            f"auto:allow=pipe-sgd,steps={MEASURED}",
            f"pipe-sgd:warmup_steps={SWITCH}",
        ),
    ],
)
def test_it_is_what_the_chosen_strategy_is(kind: str, auto: str, wanted: str) -> None:
    def trained(strategy: str) -> Any:
        if kind == "embedding":
            model = compiled(strategy, embedding_model)
        else:
            model = compiled(strategy, backward_passes_per_step=2)
        with forced(SOME):
            fit(model, *(embedding_data() if kind == "embedding" else data()))
        return model

    model = trained(auto)
    assert chosen_of(model) == "pipe-sgd"
    assert_alike(weights_of(model))
    wanted_weights = weights_of(trained(wanted))
    np.testing.assert_allclose(weights_of(model), wanted_weights, rtol=0, atol=1e-10)


@two
def test_it_works_within_a_loss_scale_optimizer() -> None:
    """Under mixed_float16, Keras puts one around ours."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = compiled(f"auto:allow=pipe-sgd,steps={MEASURED}")
    finally:
        keras.config.set_dtype_policy("float64")
    fit(model, *data())
    assert type(model.optimizer).__name__ == "LossScaleOptimizer"
    assert chosen_of(model) == "pipe-sgd"
    assert_alike(weights_of(model))


BEFORE, BEHIND = 4, SWITCH + 3
"""Steps of checkpoints before the choice, and after it."""


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a rank's own checkpoints, and the weights of the run that wrote them."""
    folder, record = tmp_path_factory.mktemp("own"), Record()
    model = compiled(ALL)
    saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    saves = [
        Record(at, functools.partial(saver.write, str(folder / str(at))))
        for at in (BEFORE, BEHIND)
    ]
    with forced(SOME):
        fit(model, *data(), record, *saves)
    return folder, np.array([*record.weights, weights_of(model)])


@two
@pytest.mark.parametrize(
    ("saved", "chosen", "same"),
    # The unbroken run is Pipe-SGD from the choice on, which is still to make.
    [(BEHIND, "pipe-sgd", None), (BEFORE, None, SWITCH - BEFORE)],
    ids=["after the choice", "before it"],
)
def test_a_resumed_run_goes_on_with_the_choice(
    saved: int, chosen: str | None, same: int | None, unbroken: tuple[Path, Any]
) -> None:
    folder, whole = unbroken
    model, record = loaded(folder / str(saved)), Record()
    assert chosen_of(model) == chosen
    with forced(SOME):
        fit(model, *data(saved), record)
    assert chosen_of(model) == "pipe-sgd"
    resumed = np.array([*record.weights, weights_of(model)])
    assert np.array_equal(resumed[:same], whole[saved:][:same])


def loaded(path: Path | None) -> Any:
    """Return a model, into which a checkpoint is read."""
    model = compiled(ALL)
    model.optimizer.build(model.trainable_variables)
    if path:
        loader = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        loader.read(str(path)).expect_partial()
    return model


@two
def test_a_choice_that_only_one_rank_loads_is_told(unbroken: tuple[Path, Any]) -> None:
    model = loaded(unbroken[0] / str(BEHIND) if hvd.rank() == 0 else None)
    words = "ranks disagree on what auto has chosen: rank 0 has pipe-sgd.*rank 1 has nothing yet"
    with forced(SOME), pytest.raises(hvd.RanksDisagreeError, match=words):
        fit(model, *data(BEHIND))


@two
def test_what_rank_0_alone_decides_fails_on_every_rank() -> None:
    model, failure = compiled(ALL), ValueError("no choice")
    kind, words = ValueError, "^no choice$"
    if hvd.rank():
        kind = hvd.HvdPipeError
        words = "^rank 0, which decides for all, failed: ValueError: no choice$"
    broken = mock.patch.object(replan, "predict", side_effect=failure)
    with forced(SOME), broken, pytest.raises(kind, match=words):
        fit(model, *data())


class Slow(keras.layers.Layer):  # type: ignore[misc]
    """Sleeps on the last rank: in forward, and twice as long in backward."""

    def call(self, x: Any) -> Any:
        slow = hvd.rank() == N - 1

        def wait(seconds: float, x: Any) -> Any:
            def sleep(x: Any) -> Any:
                time.sleep(seconds if slow else 0.0)
                return x

            later = tf.numpy_function(sleep, [x], x.dtype)
            later.set_shape(x.shape)
            return later

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


@two
def test_the_slowest_ranks_times_count() -> None:
    """Rank 0 predicts from them: the last rank is slow. Steps of an execution count one by one."""
    layers = keras.layers
    model = keras.Sequential([layers.Input((6,)), layers.Dense(5), Slow(), layers.Dense(3)])
    optimizer = hvd.DistributedOptimizer(SlowSGD(0.01), strategy=ALL)
    model.compile(optimizer, "mse", steps_per_execution=2)
    predicted = mock.Mock(wraps=replan.predict)
    with mock.patch.object(replan, "predict", predicted):
        fit(model, *data(0, SWITCH * 2))
    assert_alike(weights_of(model))
    assert predicted.called == (hvd.rank() == 0)
    if predicted.called:
        profile = predicted.call_args_list[0].args[1]
        ready = profile.ready_times().tolist()
        assert profile.forward_s >= SLEEP
        assert len(profile.gradient_order()) == 4
        assert ready == sorted(ready)
        assert ready[-1] >= 2 * SLEEP
        assert profile.update_s >= SLEEP


@two
def test_what_the_arguments_refuse_is_left_out() -> None:
    heard = Lines()
    allow = "merged-gradient/merged-gradient:overlap=forward/pipe-sgd/cocod"
    model = compiled(f"auto:allow={allow},steps={MEASURED}", op=hvd.Sum)
    with forced(DEAR):
        fit(model, *data(0, SWITCH))
    model.optimizer.synchronize()
    assert chosen_of(model) == "pipe-sgd"
    lines = heard.taken()
    if hvd.rank() == 0:
        forward, dropped, chose = lines
        assert forward.startswith(
            "auto: merged-gradient:overlap=forward is left out: auto does not choose "
            "overlap='forward' under Keras"
        )
        assert dropped.startswith("auto: cocod is left out: op=hvd.Sum has no meaning under CoCoD")
        assert chose.startswith("auto: chose pipe-sgd: predicted")
    else:
        assert lines == []


@on_ranks(1, init=hvd.init)
def test_one_worker_has_nothing_to_choose() -> None:
    """It measures nothing."""
    model = compiled(ALL, make_model)
    unwanted = mock.patch.object(replan, "measure_comm", side_effect=AssertionError)
    with unwanted, traces() as traced:
        fit(model, *data())
    assert chosen_of(model) is None
    assert traced == ["merged-gradient"]
    wanted = keras_reference.trajectory(1, "merged-gradient", "momentum")[0][-1]
    np.testing.assert_allclose(weights_of(model), wanted, rtol=0, atol=1e-10)
