"""`overlap="forward"`: the bits of stock Horovod, though weights are updated as they are needed.

At two ranks a sum has one rounding whatever the order of its terms, so equality is exact. Losses
are recorded in every step: they tell whether each layer had its new weights in time.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import horovod.torch as stock
import numpy as np
import pytest
import torch
from logged import Lines
from on_ranks import gather, on_ranks
from overlap_models import (
    ODD,
    Attention,
    Clipping,
    Recurrent,
    Skipping,
    Sparse,
    Tied,
    numbered_loss,
    pending,
    read_all,
    sequential,
)
from problem import OPTIMIZERS, Loss, Weights, loss_of, weights_of
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning import tuner
from hvd_pipe.torch import overlap_start
from hvd_pipe.torch.messages.ordered import OrderedMessage
from hvd_pipe.torch.strategies import merged_gradient

PLANNED = "merged-gradient:overlap=forward"
ALONE = "merged-gradient:plan=wfbp,overlap=forward"
BARRIER = "merged-gradient:plan=wfbp"

LONG = 40  # with all plans that are tried, first with the barrier
SHORT = 16
BEGUN = 6  # updates are deferred by then where the plan is given
RACED = 19  # and by then where merged-gradient's plans are tried before
EVERY = 7  # steps between two records of the weights

Make = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], Optimizer]

momentum = OPTIMIZERS["momentum"]
pytestmark = on_ranks(2, init=hvd.init)


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan is timed for two steps; `test_auto` has trials of the true length."""
    monkeypatch.setattr(merged_gradient, "TRIAL_STEPS", 2)
    monkeypatch.setattr(overlap_start, "SETTLE_STEPS", 1)
    monkeypatch.setattr(overlap_start, "TIMED_STEPS", 2)


class Run(NamedTuple):
    """What a rank has seen."""

    losses: list[float]
    weights: list[Weights]
    deferred: list[int]
    plan: hvd.Plan | None


