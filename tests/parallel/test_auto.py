"""``strategy="auto"``: what it computes is what the method that it is at computes."""

from __future__ import annotations

import copy
import importlib
import io
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import horovod.torch as stock
import numpy as np
import pytest
import torch
from logged import Lines
from on_ranks import gather, on_ranks, place
from overlap_models import pending
from pipe_sgd_race import DEFAULT_BYTES, race
from problem import OPTIMIZERS, Loss, Weights, loss_of, make_model, train, weights_of
from serial import make_workers
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.measuring import step_times
from hvd_pipe.planning import choice
from hvd_pipe.planning.choice import OwnTimes, predict
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.torch import auto_choice, overlap_start
from hvd_pipe.torch.strategies.forward_overlap import ForwardOverlapEngine

STEPS = 4  # measured
SWITCH = 3 + STEPS  # the step after which the choice is made
LONG = SWITCH + 30  # long enough for the report of what was reached
FORWARD = "merged-gradient:overlap=forward"
EXACT = f"merged-gradient/{FORWARD}"
ALL_BUT_COCOD = f"{EXACT}/pipe-sgd"
TRIALS = overlap_start.TRIALS  # of plans without the barrier
TRIAL = overlap_start.SETTLE_STEPS + overlap_start.TIMED_STEPS + 1  # steps; the last one waits
DEFERS = SWITCH + overlap_start.WATCH_STEPS  # the first step that defers its update
TRIED = DEFERS + TRIALS * TRIAL  # the first with the plan that stays
momentum = OPTIMIZERS["momentum"]
pytestmark = on_ranks(2, init=hvd.init)


def wrap(
    model: nn.Module, allow: str, make_optimizer: Callable[..., Any] = momentum, **arguments: Any
) -> Any:
    return hvd.DistributedOptimizer(
        make_optimizer(model),
        model.named_parameters(),
        **{"strategy": f"auto:allow={allow},steps={STEPS}", **arguments},
    )


def chosen_of(optimizer: Any) -> Any:
    return optimizer.state_dict()["hvd_pipe"].get("chosen")


def slow(model: nn.Module, rank: int | None) -> None:
    """One rank computes for longer than the others."""
    if hvd.rank() == rank:
        for p in model.parameters():
            p.register_hook(lambda _: time.sleep(0.002))


def serial(steps: int, optimizer: str = "momentum") -> Weights:
    """Pipe-SGD from the switch on; a drain at the end."""
    strategy = f"pipe-sgd:warmup_steps={SWITCH}"
    workers = make_workers(strategy, hvd.size(), make_model, OPTIMIZERS[optimizer])
    return workers.train(steps, drains={steps - 1})[hvd.rank()]


def assert_equal_on_ranks(model: nn.Module) -> None:
    first, *others = gather(weights_of(model))
    for other in others:
        assert np.array_equal(first, other)


@pytest.fixture
def heard() -> Iterator[Lines]:
    lines = Lines()
    yield lines
    lines.taken()


@pytest.mark.parametrize("slow_rank", [None, 1])
def test_by_default_it_is_merged_gradient_bit_for_bit(slow_rank: int | None) -> None:
    runs = []
    for strategy in ("merged-gradient", "auto"):
        model = make_model(torch.float32)
        optimizer = wrap(model, "", strategy=strategy)
        slow(model, slow_rank)
        runs.append(train(model, optimizer, hvd.rank()))
    assert np.array_equal(*runs)
    assert chosen_of(optimizer) == "merged-gradient"


@pytest.mark.parametrize(
    ("optimizer", "slow_rank", "arguments", "scale"),
    [
        ("momentum", None, {}, None),
        ("adam", 0, {}, None),
        ("momentum", None, {"groups": 2}, None),
        ("momentum", None, {}, 8.0),
    ],
    ids=["momentum", "adam, a slow rank", "groups", "a loss scale"],
)
def test_from_the_switch_on_it_is_pipe_sgd(
    optimizer: str, slow_rank: int | None, arguments: dict[str, Any], scale: float | None
) -> None:
    """Each gradient is applied once: the last one by the ``synchronize()`` at the end."""
    model = make_model()
    wrapped = wrap(model, "pipe-sgd", OPTIMIZERS[optimizer], **arguments)
    slow(model, slow_rank)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    weights = train(model, wrapped, hvd.rank(), steps=LONG, drains=[LONG - 1], scaler=scaler)
    np.testing.assert_allclose(weights, serial(LONG, optimizer), rtol=0, atol=1e-12)
    assert chosen_of(wrapped) == "pipe-sgd"


