"""Pipe-SGD on parameters whose gradients say which step they come from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from cases import Raised, run_cases
from problem import OPTIMIZERS, STEPS, Weights, make_model, train
from torch import nn

import hvd_pipe.torch as hvd

WARMUP = 3
CLIP = 1.0


class Recorder(torch.optim.Optimizer):
    """Applies nothing, but remembers each gradient that it was told to apply."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.applied: list[list[float]] = []

    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.applied.append(torch.cat(gradients).tolist())


class Telltale(nn.Module):
    """The gradient of ``step``: worker i's is (1, (i+1) (step+1)); for ``rare`` see the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.rare = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def loss(self, rank: int, step: int) -> torch.Tensor:
        result = self.step[0] + self.step[1] * (rank + 1) * (step + 1)
        if rank == 0 and step % 2 == 0:  # the only gradients that ``rare`` gets
            result = result + self.rare.sum() * (step + 1)
        return result


def expected(step: int) -> list[float]:
    """The average over two workers of the gradients that `Telltale.loss` makes."""
    return [1.0, 1.5 * (step + 1), 0.5 * (step + 1) if step % 2 == 0 else 0.0]


class Applied(NamedTuple):
    """All gradients that were applied, and how many had been after each call."""

    gradients: list[list[float]]
    after_steps: list[int]
    after_synchronize: int
    after_more_steps: list[int]
    after_second_synchronize: int
    after_third_synchronize: int


def applied() -> Applied:
    """Ten steps, drain, four more, drain, drain again."""
    model = Telltale()
    optimizer = hvd.DistributedOptimizer(
        Recorder(model), model.named_parameters(), strategy=hvd.PipeSGD(warmup_steps=WARMUP)
    )
    seen = optimizer.applied

    def steps(numbers: range) -> list[int]:
        counts = []
        for number in numbers:
            optimizer.zero_grad()
            model.loss(hvd.rank(), number).backward()
            optimizer.step()
            counts.append(len(seen))
        return counts

    def synchronize() -> int:
        optimizer.synchronize()
        return len(seen)

    counts = (steps(range(10)), synchronize(), steps(range(10, 14)), synchronize(), synchronize())
    return Applied(seen, *counts)


class Clipped(NamedTuple):
    """What was in p.grad after ``synchronize()`` and the weights after each step."""

    gradients: list[list[float]]
    weights: list[list[float]]


def clipped(steps: int = 10) -> Clipped:
    """Horovod's pattern for clipping, with plain SGD at a learning rate of 1."""
    model = Telltale()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        strategy=f"pipe-sgd:warmup_steps={WARMUP}",
    )
    result = Clipped([], [])
    for number in range(steps):
        optimizer.zero_grad()
        model.loss(hvd.rank(), number).backward()
        optimizer.synchronize()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        result.gradients.append(torch.cat(gradients).tolist())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with optimizer.skip_synchronize():
            optimizer.step()
        result.weights.append(torch.cat([p.detach() for p in model.parameters()]).tolist())
    return result


def cleared(strategy: str, clear: Callable[[nn.Module, Any], None]) -> Weights:
    """Train with another way to clear gradients than ``optimizer.zero_grad()``."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )

    class Cleared:
        step, synchronize = optimizer.step, optimizer.synchronize

        @staticmethod
        def zero_grad() -> None:
            clear(model, optimizer)

    return train(model, Cleared, hvd.rank(), drains={STEPS - 1})


def _by_hand(model: nn.Module, _: object) -> None:
    for p in model.parameters():
        p.grad = None


CLEAR: dict[str, Callable[[nn.Module, Any], None]] = {
    "optimizer, to None": lambda _, optimizer: optimizer.zero_grad(set_to_none=True),
    "optimizer, to zero": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "model, to None": lambda model, _: model.zero_grad(),
    "model, to zero": lambda model, _: model.zero_grad(set_to_none=False),
    "by hand": _by_hand,
}
STRATEGIES = ["merged-gradient", "pipe-sgd:warmup_steps=5", "cocod:period=3,warmup_steps=4"]


def run() -> dict[Any, Any | Raised]:
    hvd.init()
    cases: dict[Any, Callable[[], Any]] = {"applied": applied, "clipped": clipped}
    for strategy in STRATEGIES:
        for way, clear in CLEAR.items():
            cases[strategy, way] = partial(cleared, strategy, clear)
    return run_cases(cases)