def scripted(
    strategy: str | None,
    make: Make = sequential,
    make_optimizer: MakeOptimizer = momentum,
    loss: Loss = loss_of,
    steps: int = SHORT,
    before: Callable[[Any, Any, int], object] = lambda model, optimizer, step: None,
    after: Callable[[Any, Any, int], object] = lambda model, optimizer, step: None,
    schedule: bool = False,
    backward: Callable[[int], bool] = lambda step: True,
    options: Callable[[ModuleType], dict[str, Any]] = lambda module: {},
    passes: int = 1,
) -> Run:
    """Train; by stock Horovod where no strategy is given."""
    module: ModuleType = stock if strategy is None else hvd
    given = options(module) | ({} if strategy is None else {"strategy": strategy})
    if passes > 1:
        given["backward_passes_per_step"] = passes
    model, optimizer = wrapped(make, make_optimizer, module, **given)
    scheduler = StepLR(optimizer, 1, 0.9) if schedule else None
    torch.manual_seed(50 + module.rank())
    losses, weights, deferred = [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes * backward(step)):
            loss_now = loss(model, module.rank(), passes * step + number)
            losses.append(loss_now.item())
            loss_now.backward()
        before(model, optimizer, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if pending(optimizer):
            deferred.append(step)
        after(model, optimizer, step)
        if step % EVERY == EVERY - 1:
            weights.append(weights_of(model))
    weights.append(weights_of(model))
    return Run(losses, weights, deferred, getattr(optimizer, "plan", None))


def wrapped(
    make: Make = sequential,
    make_optimizer: MakeOptimizer = momentum,
    module: ModuleType = hvd,
    **options: Any,
) -> tuple[Any, Any]:
    """A model, and its optimizer that averages gradients."""
    torch.manual_seed(1)
    model = make()
    plain = make_optimizer(model)
    return model, module.DistributedOptimizer(plain, model.named_parameters(), **options)


def go_on(model: nn.Module, optimizer: Any, steps: range) -> int:
    """Train without a look at the weights; return how many steps deferred their update."""
    deferred = 0
    for step in steps:
        model.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        deferred += bool(pending(optimizer))
    return deferred


def raw(model: nn.Module) -> Weights:
    """The weights as they are, which waits for no update."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()


def assert_same(one: Run, other: Run) -> None:
    pairs = zip(one.losses, other.losses, strict=True)
    different = [step for step, (a, b) in enumerate(pairs) if a != b]
    assert not different, f"losses differ from step {different[0]} on"
    for a, b in zip(one.weights, other.weights, strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    assert not np.array_equal(one.weights[0], one.weights[-1])  # it did learn something


def assert_deferred(run: Run, steps: int) -> None:
    """All steps but the first ones, and those before another plan, leave messages pending."""
    assert run.deferred, "no step has deferred anything: this shows nothing"
    assert run.plan is not None
    assert run.plan.order
    begun = RACED if steps == LONG else BEGUN
    assert run.deferred[0] <= begun
    assert run.deferred[-1] == steps - 1
    assert len(run.deferred) >= steps - begun - 5


@pytest.fixture
def slow_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message is there before it is waited for: a gate updates what it must, and no more."""
    monkeypatch.setattr(OrderedMessage, "arrived", property(lambda message: False))


def decide(monkeypatch: pytest.MonkeyPatch, forward: bool) -> None:
    """Let the barrier lose or win the race of plans, whatever steps take."""
    now = itertools.count(step=0 if forward else 1000)
    monkeypatch.setattr(overlap_start, "time", mock.Mock(perf_counter=lambda: next(now)))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def compiled() -> nn.Module:
    model: nn.Module = torch.compile(sequential(), backend="eager")  # type: ignore[assignment]
    return model


MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "attention": {"make": Attention},
    "tied": {"make": Tied},
    "skipping": {"make": Skipping, "loss": numbered_loss},
    "recurrent": {"make": Recurrent},
    "batch norm": {"make": normed},
    "compiled": {"make": compiled},
    "weights that are read": {"after": read_all},
    "fp16": {"make": Tied, "options": lambda module: {"compression": module.Compression.fp16}},
    "sum, two passes": {
        "make": Tied,
        "options": lambda module: {"op": module.Sum},
        "passes": 2,
    },
    "groups and a scheduler": {
        "make": Attention,
        "make_optimizer": OPTIMIZERS["adamw-groups"],
        "schedule": True,
    },
}
models = pytest.mark.parametrize("script", MODELS.values(), ids=MODELS)


