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
from keras_problem import BATCH, OPTIMIZERS, STEPS, Weights, make_model, weights_of
from keras_training import Record, assert_alike, data, fit, optimizer_of, small_model
from logged import Lines
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.planning.choice import OwnTimes
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.methods import spell
from hvd_pipe.planning.plan import Plan
from hvd_pipe.tensorflow.measuring.ready_times import JobTimes, ReadyTimes
from hvd_pipe.tensorflow.strategies import auto_choice, replan

N = 2
two = on_ranks(N, init=hvd.init)

MEASURED = 4
SWITCH = 3 + MEASURED  # the step after which the choice is made
ALL = f"auto:allow=merged-gradient/pipe-sgd/cocod,steps={MEASURED}"
FREE, SOME, DEAR = 1e-6, 3.0, 19.0
"""Seconds of an all-reduce, where the slowest worker computes for 4."""
SLEEP = 0.02
WAIT = 0.9
"""Seconds for messages, by which the best plan has two: see `race`."""
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

    def own(times: JobTimes) -> OwnTimes:
        return OwnTimes(compute / 2, ready(times), 0.0)

    def comm(total_bytes: int, *_: object) -> CommModel:
        return CommModel.linear(1e-6, mine / total_bytes)

    def planned(tried: Any, gradients: Any, find: Any, method: str, **_: Any) -> tuple[Any, bool]:
        return find(comm(sum(gradients.bytes)), method, None), True

    with (
        mock.patch.object(replan, "measure_comm", comm),
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
    ("strategy", "seconds", "others", "chosen", "equal_to", "calls"),
    [
        # Steps count over all calls of fit: each has its own callbacks, which once began to
        # measure anew.
        (ALL, FREE, DEAR, "merged-gradient", "merged-gradient", (4, 10)),
        (ALL, SOME, DEAR, "pipe-sgd", f"pipe-sgd:warmup_steps={SWITCH}", (4,)),
        (ALL, DEAR, FREE, "cocod:period=5", f"cocod:period=5,warmup_steps={SWITCH}", ()),
        # nightly: the choice of the first, as there is no other
        pytest.param(
            *(f"auto:steps={MEASURED}", DEAR, None, "merged-gradient", "merged-gradient", ()),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["merged-gradient", "pipe-sgd", "cocod", "default"],
)
def test_all_ranks_go_on_with_rank_0s_choice(
    strategy: str,
    seconds: float,
    others: float | None,
    chosen: str,
    equal_to: str,
    calls: tuple[int, ...],
) -> None:
    """Rank 0 computes fast, the last rank slowly, and each sees another network.

    With its own times alone, rank 0 would take CoCoD even where Pipe-SGD hides everything.
    """
    model, record, heard = compiled(strategy, make_model), Record(), Lines()
    with forced(seconds, others), traces() as traced:
        for first, last in zip((0, *calls), (*calls, STEPS), strict=True):
            fit(model, *data(first, last), record)
    lines, method = heard.taken(), chosen.partition(":")[0]
    assert chosen_of(model) == chosen
    assert traced == [*TWICE, "anew", method]
    assert_trajectory(model, record, equal_to)
    assert len(lines) == (1 if hvd.rank() == 0 else 0)
    predicted = r"predicted [\d.]+ ms a step" + (r" \(.*, .*\)" if strategy == ALL else ".*")
    assert all(re.fullmatch(rf"auto: chose {method}\S*: {predicted}", line) for line in lines)


@two
def test_merged_gradient_is_planned_from_the_slowest_ranks_times() -> None:
    """Free as rank 0's network were, one message would do; its own times leave no time either."""
    model, record = compiled("merged-gradient", make_model), Record()
    with forced(SOME, FREE), traces() as traced:
        fit(model, *data(), record)
    plan = model.optimizer.plan.buckets
    assert traced == [*TWICE, "anew", "merged-gradient"]
    assert len(plan) > 1  # all in one, before
    assert gather(plan) == [plan] * N
    assert chosen_of(model) is None
    assert_trajectory(model, record, "merged-gradient")


@functools.cache
def race(third_s: float) -> tuple[Plan, Any]:
    """Train while three plans are tried; what each rank sees of them is given.

    Args:
        third_s: A step of the third plan on the last rank. On rank 0 it is the fastest.

    Returns:
        The plan that stays; and on rank 0, which decides, what was seen of the three.
    """
    model, record = compiled("merged-gradient", make_model), Record()
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
    assert traced == [*TWICE, *3 * ["anew", "merged-gradient"]]
    assert_trajectory(model, record, "merged-gradient")
    return model.optimizer.plan, planned.call_args.args[0] if is_first else None


@two
@pytest.mark.parametrize(
    ("third_s", "buckets"),
    # nightly: that a third plan may win is in single/test_trials, too
    [(4.0, 6), pytest.param(1.5, 2, marks=pytest.mark.nightly)],
)
def test_the_plan_that_the_slowest_rank_is_fastest_with_stays(
    third_s: float, buckets: int
) -> None:
    """Rank 0, which decides, is fastest with the third plan in both cases."""
    plan, _ = race(third_s)
    assert gather(plan) == [plan] * N
    assert plan.tried == ((1, 3.0), (6, 2.0), (2, third_s))
    assert len(plan.buckets) == buckets
    assert "tried" in str(plan)


@two
def test_a_wait_is_the_median_of_what_the_last_rank_waits_in_each_step() -> None:
    """Each rank waits for long in most steps, and the last one in each step but one does not."""
    _, trials = race(4.0)
    if hvd.rank() == 0:
        assert [each.wait_s for each in trials] == [WAIT] * 3
        error, *others = (each.error_s for each in trials)
        assert error == pytest.approx(1.253 * 1.4826 * 0.1 / 5**0.5)
        assert others == [0.0, 0.0]


@two
def test_a_given_plan_is_kept() -> None:
    model = compiled("merged-gradient:plan=wfbp")
    with forced(SOME), traces() as traced:
        fit(model, *data())
    assert traced == ["merged-gradient"]
    assert len(model.optimizer.plan.buckets) == 2


# nightly: trajectories show that it learns, and the slowest rank's times are measured as they are
@pytest.mark.nightly
@two
@pytest.mark.parametrize("executed", [1, 4])
def test_whatever_is_chosen_it_learns_and_ranks_end_equal(executed: int) -> None:
    """All is measured as it is."""
    model = compiled(ALL)
    x, _ = data(0, 40)
    y = x @ np.linspace(-1.0, 1.0, 18).reshape(6, 3)
    model.compile(model.optimizer, "mse", steps_per_execution=executed)
    losses = fit(model, x, y, epochs=2).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert_alike(weights_of(model))
    chosen = chosen_of(model)
    assert chosen is not None
    assert gather(chosen) == [chosen] * N


def accumulated(strategy: str) -> Any:
    """The choice is made between two passes of a step."""
    model = compiled(strategy, backward_passes_per_step=2)
    with forced(SOME):
        fit(model, *data())
    return model


def embedded(strategy: str) -> Any:
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
    return model


@two
@pytest.mark.parametrize(
    ("trained", "auto", "wanted"),
    [
        (accumulated, ALL, "pipe-sgd:warmup_steps=5"),
        (embedded, f"auto:allow=pipe-sgd,steps={MEASURED}", f"pipe-sgd:warmup_steps={SWITCH}"),
    ],
    ids=["accumulating", "embedding"],
)
def test_it_is_what_the_chosen_strategy_is(trained: Any, auto: str, wanted: str) -> None:
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


class Unbroken:
    """A run that goes on after a checkpoint before the choice, and one after it.

    Args:
        folder: Of the checkpoints, a rank's own.
    """

    before, behind = 4, SWITCH + 3

    def __init__(self, folder: Path) -> None:
        self._folder, record = folder, Record()
        model = compiled(ALL)
        saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        saves = [
            Record(at, lambda at=at: saver.write(str(folder / str(at))))  # type: ignore[misc]
            for at in (self.before, self.behind)
        ]
        with forced(SOME):
            fit(model, *data(), record, *saves)
        self._records = np.array([*record.weights, weights_of(model)])

    def resumed(self, saved: int, loads: bool = True) -> tuple[str | None, str | None, Any]:
        """Go on from a checkpoint.

        Returns:
            What was chosen before and after; and the weights of both runs, batch by batch.
        """
        model, record = compiled(ALL), Record()
        model.optimizer.build(model.trainable_variables)
        if loads:
            loader = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            loader.read(str(self._folder / str(saved))).expect_partial()
        loaded = chosen_of(model)
        with forced(SOME):
            fit(model, *data(saved), record)
        weights: tuple[Weights, Weights]
        weights = np.array([*record.weights, weights_of(model)]), self._records[saved:]
        return loaded, chosen_of(model), weights


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    return Unbroken(tmp_path_factory.mktemp("own"))


@two
def test_a_resumed_run_goes_on_with_the_choice(unbroken: Unbroken) -> None:
    loaded, chosen, (resumed, whole) = unbroken.resumed(unbroken.behind)
    assert (loaded, chosen) == ("pipe-sgd", "pipe-sgd")
    assert np.array_equal(resumed, whole)


@two
def test_saved_before_the_choice_it_is_still_to_choose(unbroken: Unbroken) -> None:
    loaded, chosen, (resumed, whole) = unbroken.resumed(unbroken.before)
    assert (loaded, chosen) == (None, "pipe-sgd")
    same = SWITCH - unbroken.before  # the unbroken run is Pipe-SGD from there on
    assert np.array_equal(resumed[:same], whole[:same])


@two
def test_a_choice_that_only_one_rank_loads_is_told(unbroken: Unbroken) -> None:
    words = "ranks disagree on what auto has chosen: rank 0 has pipe-sgd.*rank 1 has nothing yet"
    with pytest.raises(hvd.RanksDisagreeError, match=words):
        unbroken.resumed(unbroken.behind, loads=hvd.rank() == 0)


@two
def test_what_rank_0_alone_decides_fails_on_every_rank() -> None:
    model, failure = compiled(ALL), ValueError("no choice")
    kind, words = ValueError, "^no choice$"
    if hvd.rank():
        kind = hvd.HvdPipeError
        words = "^rank 0, which decides for all, failed: ValueError: no choice$"
    broken = mock.patch.object(auto_choice, "predict", side_effect=failure)
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
@pytest.mark.parametrize(
    "executed",
    # nightly: two steps are measured by what measures one
    [2, pytest.param(1, marks=pytest.mark.nightly)],
)
def test_the_slowest_ranks_times_count(executed: int) -> None:
    """Rank 0 predicts from them: the last rank is slow. Steps of an execution count one by one."""
    layers = keras.layers
    model = keras.Sequential([layers.Input((6,)), layers.Dense(5), Slow(), layers.Dense(3)])
    optimizer = hvd.DistributedOptimizer(SlowSGD(0.01), strategy=ALL)
    model.compile(optimizer, "mse", steps_per_execution=executed)
    predicted = mock.Mock(wraps=auto_choice.predict)
    with mock.patch.object(auto_choice, "predict", predicted):
        fit(model, *data(0, SWITCH * executed))
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
