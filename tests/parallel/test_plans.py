"""Gradients are views into one buffer a bucket, and the buckets are those of the plan."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from branching import SWITCH, Branches, branches_loss
from cells import Cell
from on_ranks import gather, on_ranks, place
from problem import OPTIMIZERS, STEPS, Loss, Weights, loss_of, make_model, train
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.planning import tuner
from hvd_pipe.planning.tuner import TRIAL_STEPS, next_plan
from hvd_pipe.torch.strategies import merged_gradient

TENSORS = 6  # of the model
PAUSE_S = 0.004  # before each gradient of a slow rank
SLOW_S = (TENSORS - 1) * PAUSE_S  # at least, from its first gradient to its last
AFTER_SWITCH = 100  # steps within which another order of gradients must have led to another plan

pytestmark = on_ranks(2, init=hvd.init)


def wrap(model: nn.Module, strategy: Any = "merged-gradient:overlap=backward") -> Any:
    plain = OPTIMIZERS["momentum"](model)
    return hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)


class Run(NamedTuple):
    """The weights and the plan after every step; when the last gradient was ready to the planner.

    That is None on ranks which do not plan.
    """

    weights: Weights
    plans: list[hvd.Plan]
    last_ready_s: float | None


@functools.cache
def planned(
    make: Callable[[], nn.Module] = make_model,
    loss: Loss = loss_of,
    steps: int = STEPS,
    strategy: str = "merged-gradient:overlap=backward",
    slow_rank: int | None = None,
) -> Run:
    """Train; one rank may take 4 ms more for each gradient than the others."""
    torch.manual_seed(2)
    model = make()
    optimizer = wrap(model, strategy)
    if hvd.rank() == slow_rank:
        for p in model.parameters():
            p.register_hook(lambda _: time.sleep(PAUSE_S))
    noted = PlanEachStep(optimizer)
    with mock.patch.object(merged_gradient, "next_plan", wraps=next_plan) as called:
        weights = train(model, noted, hvd.rank(), loss=loss, steps=steps)
    last = [float(call.args[1].ready_s.max()) for call in called.call_args_list]
    return Run(weights, noted.plans, last[-1] if last else None)


class PlanEachStep:
    """An optimizer that notes the plan after every step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.zero_grad = optimizer.zero_grad
        self.plans: list[hvd.Plan] = []

    def step(self) -> None:
        self._optimizer.step()
        self.plans.append(self._optimizer.plan)


branches = functools.partial(planned, Branches, branches_loss, SWITCH + AFTER_SWITCH)
slow = functools.partial(planned, slow_rank=1)
# Which plan is the exact one is the machine's to say, and in a single bucket no order shows.
# Of these buckets, none can hold the weights (144 bytes each) of both branches.
small = functools.partial(branches, strategy="merged-gradient:bucket_bytes=168")

runs = pytest.mark.parametrize(
    "run", [planned, slow, branches, small], ids=["even", "slow rank", "branches", "small"]
)


@runs
def test_all_ranks_have_the_same_plan_at_the_same_step(run: Callable[[], Run]) -> None:
    plans = run().plans
    assert gather(plans) == [plans] * 2
    assert len(plans) == len(run().weights)


@pytest.mark.parametrize("run", [planned, slow, branches], ids=["even", "slow rank", "branches"])
def test_the_fastest_of_the_plans_that_were_tried_stays(run: Callable[[], Run]) -> None:
    plans = run().plans
    assert plans[0].tried == ()
    plan = plans[29]
    assert 1 <= len(plan.tried) <= 4
    assert len(plan.buckets) in [count for count, _ in plan.tried]
    assert str(plan).splitlines()[-1].startswith("tried in training, a step with ")


def test_the_slowest_ranks_times_count() -> None:
    """A bucket leaves when the last rank has filled it; rank 0, which plans, is not that rank."""
    last = slow().last_ready_s
    if hvd.rank() == 0:
        assert last is not None
        assert last > SLOW_S
    else:
        assert last is None


@pytest.mark.parametrize("run", [planned, slow], ids=["even", "slow rank"])
def test_the_equation_holds_whatever_the_plan(run: Callable[[], Run]) -> None:
    expected = Cell("merged-gradient:overlap=backward", "momentum").expected(2)[hvd.rank()][:-1]
    np.testing.assert_allclose(run().weights, expected, rtol=0, atol=1e-12)


def test_another_order_of_gradients_leads_to_another_plan() -> None:
    plans = small().plans
    before, after = plans[SWITCH - 1].names, plans[-1].names
    assert set(before) == set(after)
    # Backward reaches the later layer first.
    assert before.index("b.weight") < before.index("a.weight")
    assert after.index("a.weight") < after.index("b.weight")


def test_a_plan_is_printed_saved_and_given_back() -> None:
    """By a file and as an object; also one with an order."""
    path = place()[0] / "plan.json"

    def trained(strategy: hvd.MergedGradient) -> hvd.Plan:
        model = make_model()
        optimizer = wrap(model, strategy)
        train(model, optimizer, hvd.rank())
        return optimizer.plan  # type: ignore[no-any-return]

    measured = trained(hvd.MergedGradient())
    if hvd.rank() == 0:
        measured.save(path)
    hvd.barrier()
    for given in (str(path), hvd.Plan.load(path)):
        assert trained(hvd.MergedGradient(plan=given)).buckets == measured.buckets
    # With an order in which one bucket travels in two pieces, once the first steps are over.
    ordered = dataclasses.replace(measured, order=(*range(len(measured.buckets)), 0))
    kept = trained(hvd.MergedGradient(plan=ordered, overlap="forward"))
    assert (kept.buckets, kept.order) == (ordered.buckets, ordered.order)
    text = str(measured)
    assert text.startswith(f"{measured.method}: {TENSORS} tensors in ")
    assert all(bucket[0] in text for bucket in measured.buckets)


def test_trials_go_on_after_a_join() -> None:
    """A join in the middle of a trial threw away what was seen, and the plan on trial stayed.

    Plans are tried however little of a step waits, which is for this machine to say.
    """
    model = make_model()
    noted = PlanEachStep(wrap(model))
    with mock.patch.object(tuner, "HIDDEN", -1.0):
        for epoch in range(4):
            for step in range(10 + hvd.rank()):  # rank 0 has a batch less
                noted.zero_grad()
                loss_of(model, hvd.rank(), 10 * epoch + step).backward()
                noted.step()
            hvd.join()
    first, last = noted.plans[0], noted.plans[-1]
    assert gather(last) == [last] * 2
    assert len(last.tried) > 1
    assert last.tried[0][0] == len(first.buckets)


def test_a_plan_on_trial_is_not_saved() -> None:
    """Parameters have joined: the plan is tried anew, and may be a bad one meanwhile."""
    torch.manual_seed(4)
    model, more = make_model(), nn.Linear(3, 3).double()
    optimizer = wrap(model)
    holds, tried = [], []
    for step in range(STEPS + TRIAL_STEPS):
        if step == STEPS:
            optimizer.add_param_group({"params": list(more.parameters())})
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        holds.append("plan" in optimizer.state_dict()["hvd_pipe"]["counters"])
        tried.append(bool(optimizer.plan.tried))
    assert holds[:STEPS] == tried[:STEPS]
    assert holds[STEPS - 1]
    assert not any(holds[STEPS:])
