"""`overlap="forward"`: the bits of stock Horovod, though weights are updated as they are needed.

At two ranks a sum has one rounding whatever the order of its terms, so equality is exact. Losses
are recorded in every step: they tell whether each layer had its new weights in time.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import time
from collections.abc import Callable
from functools import partial
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
    Reader,
    Recurrent,
    Skipping,
    Sparse,
    Tied,
    Wandering,
    alike_loss,
    numbered_loss,
    pending,
    read_all,
    sequential,
)
from problem import OPTIMIZERS, Loss, Weights, batch, loss_of, weights_of
from serial import Synchronous
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.torch import overlap_start
from hvd_pipe.torch.messages.ordered import OrderedMessage
from hvd_pipe.torch.strategies import merged_gradient

PLANNED = "merged-gradient:overlap=forward"
ALONE = "merged-gradient:plan=wfbp,overlap=forward"
FILLED = "merged-gradient:bucket_bytes=64,overlap=forward"
BARRIER = "merged-gradient:plan=wfbp"

LONG = 40  # with all plans that are tried, first with the barrier
SHORT = 16
BEGUN = 6  # updates are deferred by then where the plan is given
RACED = 19  # and by then where merged-gradient's plans are tried before
EVERY = 7  # steps between two records of the weights

Look = Callable[[Any, Any], list[torch.Tensor]]
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
    """What a rank has seen.

    Args:
        losses: Of every step.
        weights: Now and then, and at the end.
        looked: What a look has seen, step by step.
        deferred: The steps whose ``step()`` left messages to be waited for later.
        plan: At the end.
    """

    losses: list[float]
    weights: list[Weights]
    looked: list[list[torch.Tensor]]
    deferred: list[int]
    plan: hvd.Plan | None


def scripted(
    strategy: str | None,
    make: Make = sequential,
    make_optimizer: MakeOptimizer = momentum,
    loss: Loss = loss_of,
    steps: int = SHORT,
    look: Look | None = None,
    before: Callable[[Any, Any, int], object] = lambda model, optimizer, step: None,
    after: Callable[[Any, Any, int], object] = lambda model, optimizer, step: None,
    schedule: bool = False,
    backward: Callable[[int], bool] = lambda step: True,
    options: Callable[[ModuleType], dict[str, Any]] = lambda module: {},
    passes: int = 1,
) -> Run:
    """Train; by stock Horovod where no strategy is given.

    Args:
        look: What looks at something early, from step ``BEGUN`` on.
        before, after: What else the script does before and after each ``step()``.
        schedule: Whether a scheduler changes learning rates after each step.
        backward: Whether a step has a backward pass.
        options: More arguments of the optimizer.
        passes: Backward passes a step.
    """
    module: ModuleType = stock if strategy is None else hvd
    given = options(module) | ({} if strategy is None else {"strategy": strategy})
    if passes > 1:
        given["backward_passes_per_step"] = passes
    model, optimizer = wrapped(make, make_optimizer, module, **given)
    scheduler = StepLR(optimizer, 1, 0.9) if schedule else None
    torch.manual_seed(50 + module.rank())
    losses, weights, looked, deferred = [], [], [], []
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
        if look is not None and step >= BEGUN:
            looked.append(look(model, optimizer))
        if step % EVERY == EVERY - 1:
            weights.append(weights_of(model))
    weights.append(weights_of(model))
    return Run(losses, weights, looked, deferred, getattr(optimizer, "plan", None))


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
    "reader": {"make": Reader},
    "skipping": {"make": Skipping, "loss": numbered_loss},
    "recurrent": {"make": Recurrent},
    "batch norm": {"make": normed},
    "wandering": {"make": Wandering, "loss": alike_loss},
    "compiled": {"make": compiled},
    "weights that are read": {"after": read_all},
    "fp16": {"make": Reader, "options": lambda module: {"compression": module.Compression.fp16}},
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


@pytest.mark.nightly  # a slow network makes the gates wait; here few do
@models
def test_equal_to_stock_horovod(script: dict[str, Any]) -> None:
    ours = scripted(ALONE, **script)
    assert_same(scripted(None, **script), ours)
    assert_deferred(ours, SHORT)


@models
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(ALONE, id="wfbp"),
        # nightly: the same gates, of buckets with several tensors, as planned ones have
        pytest.param(FILLED, id="bytes", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.usefixtures("slow_network")
def test_equal_to_stock_horovod_on_a_slow_network(script: dict[str, Any], strategy: str) -> None:
    ours = scripted(strategy, **script)
    assert_same(scripted(None, **script), ours)
    assert_deferred(ours, SHORT)


def serial(
    workers: int, make: Make = sequential, loss: Loss = loss_of, steps: int = SHORT
) -> list[Weights]:
    """The weights, now and then, as one process computes them."""

    def seeded() -> nn.Module:
        torch.manual_seed(1)
        return make().double()

    def loss_of_all(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        """Gradients are zeros where a layer is left out, as they are for Horovod."""
        zeros = [0.0 * p.sum() for p in model.parameters()]
        return loss(model, rank, step) + torch.stack(zeros).sum()

    everyone = Synchronous(workers, seeded, momentum)
    weights = []
    for step in range(steps):
        everyone.backward(loss_of_all, step)
        everyone.step()
        if step % EVERY == EVERY - 1:
            weights.append(weights_of(everyone.models[0]))
    return [*weights, weights_of(everyone.models[0])]


@on_ranks(3, init=hvd.init)
@pytest.mark.parametrize("strategy", [PLANNED, ALONE])
@pytest.mark.parametrize("name", ["plain", "tied", "reader", "skipping"])
def test_equal_to_one_process_that_has_all_gradients(
    name: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide(monkeypatch, forward=True)
    steps = LONG if strategy == PLANNED else SHORT
    make, loss = MODELS[name].get("make", sequential), MODELS[name].get("loss", loss_of)
    run = scripted(strategy, make=lambda: make().double(), loss=loss, steps=steps)
    assert_deferred(run, steps)
    np.testing.assert_allclose(run.weights, serial(3, make, loss, steps), rtol=0, atol=1e-12)


# Who looks early.


def weights_in(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def by_state_dict(model: nn.Module, _: Any) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def by_part(model: nn.Module, _: Any) -> list[torch.Tensor]:
    return by_state_dict(list(model.children())[-1], None)


def by_optimizer(_: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return [state[i]["momentum_buffer"].clone() for i in range(6)]


def by_copy(model: nn.Module, _: Any) -> list[torch.Tensor]:
    return weights_in(copy.deepcopy(model))


def by_copy_of_part(model: nn.Module, _: Any) -> list[torch.Tensor]:
    return weights_in(copy.deepcopy(list(model.children())[-1]))


def by_copy_of_both(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    other, copied = copy.deepcopy((model, optimizer))
    owned = [p for group in copied.param_groups for p in group["params"]]
    assert all(any(p is each for each in owned) for p in other.parameters())
    return weights_in(other)


def by_pickle(model: nn.Module, _: Any) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return weights_in(torch.load(file, weights_only=False))


def by_broadcast(model: nn.Module, _: Any) -> list[torch.Tensor]:
    hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
    return weights_in(model)


def by_broadcast_of_state(model: nn.Module, _: Any) -> list[torch.Tensor]:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return weights_in(model)


def by_synchronize(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    optimizer.synchronize()
    return weights_in(model)


def evaluated(model: nn.Module, _: Any, mode: Any, train: bool = False) -> list[torch.Tensor]:
    model.train(train)
    random_state = torch.get_rng_state()
    with mode():
        outputs = model(batch(0, 999, torch.float32)[0])
    torch.set_rng_state(random_state)
    model.train()
    return [outputs.clone()]


def evaluated_in_part(model: nn.Module, _: Any) -> list[torch.Tensor]:
    """A part that does not run by itself in training, and has a fast path without gradients."""
    layer = model.get_submodule("encoder.layers.1").eval()
    with torch.no_grad():
        outputs = layer(torch.ones(1, 3, 8))
    layer.train()
    return [outputs.clone()]


def loaded(model: nn.Module, _: Any) -> list[torch.Tensor]:
    """Other weights: what is pending must not be added to them."""
    state = {name: torch.full_like(p, 0.125) for name, p in model.named_parameters()}
    model.load_state_dict(state)
    return weights_in(model)


@pytest.mark.parametrize(
    ("look", "make"),
    [
        pytest.param(look, make, id=name)
        for name, look, make in (
            ("state dict", by_state_dict, Reader),
            ("state dict of a part", by_part, sequential),
            ("optimizer's state dict", by_optimizer, sequential),
            ("copy", by_copy, sequential),
            ("copy of a model with its own parameters", by_copy, Reader),
            ("copy of a part", by_copy_of_part, sequential),
            ("copy of both", by_copy_of_both, Reader),
            ("pickle", by_pickle, Reader),
            ("broadcast", by_broadcast, Reader),
            ("broadcast of a state dict", by_broadcast_of_state, Reader),
            ("synchronize", by_synchronize, Reader),
            ("no_grad", partial(evaluated, mode=torch.no_grad), Attention),
            ("inference_mode", partial(evaluated, mode=torch.inference_mode), Attention),
            (
                "inference_mode in train mode",
                partial(evaluated, mode=torch.inference_mode, train=True),
                Attention,
            ),
            ("a part with no_grad", evaluated_in_part, Attention),
            ("load_state_dict", loaded, sequential),
        )
    ],
)
@pytest.mark.usefixtures("slow_network")
def test_who_looks_early_sees_new_weights(look: Look, make: Make) -> None:
    plain, ours = (scripted(each, make=make, look=look) for each in (BARRIER, ALONE))
    assert_deferred(ours, SHORT)
    assert len(ours.looked) == SHORT - BEGUN
    for wanted, seen in zip(plain.looked, ours.looked, strict=True):
        assert wanted
        for a, b in zip(wanted, seen, strict=True):
            assert a.equal(b)
    if look is loaded:  # which goes on from the same weights every time
        assert plain.losses == ours.losses
    else:
        assert not ours.looked[0][0].equal(ours.looked[-1][0])
        assert_same(plain, ours)


# Where updates stay in step().

STAY = "overlap='forward': updates stay in step()"
HOOKED = f"{STAY} while a hook is registered on the optimizer, or for all optimizers (said once)"


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


def warned(strategy: str, **script: Any) -> tuple[Run, list[str]]:
    """A run, and what was said of updates that stay in step()."""
    heard = Lines()
    run = scripted(strategy, **script)
    heard.taken()
    return run, [line for line in heard.lines if line.startswith(STAY)]


@pytest.mark.parametrize(
    ("reason", "script"),
    [
        (
            "is sparse",
            {"make": Sparse, "make_optimizer": lambda m: SGD(m.parameters(), 0.1)},
        ),
        (
            "`optimizer.updates_each_parameter = True`",
            {"make_optimizer": lambda m: Clipping(m.parameters(), lr=0.1)},
        ),
    ],
    ids=["sparse", "not separable"],
)
def test_where_updates_stay_in_step(reason: str, script: dict[str, Any]) -> None:
    """Training is right, and a warning names the reason."""
    ours, said = warned(ALONE, **script)
    assert_same(scripted(BARRIER, **script), ours)
    assert not ours.deferred
    assert len(said) == 1
    assert reason in said[0]


@pytest.mark.parametrize(
    ("before", "by_rank"),
    [
        (lambda *_: None, ([], [])),
        (clip, ([], [])),
        (clip_always, ([], [])),
        (hook_on_one, ([], [HOOKED])),
    ],
    ids=["nothing", "clipping now and then", "clipping", "one has a hook"],
)
def test_what_keeps_single_steps_with_the_barrier_is_said_once(
    before: Any, by_rank: tuple[list[str], list[str]]
) -> None:
    ours, said = warned(ALONE, before=before)
    assert said == by_rank[hvd.rank()]
    assert bool(ours.deferred) == (before is not clip_always)
    assert_same(scripted(BARRIER, before=before), ours)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (LBFGS, {}, "leave overlap='forward' out"),
        (partial(SGD, lr=0.1), {"op": hvd.Adasum}, "Adasum"),
    ],
    ids=["LBFGS", "Adasum"],
)
def test_refusals(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrapped(make_optimizer=lambda m: kind(m.parameters()), strategy=PLANNED, **options)


# Ranks that differ.


def slow_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    time.sleep(0.02 * (rank == step % 2))
    return loss_of(model, rank, step)


def save_on_one(model: nn.Module, optimizer: Any, step: int) -> None:
    if hvd.rank() == 0 and step > BEGUN:
        assert model.state_dict()
        assert optimizer.state_dict()


def freeze(model: nn.Module, _: Any, step: int) -> None:
    next(model.parameters()).requires_grad_(step not in (2, 3, 4, 5))


@pytest.mark.parametrize(
    "script",
    [
        pytest.param({"loss": slow_loss}, id="one is slower"),
        pytest.param({"backward": lambda step: (hvd.rank(), step) != (1, ODD)}, id="no gradient"),
        pytest.param({"before": clip}, id="clipping"),
        pytest.param({"before": hook_on_one}, id="one has a hook"),
        pytest.param({"after": save_on_one}, id="one saves"),
        pytest.param({"before": freeze}, id="frozen for some steps"),
    ],
)
def test_ranks_that_differ(script: dict[str, Any]) -> None:
    ours = scripted(ALONE, **script)
    assert_same(scripted(BARRIER, **script), ours)
    first, second = gather(ours.weights)
    assert np.array_equal(first, second)
    before = script.get("before")
    if before is clip:
        assert {step % 3 for step in ours.deferred} == {0, 2}
    elif before is hook_on_one:
        assert ours.deferred[-1] == (SHORT - 1 if hvd.rank() == 0 else ODD - 1)
    else:
        assert_deferred(ours, SHORT)


def test_join_with_uneven_steps() -> None:
    """Weights are read as they are: to join waits for updates."""
    weights = []
    for strategy in (ALONE, BARRIER):
        model, optimizer = wrapped(strategy=strategy)
        deferred = go_on(model, optimizer, range(SHORT - 3 * (hvd.rank() == 1)))
        assert int(hvd.join()) == 0  # the last one to join
        assert strategy == BARRIER or deferred >= SHORT - 3 - BEGUN
        weights.append(raw(model))
    assert np.array_equal(*weights)


def test_a_join_while_plans_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs of unlike lengths, the first of which ends while plans are tried."""
    decide(monkeypatch, forward=True)
    model, optimizer = wrapped(strategy=PLANNED)
    deferred = 0
    for epoch in range(6):
        steps = 9 + 2 * (hvd.rank() == 1) + 24 * (epoch == 5)
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
    model, optimizer = wrapped(strategy="merged-gradient")
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


