"""Buckets and the plans behind them, as the ranks see them, for test_plans.py."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from branching import SWITCH, Branches, branches_loss
from cases import Raised, run_cases
from problem import OPTIMIZERS, STEPS, Loss, Weights, loss_of, make_model, train
from torch import nn

import hvd_pipe.torch as hvd
import hvd_pipe.torch.messages.allreduce
from hvd_pipe.planning import trials
from hvd_pipe.planning.trials import TRIAL_STEPS, next_plan
from hvd_pipe.torch.strategies import merged_gradient

PAUSE_S = 0.004  # before each gradient of a slow rank
AFTER_SWITCH = 100  # steps within which another order of gradients must have led to another plan


class Buckets(NamedTuple):
    """One step: who shares a buffer, how many there are, and how many all-reduces it took."""

    planned: set[frozenset[str]]
    found: set[frozenset[str]]
    storages: int
    allreduces: int


class Plans(NamedTuple):
    """The weights and the plan after every step; when the last gradient was ready to the planner.

    That is None on ranks which do not plan.
    """

    weights: Weights
    plans: list[hvd.Plan]
    last_ready_s: float | None


def wrap(model: nn.Module, strategy: Any) -> Any:
    plain = OPTIMIZERS["momentum"](model)
    return hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)


def buckets_of(strategy: str) -> list[Buckets]:
    """What `Buckets` says of the last three steps, by each of three ways to clear gradients."""
    model = make_model()
    optimizer = wrap(model, strategy)
    train(model, optimizer, hvd.rank())
    return [
        _buckets_of_a_step(model, optimizer, clear)
        for clear in (
            optimizer.zero_grad,
            partial(optimizer.zero_grad, set_to_none=False),
            model.zero_grad,
        )
    ]


def _buckets_of_a_step(model: nn.Module, optimizer: Any, clear: Callable[[], None]) -> Buckets:
    calls = []
    allreduce = hvd_pipe.torch.messages.allreduce.allreduce_async_

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor)
        return allreduce(tensor, *args, **kwargs)

    hvd_pipe.torch.messages.allreduce.allreduce_async_ = counted
    try:
        clear()
        loss_of(model, hvd.rank(), STEPS).backward()
        optimizer.step()
    finally:
        hvd_pipe.torch.messages.allreduce.allreduce_async_ = allreduce
    sharing: dict[int, set[str]] = {}
    for name, p in model.named_parameters():
        assert p.grad is not None
        sharing.setdefault(p.grad.untyped_storage().data_ptr(), set()).add(name)
    return Buckets(
        {frozenset(bucket) for bucket in optimizer.plan.buckets},
        {frozenset(names) for names in sharing.values()},
        len(sharing),
        len(calls),
    )


def plans_of(
    make: Callable[[], nn.Module] = make_model,
    loss: Loss = loss_of,
    steps: int = STEPS,
    strategy: str = "merged-gradient",
    slow_rank: int | None = None,
) -> Plans:
    """Train; one rank may take 4 ms more for each gradient than the others."""
    torch.manual_seed(2)
    model = make()
    optimizer = wrap(model, strategy)
    if hvd.rank() == slow_rank:
        for p in model.parameters():
            p.register_hook(lambda _: time.sleep(PAUSE_S))
    noted = _PlanEachStep(optimizer)
    with mock.patch.object(merged_gradient, "next_plan", wraps=next_plan) as planned:
        weights = train(model, noted, hvd.rank(), loss=loss, steps=steps)
    last = [float(call.args[1].ready_s.max()) for call in planned.call_args_list]
    return Plans(weights, noted.plans, last[-1] if last else None)


class _PlanEachStep:
    """An optimizer that notes the plan after every step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.zero_grad = optimizer.zero_grad
        self.plans: list[hvd.Plan] = []

    def step(self) -> None:
        self._optimizer.step()
        self.plans.append(self._optimizer.plan)


def saved_and_given_back(path: str) -> list[hvd.Plan]:
    """The plan that was measured, those of optimizers that got it as a file and an object; and one
    with an order, before and after training.
    """
    model = make_model()
    optimizer = wrap(model, hvd.MergedGradient())
    train(model, optimizer, hvd.rank())
    if hvd.rank() == 0:
        optimizer.plan.save(path)
    hvd.barrier()
    plans = [optimizer.plan]
    for given in (path, hvd.Plan.load(path)):
        model = make_model()
        optimizer = wrap(model, hvd.MergedGradient(plan=given))
        train(model, optimizer, hvd.rank())
        plans.append(optimizer.plan)
    # With an order in which one bucket travels in two pieces, once the first steps are over.
    order = (*range(len(plans[0].buckets)), 0)
    given = dataclasses.replace(plans[0], order=order)
    model = make_model()
    optimizer = wrap(model, hvd.MergedGradient(plan=given, overlap="forward"))
    train(model, optimizer, hvd.rank())
    return [*plans, given, optimizer.plan]


def with_joins(epochs: int = 4, steps: int = 10) -> list[hvd.Plan]:
    """The plan after every step of short epochs, each of which ends in the middle of a trial.

    Plans are tried however little of a step waits, which is for this machine to say.
    """
    model = make_model()
    optimizer = wrap(model, "merged-gradient")
    noted = _PlanEachStep(optimizer)
    with mock.patch.object(trials, "HIDDEN", -1.0):
        for epoch in range(epochs):
            for step in range(steps + hvd.rank()):  # rank 0 has a batch less
                optimizer.zero_grad()
                loss_of(model, hvd.rank(), steps * epoch + step).backward()
                noted.step()
            hvd.join()
    return noted.plans


def saved_in_a_trial() -> tuple[list[bool], list[int]]:
    """Whether a state holds a plan, and how many plans were tried, before and in a trial anew."""
    torch.manual_seed(4)
    model, more = make_model(), nn.Linear(3, 3).double()
    optimizer = wrap(model, "merged-gradient")
    holds, tried, steps = [], [], STEPS + TRIAL_STEPS
    for step in range(steps):
        if step == steps - TRIAL_STEPS:
            optimizer.add_param_group({"params": list(more.parameters())})
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        holds.append("plan" in optimizer.state_dict()["hvd_pipe"]["counters"])
        tried.append(len(optimizer.plan.tried))
    return holds, tried


BUCKETS = [
    "merged-gradient",
    "merged-gradient:plan=wfbp",
    "merged-gradient:plan=single",
    "merged-gradient:plan=greedy",
    "merged-gradient:bucket_bytes=64",
]
branches = partial(plans_of, Branches, branches_loss, SWITCH + AFTER_SWITCH)
PLANS: dict[str, Callable[[], Plans]] = {
    "even": plans_of,
    "a slow rank": partial(plans_of, slow_rank=1),
    "branches that change places": branches,
    # Which plan is the exact one is the machine's to say, and in a single bucket no order shows.
    # Of these buckets, none can hold the weights (144 bytes each) of both branches.
    "branches that change places, in small buckets": partial(
        branches, strategy="merged-gradient:bucket_bytes=168"
    ),
}


def run(path: str) -> tuple[dict[str, Any | Raised], ...]:
    hvd.init()
    return (
        run_cases({strategy: partial(buckets_of, strategy) for strategy in BUCKETS}),
        run_cases(PLANS),
        run_cases(
            {
                "saved": partial(saved_and_given_back, path),
                "joins": with_joins,
                "saved in a trial": saved_in_a_trial,
            }
        ),
    )