@models
def test_equal_to_stock_horovod_with_planned_buckets(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decide(monkeypatch, forward=True)
    ours = scripted(PLANNED, steps=LONG, **script)
    assert_same(scripted(None, steps=LONG, **script), ours)
    assert_deferred(ours, LONG)


@models
@pytest.mark.usefixtures("slow_network")
def test_equal_to_stock_horovod_on_a_slow_network(script: dict[str, Any]) -> None:
    ours = scripted(ALONE, **script)
    assert_same(scripted(None, **script), ours)
    assert_deferred(ours, SHORT)


# Where updates stay in step().

STAY = "overlap='forward': updates stay in step()"


def clip(model: nn.Module, optimizer: Any, step: int) -> None:
    """As scripts do that clip; every third step."""
    if step % 3 == 1:
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clip_always(model: nn.Module, optimizer: Any, step: int) -> None:
    clip(model, optimizer, 1)


def hook_on_one(_: nn.Module, optimizer: Any, step: int) -> None:
    if (hvd.rank(), step) == (1, ODD):
        optimizer.register_step_pre_hook(lambda *_: None)


# Ranks that differ, and updates that stay in step().


def slow_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    time.sleep(0.02 * (rank == step % 2))
    return loss_of(model, rank, step)


def save_on_one(model: nn.Module, optimizer: Any, step: int) -> None:
    if hvd.rank() == 0 and step > BEGUN:
        assert model.state_dict()
        assert optimizer.state_dict()


def freeze(model: nn.Module, _: Any, step: int) -> None:
    next(model.parameters()).requires_grad_(step not in (2, 3, 4, 5))


SCRIPTS: dict[str, tuple[dict[str, Any], list[str], Callable[[int], bool] | None]] = {
    # Why updates stay in step(), on rank 1 where it says so, and which steps defer; None: all.
    "one is slower": ({"loss": slow_loss}, [], None),
    "no gradient": ({"backward": lambda step: (hvd.rank(), step) != (1, ODD)}, [], None),
    "one saves": ({"after": save_on_one}, [], None),
    "frozen for some steps": ({"before": freeze}, [], None),
    "clipping now and then": ({"before": clip}, [], lambda step: step % 3 != 1),
    "clipping": ({"before": clip_always}, [], lambda step: False),
    "one has a hook": (
        {"before": hook_on_one},
        ["while a hook is registered on the optimizer, or for all optimizers (said once)"],
        lambda step: hvd.rank() == 0 or step < ODD,
    ),
    "sparse": (
        {"make": Sparse, "make_optimizer": lambda m: SGD(m.parameters(), 0.1)},
        ["is sparse"],
        lambda step: False,
    ),
    "not separable": (
        {"make_optimizer": lambda m: Clipping(m.parameters(), lr=0.1)},
        ["`optimizer.updates_each_parameter = True`"],
        lambda step: False,
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_training_is_right_where_updates_stay_in_step_or_ranks_differ(name: str) -> None:
    """A warning names the reason, once."""
    script, reasons, defers = SCRIPTS[name]
    heard = Lines()
    ours = scripted(ALONE, **script)
    heard.taken()
    said = [line for line in heard.lines if line.startswith(STAY)]
    assert_same(scripted(BARRIER, **script), ours)
    first, second = gather(ours.weights)
    assert np.array_equal(first, second)
    if defers is None:
        assert_deferred(ours, SHORT)
    else:
        wanted = {step for step in range(BEGUN, SHORT) if defers(step)}
        assert wanted == {step for step in ours.deferred if step >= BEGUN}
    if name == "one has a hook" and hvd.rank() == 0:
        reasons = []
    assert len(said) == len(reasons)
    for line, reason in zip(said, reasons, strict=True):
        assert reason in line


def test_a_join_while_plans_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs of unlike lengths, the first of which ends while plans are tried."""
    decide(monkeypatch, forward=True)
    model, optimizer = wrapped(strategy=PLANNED)
    deferred = 0
    for epoch in range(6):
        # The last one is long: how many plans are tried before, and so when, hangs on real times.
        steps = 9 + 2 * (hvd.rank() == 1) + 48 * (epoch == 5)
        deferred += go_on(model, optimizer, range(steps))
        hvd.join()
    assert deferred > 24


def test_the_barrier_comes_back_where_its_steps_were_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its plan tells what was tried, and a resumed run tries nothing again."""
    decide(monkeypatch, forward=False)
    kept: list[Any] = []
    ours = scripted(PLANNED, steps=LONG, after=lambda *each: kept.__setitem__(slice(None), each))
    assert_same(scripted(None, steps=LONG), ours)
    assert ours.deferred[0] <= RACED
    assert 10 <= len(ours.deferred) <= 16  # four plans
    assert ours.deferred[-1] < LONG - 1
    plan = ours.plan
    assert plan is not None
    assert plan.order is None
    assert len(plan.tried_forward) == 4
    assert 1 <= len(plan.tried) <= 4
    assert "behind the next forward, a step with" in str(plan)
    model, before, _ = kept
    optimizer = hvd.DistributedOptimizer(
        momentum(model), model.named_parameters(), strategy=PLANNED
    )
    optimizer.load_state_dict(before.state_dict())
    assert not go_on(model, optimizer, range(LONG))
    assert optimizer.plan == plan


# Where nobody has asked for it.

DEFAULT = "merged-gradient"


@pytest.fixture
def by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group carries the messages, as it does by default over Gloo."""
    monkeypatch.setenv("HVD_PIPE_CARRIER", "torch")


default = pytest.mark.usefixtures("by_group")


def test_the_default_defers_nothing_where_horovod_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_PIPE_CARRIER", "horovod")
    decide(monkeypatch, forward=True)
    model, optimizer = wrapped()
    assert not go_on(model, optimizer, range(LONG))


@pytest.mark.parametrize("forward", [True, False])
@default
def test_the_default_keeps_what_is_faster(forward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its updates are stock Horovod's; a resumed run sends as before from its first step."""
    decide(monkeypatch, forward)
    kept: list[Any] = []
    ours = scripted(DEFAULT, steps=LONG, after=lambda *each: kept.__setitem__(slice(None), each))
    assert_same(scripted(None, steps=LONG), ours)
    assert ours.plan is not None
    assert len(ours.plan.tried_forward) == 4
    assert (ours.plan.order is not None, ours.deferred[-1] == LONG - 1) == (forward, forward)
    model, before, _ = kept
    optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters())
    optimizer.load_state_dict(before.state_dict())
    assert bool(go_on(model, optimizer, range(3))) is forward
    assert optimizer.plan == ours.plan
    optimizer.synchronize()


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "merged-gradient:overlap=backward"},
        {"strategy": "merged-gradient:bucket_bytes=512"},
        {"strategy": "merged-gradient:plan=wfbp"},
        {"groups": 2},
        {"strategy": "auto"},
    ],
    ids=str,
)
@default
def test_the_default_defers_nothing_where_something_else_was_asked_for(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decide(monkeypatch, forward=True)
    model, optimizer = wrapped(**options)
    assert not go_on(model, optimizer, range(LONG))


@default
def test_the_default_defers_nothing_where_no_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, forward=True)
    plan_of = tuner._with_prediction

    def hidden(*given: Any) -> hvd.Plan:
        return dataclasses.replace(plan_of(*given), exposed_s=0.0)

    monkeypatch.setattr(tuner, "_with_prediction", hidden)
    model, optimizer = wrapped()
    assert not go_on(model, optimizer, range(LONG))
    assert optimizer.plan.tried
    assert not optimizer.plan.tried_forward