@pytest.mark.usefixtures("slow_network")
def test_an_optimizer_that_is_replaced_makes_its_last_update() -> None:
    """Another optimizer of the same weights is made after a step; the first is kept."""
    runs = []
    for strategy in (ALONE, BARRIER):
        torch.manual_seed(1)
        model, losses, kept = sequential(), [], []
        for lr in (0.1, 0.03):
            optimizer = hvd.DistributedOptimizer(
                SGD(model.parameters(), lr=lr), model.named_parameters(), strategy=strategy
            )
            kept.append(optimizer)
            for step in range(SHORT):
                optimizer.zero_grad()
                loss = loss_of(model, hvd.rank(), step)
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
            assert bool(pending(optimizer)) == (strategy == ALONE)
        runs.append((losses, weights_of(model)))
    (ours, weights), (plain, wanted) = runs
    assert ours == plain
    assert np.array_equal(weights, wanted)


# Ends of scripts.


@on_ranks(3, init=hvd.init, env={"LAUNCH": "ends with a step"})
def test_a_script_may_end_with_a_step() -> None:
    """With updates pending; no rank hangs or fails. It is the last thing that these ranks do."""
    model, optimizer = wrapped(strategy=ALONE)
    go_on(model, optimizer, range(SHORT))
    assert pending(optimizer)


@on_ranks(2, init=hvd.init, env={"LAUNCH": "shuts down"})
def test_shutdown_applies_what_is_pending() -> None:
    workers = hvd.size()
    model, optimizer = wrapped(lambda: sequential().double(), strategy=ALONE)
    go_on(model, optimizer, range(SHORT))
    assert pending(optimizer)
    hvd.shutdown()
    np.testing.assert_allclose(raw(model), serial(workers)[-1], rtol=0, atol=1e-12)


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