def test_the_residual_of_the_synchronous_steps_goes_along() -> None:
    runs = []
    for strategy in (f"pipe-sgd:warmup_steps={SWITCH}", f"auto:allow=pipe-sgd,steps={STEPS}"):
        model, codec = make_model(torch.float32), hvd.Int8(error_feedback=True)
        wrapped = wrap(model, "", strategy=strategy, compression=codec)
        runs.append(train(model, wrapped, hvd.rank(), steps=20, drains=[19]))
    np.testing.assert_allclose(*runs, rtol=0, atol=1e-12)
    assert chosen_of(wrapped) == "pipe-sgd"


def test_pipe_sgd_that_was_chosen_tries_its_plans(
    heard: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slowest rank's steps count; what was reached is said of the plan that stays.

    Larger buckets are predicted to be faster, and each rank by itself would keep others.
    """
    model, steps = make_model(), SWITCH + 60
    plans: list[hvd.Plan] = []
    said_after: list[int] = []

    def slow_messages(method: Any, profile: Any, *_: object) -> choice.Prediction:
        return predict(method, profile, CommModel.linear(10.0, 0.0))

    def training(optimizer: Any) -> Weights:
        def step() -> None:
            before = len(heard.lines)
            optimizer.step()
            plans.append(optimizer.plan)
            if any(line.startswith("auto") for line in heard.lines[before:]):
                said_after.append(len(plans))

        watched = mock.Mock(step=step, zero_grad=optimizer.zero_grad)
        watched.synchronize = optimizer.synchronize
        return train(model, watched, hvd.rank(), steps=steps, drains=[steps - 1])

    clock = race(1)
    monkeypatch.setattr(choice, "DEFAULT_BUCKET_BYTES", DEFAULT_BYTES)
    monkeypatch.setattr(auto_choice, "predict", slow_messages)
    strategy = f"auto:allow=pipe-sgd,steps={STEPS}"
    weights = clock.run(training, model, momentum(model), strategy=strategy)
    np.testing.assert_allclose(weights, serial(steps), rtol=0, atol=1e-12)
    assert chosen_of(clock.optimizer) == "pipe-sgd"
    assert plans[-1].tried == ((6, 4.0), (4, 3.5), (1, 3.0))
    assert len(plans[-1].buckets) == 1
    over = next(i for i, plan in enumerate(plans, 1) if len(plan.tried) == 3)
    if hvd.rank() == 0:
        chose, reached = said_after
        assert chose == SWITCH < over < reached


def test_rank_0s_choice_is_broadcast() -> None:
    """Rank 0 alone has the checkpoint; the others get the choice from it."""
    model = make_model()
    optimizer = wrap(model, "pipe-sgd")
    train(model, optimizer, hvd.rank(), steps=SWITCH + 2)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model = make_model()
    optimizer = wrap(model, "merged-gradient/pipe-sgd")
    if hvd.rank() == 0:
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert chosen_of(optimizer) == "pipe-sgd"
    train(model, optimizer, hvd.rank(), steps=5)
    optimizer.synchronize()
    assert_equal_on_ranks(model)


@pytest.mark.parametrize("slow_rank", [None, 1])
def test_ranks_make_the_same_choice(slow_rank: int | None, heard: Lines) -> None:
    """All methods are allowed: whatever is chosen, ranks agree on it and end equal."""
    model = make_model()
    optimizer = wrap(model, "merged-gradient/pipe-sgd/cocod", OPTIMIZERS["adam"])
    slow(model, slow_rank)
    train(model, optimizer, hvd.rank(), steps=SWITCH + 200)
    optimizer.synchronize()
    chosen, lines = chosen_of(optimizer), heard.taken()
    assert gather(chosen) == [chosen] * 2
    assert chosen is not None
    assert_equal_on_ranks(model)
    if hvd.rank() == 1:
        assert lines == []  # the first rank speaks
        return
    assert re.fullmatch(rf"auto: chose {chosen}: predicted [\d.]+ ms a step \(.*\)", lines[0])
    assert len(lines) == 2 or chosen.startswith("cocod")  # a round may be long here
    for line in lines[1:]:
        assert re.fullmatch(rf"auto: {chosen} reached .* ms a step \(predicted .* ms\)", line)


@pytest.mark.parametrize("at", [5, SWITCH + 3], ids=["before", "after"])
def test_parameters_may_join(at: int) -> None:
    """They train from then on."""
    model = make_model()
    late, first = model[0], model[2:]
    optimizer = wrap(first, "pipe-sgd")
    for step in range(30):
        if step == at:
            optimizer.add_param_group({"params": list(late.parameters())})
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        if step < at:
            late.zero_grad()
    optimizer.synchronize()
    assert_equal_on_ranks(model)
    assert chosen_of(optimizer) == "pipe-sgd"


def lbfgs(model: nn.Module) -> Any:
    return torch.optim.LBFGS(model.parameters())


@pytest.mark.parametrize(
    ("allow", "make_optimizer", "op", "reason"),
    [
        ("cocod", momentum, hvd.Sum, "op=hvd.Sum"),
        ("pipe-sgd", momentum, hvd.Adasum, "op=hvd.Adasum"),
        (FORWARD, lbfgs, hvd.Average, "LBFGS"),
    ],
)
def test_nothing_is_left_to_choose_from(
    allow: str, make_optimizer: Any, op: Any, reason: str
) -> None:
    message = f"leaves nothing to choose from. With {allow!r}: {reason}"
    with pytest.raises(ValueError, match=message):
        wrap(make_model(), allow, make_optimizer, op=op)


def test_what_was_not_measured_changes_nothing(heard: Lines) -> None:
    """With all times 0 stale methods looked twice as fast, and auto changed the mathematics.

    Every measured step overflows. A fused optimizer has its ``step()`` called all the same.
    """
    model = make_model()
    allow = "merged-gradient/pipe-sgd/cocod"
    optimizer = wrap(model, allow, lambda m: torch.optim.SGD(m.parameters(), lr=0.05, fused=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, backoff_factor=0.999)

    def infinite(*of: Any) -> torch.Tensor:
        return loss_of(*of) * float("inf")

    train(model, optimizer, hvd.rank(), loss=infinite, steps=SWITCH + 2, scaler=scaler)
    assert chosen_of(optimizer) == "merged-gradient"
    said = "auto: no step could be measured: goes on with merged-gradient"
    assert hvd.rank() == 1 or said in heard.lines


@pytest.mark.parametrize(
    "changes",
    [{"workers": 3}, {"version": 9, "chosen": 5, "workers": None, "counters": None}],
    ids=["workers", "version"],
)
def test_a_choice_of_another_job_or_version_is_not_taken(
    changes: dict[str, Any], heard: Lines
) -> None:
    model = make_model()
    optimizer = wrap(model, "pipe-sgd")
    train(model, optimizer, hvd.rank(), steps=SWITCH + 3)
    saved = optimizer.state_dict()
    optimizer.synchronize()
    saved["hvd_pipe"] = {**saved["hvd_pipe"], **changes}
    again = wrap(model, "pipe-sgd")
    heard.lines.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that what is in flight is lost
        again.load_state_dict(saved)
    assert chosen_of(again) is None
    train(model, again, hvd.rank(), steps=SWITCH)
    again.synchronize()
    assert chosen_of(again) == "pipe-sgd"
    warned = "auto: pipe-sgd was chosen for 3 workers: measures again"
    assert hvd.rank() == 1 or (warned in heard.lines) == (changes == {"workers": 3})


@pytest.mark.parametrize(
    ("where", "rank", "error", "told"),
    [
        (
            "hvd_pipe.torch.auto_choice.predict",
            0,
            ValueError("no choice"),
            "rank 0, which decides for all, failed: ValueError: no choice",
        ),
        (
            "hvd_pipe.runtime.gradient_index.plan_dtype_groups",
            0,
            ValueError("no plan"),
            "rank 0, which decides for all, failed: ValueError: no plan",
        ),
        (
            "torch.zeros",
            1,
            torch.OutOfMemoryError("too little"),
            "rank 1 could not allocate .*measure smaller messages",
        ),
    ],
    ids=["choose", "plan", "allocate"],
)
def test_one_rank_alone_fails_as_all_measure_plan_and_choose(
    where: str, rank: int, error: Exception, told: str
) -> None:
    """Every rank is told."""
    model = make_model()
    optimizer = wrap(model, "merged-gradient/pipe-sgd")
    train(model, optimizer, hvd.rank(), steps=SWITCH - 1)
    if hvd.rank() == rank:
        with mock.patch(where, side_effect=error), pytest.raises(type(error), match=str(error)):
            train(model, optimizer, hvd.rank(), steps=1)
    else:
        with pytest.raises(HvdPipeError, match=f"(?s){told}"):
            train(model, optimizer, hvd.rank(), steps=1)


# overlap=forward among the choices.


@contextmanager
def forced_times(all_reduce_s: float = 4.0) -> Iterator[None]:
    """Let the last rank compute for 4 s and the others for 0.04 s, and messages take so long.

    With the last rank's times, overlap=forward is faster than plain merged-gradient by far, and
    pipe-sgd hardly faster: the small gradients are ready last. With the first rank's own times, a
    step takes as long as its messages under any method.
    """
    compute = 4.0 if hvd.rank() == hvd.size() - 1 else 0.04
    close = step_times.JobTimes.close

    def closed(times: step_times.JobTimes) -> OwnTimes:
        close(times)
        last = max(1, times.count - 1)
        ready = [compute / 2 * index / last for index in range(times.count)]
        return OwnTimes(compute / 2, ready, 0.0)

    def predicted(method: Any, profile: Any, comm: CommModel, codec: Any) -> Any:
        total = float(profile.gradient_bytes().sum())
        return predict(method, profile, CommModel.linear(0.0, all_reduce_s / total), codec)

    with (
        mock.patch.object(step_times.JobTimes, "close", closed),
        mock.patch.object(auto_choice, "predict", predicted),
    ):
        yield


def looped(
    model: nn.Module,
    optimizer: Any,
    steps: range,
    loss: Loss = loss_of,
    after: Callable[[Any, Any, int], object] = lambda model, optimizer, step: None,
) -> tuple[list[Weights], list[int]]:
    """A loop that seldom looks at the weights; also the steps that deferred updates."""
    weights, deferred = [], []
    for step in steps:
        optimizer.zero_grad()
        loss(model, hvd.rank(), step).backward()
        optimizer.step()
        engine = getattr(optimizer, "_hvd_pipe", None)
        if isinstance(engine, ForwardOverlapEngine) and pending(optimizer):
            deferred.append(step)
        after(model, optimizer, step)
        if step % 10 == 9:
            weights.append(weights_of(model))
    return [*weights, weights_of(model)], deferred


def assert_same(found: list[Weights], expected: list[Weights]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one, other)


class Forward(NamedTuple):
    """A run whose choice may be overlap=forward; the steps that deferred, what was said."""

    chosen: str | None
    deferred: list[int]
    lines: list[str]


def into_forward(
    heard: Lines,
    make: Callable[[], nn.Module] = make_model,
    make_optimizer: Callable[[nn.Module], Any] = momentum,
    allow: str = ALL_BUT_COCOD,
    arguments: dict[str, Any] | None = None,
    against: str | None = None,
    **script: Any,
) -> Forward:
    """Train by auto, and compare with stock Horovod or another strategy in every bit."""
    runs = []
    other = (stock, {}) if against is None else (hvd, {"strategy": against})
    for module, given in ((hvd, {"strategy": f"auto:allow={allow},steps={STEPS}"}), other):
        torch.manual_seed(1)
        model = make()
        optimizer: Any = module.DistributedOptimizer(
            make_optimizer(model), model.named_parameters(), **given, **(arguments or {})
        )
        with forced_times():
            runs.append(looped(model, optimizer, range(TRIED + 30), **script))
        if len(runs) == 1:
            chosen = chosen_of(optimizer)
    (weights, deferred), (expected, _) = runs
    assert_same(weights, expected)
    return Forward(chosen, deferred, heard.taken())


@pytest.mark.parametrize(
    "script",
    [
        {},
        {"make_optimizer": OPTIMIZERS["adamw-groups"]},
        {"allow": EXACT, "arguments": {"groups": 3}},
        {"allow": FORWARD},
    ],
    ids=["momentum", "adamw in groups", "groups", "alone"],
)
def test_all_ranks_choose_overlap_forward_by_the_slowest_ranks_times(
    script: dict[str, Any], heard: Lines
) -> None:
    run = into_forward(heard, **script)
    assert run.chosen == FORWARD
    # Uses are watched for plans, and groups are given.
    assert run.deferred[0] == (SWITCH if "arguments" in script else DEFERS)
    assert set(range(TRIED, TRIED + 30)) <= set(run.deferred)
    if hvd.rank() == 1:
        assert run.lines == []
        return
    said = rf"auto: chose {FORWARD}: predicted [\d.]+ ms a step( \(.*\))?"
    assert re.fullmatch(said, run.lines[0])
    assert ("pipe-sgd" in run.lines[0]) == ("allow" not in script)
    assert run.lines[1].startswith(f"auto: {FORWARD} reached")


def test_overlap_forward_is_left_out_where_one_rank_would_not_defer(heard: Lines) -> None:
    model = make_model()
    optimizer = wrap(model, EXACT)
    why = "of this test" if hvd.rank() == 1 else None
    with forced_times(), mock.patch.object(auto_choice, "refusal", return_value=why):
        _, deferred = looped(model, optimizer, range(SWITCH + 10))
    assert chosen_of(optimizer) == "merged-gradient"
    assert deferred == []
    lines = heard.taken()
    if hvd.rank() == 1:
        assert lines == [f"auto: {FORWARD} is left out: of this test"]
    else:
        assert re.fullmatch(r"auto: chose merged-gradient: predicted [\d.]+ ms a step", lines[0])


@pytest.mark.parametrize(
    ("first", "second"),
    [(FORWARD, "pipe-sgd"), (FORWARD, "merged-gradient"), ("pipe-sgd", FORWARD)],
)
def test_a_state_that_has_chosen_otherwise_is_followed(
    first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for allow in (first, second):

        def choose(predictions: Any, allow: str = allow) -> Any:
            return next(p for p in predictions if auto_choice.kind_of(p.method) == allow)

        monkeypatch.setattr(auto_choice, "choose", choose)
        model = make_model()
        optimizer = wrap(model, ALL_BUT_COCOD)
        with forced_times():
            looped(model, optimizer, range(TRIED + 5))
        runs.append((model, optimizer))
    (model, optimizer), (other_model, other) = runs
    states = copy.deepcopy((other_model.state_dict(), other.state_dict()))
    expected, _ = looped(other_model, other, range(100, 120))
    other.synchronize()
    optimizer.synchronize()
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    weights, _ = looped(model, optimizer, range(100, 120))
    assert chosen_of(optimizer) == second
    assert_same(weights, expected)
    optimizer.synchronize()


@pytest.mark.parametrize(
    ("saved", "allow", "strategy", "steps", "chosen"),
    [
        (SWITCH + 3, "pipe-sgd", "auto:allow=merged-gradient/pipe-sgd", 20, "pipe-sgd"),
        (SWITCH + 3, "pipe-sgd", "pipe-sgd", 20, None),
        (SWITCH + 3, "pipe-sgd", None, 20, "pipe-sgd"),
        # It is still to choose; the unbroken run is Pipe-SGD from the switch on.
        (4, "pipe-sgd", "auto:steps=30", SWITCH - 4, None),
        (TRIED + 5, ALL_BUT_COCOD, f"auto:allow={ALL_BUT_COCOD},steps={STEPS}", 50, FORWARD),
        (TRIED + 5, ALL_BUT_COCOD, None, 50, FORWARD),
    ],
    ids=["resumed", "as pipe-sgd", "copied", "before the choice", "forward", "forward, copied"],
)
def test_a_resumed_run_goes_on_with_the_choice_and_its_plan(
    saved: int, allow: str, strategy: str | None, steps: int, chosen: str | None
) -> None:
    """Without a strategy, a copy goes on in place of one that loads a file."""
    model, file = make_model(), io.BytesIO()
    optimizer = wrap(model, allow)
    with forced_times():
        looped(model, optimizer, range(saved))
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        plan = optimizer.plan
        if strategy is None:
            other_model, other = copy.deepcopy((model, optimizer))
        else:
            file.seek(0)
            states = torch.load(file)
            other_model = make_model()
            other = wrap(other_model, "", strategy=strategy)
            other_model.load_state_dict(states[0])
            other.load_state_dict(states[1])
        later = range(saved, saved + steps)
        expected, _ = looped(model, optimizer, later)
        weights, deferred = looped(other_model, other, later)
    assert_same(weights, expected)
    assert chosen_of(other) == chosen
    if chosen == FORWARD:
        assert plan.order is not None
        assert (other.plan.buckets, other.plan.order) == (plan.buckets, plan.order)
        # Not each: what has arrived by then is updated in step().
        assert len({*deferred} - {saved}) > len(later) // 2


def test_overlap_forward_that_is_not_allowed_any_more_is_measured_again() -> None:
    """A choice and its plan are not taken where it is not allowed any more."""
    model = make_model()
    with forced_times():
        optimizer = wrap(model, EXACT)
        looped(model, optimizer, range(TRIED))
        assert chosen_of(optimizer) == FORWARD
        again = wrap(model, "merged-gradient")
        again.load_state_dict(optimizer.state_dict())
        assert chosen_of(again) is None
        looped(model, again, range(SWITCH))
    assert again.plan.order is None
    assert chosen_of(again) == "merged-gradient"


@pytest.mark.parametrize(
    "before",
    [SWITCH - 1, SWITCH, SWITCH + 1, DEFERS + 6],
    ids=["before", "at the choice", "after", "in a trial"],
)
def test_ranks_may_join_while_overlap_forward_begins(before: int) -> None:
    """Rank 0 has fewer steps, and joins before the choice, or as overlap=forward begins."""
    model = make_model()
    optimizer = wrap(model, EXACT)
    with forced_times():
        looped(model, optimizer, range(before + 2 * (hvd.rank() == 1)))
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), 0)
        _, deferred = looped(model, optimizer, range(TRIED + 10))
    optimizer.synchronize()
    assert len(deferred) > 5
    assert chosen_of(optimizer) == FORWARD
    first, second = gather(optimizer.plan.buckets)
    assert first == second


# A running job's profile.


def shared_path(name: str) -> Path:
    return place()[0] / name


def test_a_running_job_writes_its_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """``HVD_PIPE_PROFILE`` changes nothing that is computed."""
    runs, path = [], shared_path("profile.json")
    for value in (str(path), ""):
        monkeypatch.setenv("HVD_PIPE_PROFILE", value)
        model = make_model()
        optimizer = wrap(model, "", strategy="pipe-sgd")
        runs.append(train(model, optimizer, hvd.rank(), steps=20))
        optimizer.synchronize()
    assert np.array_equal(*runs)
    profile = ModelProfile.load(path)
    names = {f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")}
    assert set(profile.gradient_order()) == names
    assert profile.gradient_bytes().sum() == 8 * (6 * 5 + 5 + 5 * 4 + 4 + 4 * 3 + 3)
    assert profile.gradient_order()[-1].startswith("0.")
    assert profile.forward_s > 0 < profile.update_s


# In launches of their own: what ends Horovod, or leaves ranks apart.


@on_ranks(2, init=lambda: importlib.import_module("mpi4py.MPI") and hvd.init())
def test_a_choice_outlasts_a_shutdown(heard: Lines) -> None:
    """Horovod ends and begins again (mpi4py finalises MPI); nothing is measured or tried anew."""
    model = make_model()
    with forced_times():
        optimizer = wrap(model, EXACT)
        looped(model, optimizer, range(TRIED + 5))
    plan = optimizer.plan
    hvd.shutdown()
    hvd.init()
    weights, deferred = looped(model, optimizer, range(TRIED + 5, TRIED + 35))
    assert (optimizer.plan.buckets, optimizer.plan.order) == (plan.buckets, plan.order)
    assert chosen_of(optimizer) == FORWARD
    assert deferred == list(range(TRIED + 5 + 1, TRIED + 35))
    lines = heard.taken()
    goes_on = f"auto: goes on with {FORWARD}, as chosen before"
    assert hvd.rank() == 1 or goes_on in lines
    assert not any("reached" in line for line in lines)
    model = make_model()
    plain: Any = stock.DistributedOptimizer(momentum(model), model.named_parameters())
    looped(model, plain, range(TRIED + 5))
    assert_same(weights, looped(model, plain, range(TRIED + 5, TRIED + 35))[0])


@on_ranks(1, init=hvd.init)
def test_one_worker_has_nothing_to_choose() -> None:
    """And nothing to wait for."""
    model = make_model()
    optimizer = wrap(model, "merged-gradient/pipe-sgd")
    train(model, optimizer, 0, steps=LONG)
    assert chosen_of(optimizer) is None


def test_a_newcomer_that_cannot_travel_from_one_rank_is_refused_on_every_rank() -> None:
    """The last of its launch: ranks have gone apart."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters())
    train(model, optimizer, hvd.rank(), steps=2)
    dtype = torch.complex64 if hvd.rank() == 1 else torch.float32
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, dtype=dtype))]})
    said = "rank 1 was given something wrong.*Horovod cannot all-reduce"
    with pytest.raises(RanksDisagreeError, match=f"(?s){said}"):
        train(model, optimizer, hvd.rank(), steps=1)