def unknown(model: nn.Module) -> Optimizer:
    class Own(SGD):
        updates_each_parameter = False

    return Own(model.parameters(), 0.1)


def hooked_on_one(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), 0.1)
    if hvd.rank():
        optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize("make_optimizer", [unknown, hooked_on_one])
@default
def test_the_default_warns_of_nothing_that_nobody_asked_for(
    make_optimizer: MakeOptimizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    decide(monkeypatch, forward=True)
    model, optimizer = wrapped(make_optimizer=make_optimizer)
    with caplog.at_level(logging.WARNING, "hvd_pipe"):
        assert not go_on(model, optimizer, range(LONG))
    assert not caplog.records


def clip_each(model: nn.Module, optimizer: Any, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@default
def test_the_default_tries_nothing_where_gradients_are_read_before_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decide(monkeypatch, forward=True)
    ours = scripted(DEFAULT, steps=LONG, before=clip_each)
    assert not ours.deferred
    assert ours.plan is not None
    assert ours.plan.tried
    assert not ours.plan.tried_forward


@default
def test_a_hook_that_comes_later_is_no_warning_under_the_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decide(monkeypatch, forward=True)
    model, optimizer = wrapped()
    assert go_on(model, optimizer, range(LONG))
    optimizer.register_step_post_hook(lambda *_: None)
    with caplog.at_level(logging.INFO, "hvd_pipe"):
        assert not go_on(model, optimizer, range(3))
    said = [record.levelname for record in caplog.records if STAY in record.getMessage()]
    assert said == ["INFO"]


@pytest.mark.parametrize("when", ["watched", "tried", "kept"])
@default
def test_parameters_that_join_are_planned_anew(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, forward=True)
    for strategy in (DEFAULT, PLANNED):
        model, optimizer = wrapped(strategy=strategy)
        step = 0
        while type(optimizer._hvd_pipe).__name__ != "ForwardOverlapEngine":
            step += go_on(model, optimizer, range(step, step + 1)) + 1
        step = {"watched": 1, "tried": 6, "kept": LONG}[when]
        go_on(model, optimizer, range(step))
        assert bool(optimizer.plan.tried_forward) == (when == "kept")
        model.insert(0, nn.Linear(6, 6))
        optimizer.add_param_group({"params": list(model[0].parameters())})
        before = weights_of(model)
        go_on(model, optimizer, range(LONG + 5))
        assert len(optimizer.plan.names) == len(list(model.parameters()))
        assert len(optimizer.plan.tried_forward) == 4
        assert optimizer.plan.order is not None
        after = weights_of(model)
        assert not np.array_equal(before, after)
        assert np.array_equal(*gather(after))


@default
def test_joins_while_uses_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every epoch ends before as many steps as had been made when uses began to be watched."""
    decide(monkeypatch, forward=True)
    model, optimizer = wrapped()
    for epoch in range(24):
        go_on(model, optimizer, range(8 - 4 * (epoch > 12) + hvd.rank() * (epoch % 2)))
        hvd.join()
    go_on(model, optimizer, range(LONG))
    assert optimizer.plan.tried_forward


@pytest.mark.parametrize(
    ("is_asked", "step_s", "error_s", "stays"),
    [
        (True, 0.99, 0.0, True),
        (False, 0.99, 0.0, False),
        (False, 0.97, 0.0, True),
        (False, 0.97, 0.02, False),
    ],
)
def test_unasked_steps_without_the_barrier_must_be_faster_by_a_margin(
    is_asked: bool, step_s: float, error_s: float, stays: bool
) -> None:
    start = overlap_start.OverlapStart({}, is_given=False, is_asked=is_asked)
    start._barrier, start._raced = hvd.Plan((("w",),), "exact", tried=((1, 1.0),)), True
    plan = hvd.Plan((("w",),), "overlap", order=(0,))
    kept = start._fastest([tuner.Trial(plan, step_s, 0.0, error_s)])
    assert (kept.order is not None) == stays


@default
def test_unlike_epochs_that_are_shorter_than_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have seen unlike many steps of a plan at a join, and begin anew after it."""
    decide(monkeypatch, forward=True)
    model, optimizer = wrapped()
    while not optimizer._hvd_pipe_chooser.tries:
        go_on(model, optimizer, range(1))
    for _ in range(6):
        hvd.join()
        go_on(model, optimizer, range(2 + hvd.rank()))
    hvd.join()
    go_on(model, optimizer, range(LONG))
    assert len(optimizer.plan.tried_forward) == 4


@default
def test_a_plan_with_an_order_that_is_given_keeps_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    decide(monkeypatch, forward=True)
    plan = scripted(DEFAULT, steps=LONG).plan
    assert plan is not None
    plan.save(tmp_path / "plan.json")
    for given in (hvd.MergedGradient(plan=plan), f"merged-gradient:plan={tmp_path}/plan.json"):
        model, optimizer = wrapped(strategy=given)
        assert go_on(model, optimizer, range(5))
        assert (optimizer.plan.buckets, optimizer.plan.order) == (plan.buckets, plan.order)


@default
def test_a_state_with_an_order_means_nothing_to_the_barrier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decide(monkeypatch, forward=True)
    kept: list[Any] = []
    scripted(DEFAULT, steps=LONG, after=lambda *each: kept.__setitem__(slice(None), each))
    model, optimizer = wrapped(strategy="merged-gradient:overlap=backward")
    optimizer.load_state_dict(kept[1].state_dict())
    assert not go_on(model, optimizer, range(LONG))
    assert optimizer.plan.order is None
    assert optimizer.plan.tried


class Scripted(nn.Module):
    """Gives a weight to code in C++, which sees no new value before it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(_matmul(self.first.weight, x.T).T)  # type: ignore[no-any-return]


@torch.jit.script
def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@pytest.mark.parametrize("strategy", [DEFAULT, PLANNED])
@pytest.mark.usefixtures("slow_network")
@default
def test_weights_that_code_in_cpp_alone_reads_are_updated_in_the_step(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the default, all are; so a run that goes on from its state never meets NaN."""
    decide(monkeypatch, forward=True)
    script: dict[str, Any] = {"make": Scripted, "steps": LONG}
    ours = scripted(strategy, **script)
    assert_same(scripted(None, **script), ours)
    assert ours.plan is not None
    is_forward = strategy == PLANNED
    assert (LONG - 1 in ours.deferred, ours.plan.order is not None) == (is_forward, is_forward)


def test_ranks_with_unlike_times_keep_the_plan_of_the_slowest_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By itself, rank 0 would keep the first plan and rank 1 the third."""
    unit = 2.0**-30  # of whose multiples sums are exact
    by_rank = ((1, 3, 4, 5), (4, 3, 1, 2))
    model, optimizer = wrapped(strategy=PLANNED)
    tried: list[hvd.Plan] = []
    now = 0.0

    def perf_counter() -> float:
        nonlocal now
        if not tried or optimizer.plan is not tried[-1]:
            tried.append(optimizer.plan)
        now += unit * by_rank[hvd.rank()][len(tried) - 1]
        return now

    monkeypatch.setattr(overlap_start, "time", mock.Mock(perf_counter=perf_counter))
    go_on(model, optimizer, range(LONG))
    kept = optimizer.plan
    optimizer.synchronize()
    assert [seconds / unit for _, seconds in kept.tried_forward] == [4, 3, 4, 5]
    assert (kept.buckets, kept.order) == (tried[1].buckets, tried[1].order)
    assert (tried[0].buckets, tried[0].order) != (tried[1].buckets, tried[1].order)
    first, second = gather((tried, kept, weights_of(model)))
    assert first[:2] == second[:2]
    assert np.array_equal(first[2], second[2])


def test_a_state_of_any_phase_can_be_loaded_in_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a state says of its plan holds, whatever this run has tried or chosen."""

    def trained(optimizer: Any, model: nn.Module) -> dict[str, Any]:
        """The first state of each kind that a run has."""
        states: dict[str, Any] = {}
        for step in range(LONG):
            go_on(model, optimizer, range(step, step + 1))
            state = {} if step % 2 else optimizer.state_dict()  # which makes the updates
            plan = state.get("hvd_pipe", {}).get("counters", {}).get("plan")
            kind = "none" if plan is None else "ordered" if '"order"' in plan else "barrier"
            if state and kind not in states:
                states[kind] = copy.deepcopy(state)
        return states

    decide(monkeypatch, forward=False)
    model, optimizer = wrapped(strategy="merged-gradient:overlap=backward")
    barrier = trained(optimizer, model)["barrier"]
    model, optimizer = wrapped(strategy=PLANNED)
    trained(optimizer, model)
    back = copy.deepcopy(optimizer.state_dict())
    decide(monkeypatch, forward=True)
    model, optimizer = wrapped(strategy=PLANNED)
    states = {**trained(optimizer, model), "barrier": barrier, "back": back}
    result = {}
    for name in ("barrier", "ordered", "back", "barrier", "none", "back", "ordered"):
        optimizer.load_state_dict(states[name])
        trained(optimizer, model)
        result[name] = bool(pending(optimizer)), optimizer.plan.order is not None
    assert result == {
        "barrier": (True, True),  # of merged-gradient: it was planned, and not raced yet
        "ordered": (True, True),
        "back": (False, False),
        "none": (True, True),
    }


def test_a_parameter_that_joins_while_uses_are_watched() -> None:
    weights = []
    for strategy in (ALONE, BARRIER):
        torch.manual_seed(1)
        model = sequential()
        parameters = list(model.parameters())
        optimizer = hvd.DistributedOptimizer(SGD(parameters[:-1], lr=0.05), strategy=strategy)
        go_on(model, optimizer, range(2))
        optimizer.add_param_group({"params": parameters[-1:]})
        deferred = go_on(model, optimizer, range(2, SHORT))
        assert bool(deferred) == (strategy == ALONE)
        weights.append(weights_of(model))
    assert np.array_equal(*weights)


@pytest.mark.usefixtures("slow_network")
def test_an_optimizer_that_goes_out_of_scope_makes_its_last_update() -> None:
    """It is gone when its function has returned; another takes the next steps."""
    weights = []

    def trained(model: nn.Module, strategy: str, steps: range, lr: float) -> None:
        optimizer = hvd.DistributedOptimizer(
            SGD(model.parameters(), lr=lr), model.named_parameters(), strategy=strategy
        )
        go_on(model, optimizer, steps)
        assert bool(pending(optimizer)) == (strategy == ALONE)

    for strategy in (ALONE, BARRIER):
        torch.manual_seed(1)
        model = sequential()
        trained(model, strategy, range(SHORT), 0.1)
        gc.collect()
        trained(model, strategy, range(SHORT, 2 * SHORT), 0.03)
        gc.collect()
        weights.append(weights_of(model))
    assert np.array_equal(*weights)


# Ends of scripts.


@on_ranks(2, init=hvd.init, env={"LAUNCH": "ends with a step"})
def test_a_script_may_end_with_a_step() -> None:
    """With updates pending; no rank hangs or fails. It is the last thing that these ranks do."""
    model, optimizer = wrapped(strategy=ALONE)
    go_on(model, optimizer, range(SHORT))
    assert pending(optimizer)


@on_ranks(2, init=hvd.init, env={"LAUNCH": "shuts down"})
def test_shutdown_applies_what_is_pending() -> None:
    wanted, barrier = wrapped(strategy=BARRIER)
    go_on(wanted, barrier, range(SHORT))
    model, optimizer = wrapped(strategy=ALONE)
    go_on(model, optimizer, range(SHORT))
    assert pending(optimizer)
    hvd.shutdown()
    assert np.array_equal(raw(model), raw(wanted))


@on_ranks(2, init=hvd.init, env={"LAUNCH": "synchronizes alone"})
def test_a_rank_that_synchronizes_alone_is_told() -> None:
    """As before an evaluation of its own; the control flags say so as updates are finished."""
    model, optimizer = wrapped(strategy=ALONE)
    step = 0
    with pytest.raises(HvdPipeError, match="ranks have gone apart"):  # noqa: PT012
        for step in range(SHORT):
            go_on(model, optimizer, range(step, step + 1))
            if (hvd.rank(), step) == (0, ODD):
                optimizer.synchronize()
    assert ODD < step <= ODD + 3


@on_ranks(2, init=hvd.init, env={"LAUNCH": "adds alone"})
def test_parameters_that_one_rank_alone_adds() -> None:
    """Both ranks are told, and neither waits for ever."""
    model, optimizer = wrapped(strategy=ALONE)
    go_on(model, optimizer, range(SHORT - 3))
    if hvd.rank() == 0:
        optimizer.add_param_group({"params": list(nn.Linear(3, 3).parameters())})
    with pytest.raises(HvdPipeError, match="ranks have sent different things at the same step"):
        go_on(model, optimizer, range(SHORT - 3, SHORT))
    hvd.shutdown()  # one may wait until the other has ended
