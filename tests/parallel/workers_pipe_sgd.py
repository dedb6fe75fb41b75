"""Pipe-SGD on parameters whose gradients say which step they come from."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import Raised, run_cases
from problem import OPTIMIZERS, STEPS, Weights, loss_of, make_model, train, weights_of
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


def loaded(strategy: str, after: int) -> Weights:
    """Load the state in mid-run, where ``p.grad`` stays a tensor that is zeroed in place."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )

    class Loading:
        synchronize, steps = optimizer.synchronize, 0

        def step(self) -> None:
            optimizer.step()
            self.steps += 1
            if self.steps == after:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        def zero_grad(self) -> None:
            optimizer.zero_grad(set_to_none=False)

    return train(model, Loading(), hvd.rank(), drains={STEPS - 1})


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


def by_hand(strategy: str, way: str, pattern: str) -> Weights:
    """Gradients that no hook hears of; drained in the middle and at the end of training."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    records = []
    for step in range(STEPS):
        set_gradients(model, optimizer, way, step)
        if pattern == "step":
            optimizer.step()
        else:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        records.append(weights_of(model))
        if step in (STEPS // 2, STEPS - 1):
            if way == "in place":
                model.zero_grad(set_to_none=False)
            optimizer.synchronize()
            records.append(weights_of(model))
    return np.array(records)


def set_gradients(model: nn.Module, optimizer: Any, way: str, step: int) -> None:
    parameters = list(model.parameters())
    loss = loss_of(model, hvd.rank(), step)
    if way == "mixed":  # a hook hears of the first layer, or of nothing
        optimizer.zero_grad()
        first = 2 if step % 2 else 0
        gradients = list(torch.autograd.grad(loss, parameters, retain_graph=True))
        if first:
            loss.backward(inputs=parameters[:first])
        for parameter, gradient in zip(parameters[first:], gradients[first:], strict=True):
            parameter.grad = gradient
        return
    gradients = list(torch.autograd.grad(loss, parameters))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if way == "in place" and parameter.grad is not None:
            parameter.grad.copy_(gradient)
        else:
            parameter.grad = gradient


def by_data(strategy: str) -> str:
    """Gradients are written where nobody can see it."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    for step in range(4):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss_of(model, hvd.rank(), step), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.data.copy_(gradient)
        optimizer.synchronize()
        try:
            with optimizer.skip_synchronize():
                optimizer.step()
        except hvd.HvdPipeError as error:
            return str(error)
    return "nothing was raised"


def started_again(strategy: str) -> Weights:
    """Horovod ends and starts anew in mid-run, and the optimizer is drained first thing."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    records = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        records.append(weights_of(model))
        if step in (STEPS // 2, STEPS - 1):
            hvd.shutdown()
            hvd.init()
            optimizer.synchronize()
            records.append(weights_of(model))
    return np.array(records)


def copied(strategy: str) -> Weights:
    """The copy of an optimizer is drained first thing."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    records = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        records.append(weights_of(model))
        if step in (STEPS // 2, STEPS - 1):
            model, optimizer = copy.deepcopy((model, optimizer))
            optimizer.synchronize()
            records.append(weights_of(model))
    return np.array(records)


STRATEGIES = ["merged-gradient", "pipe-sgd:warmup_steps=5", "cocod:period=3,warmup_steps=4"]


LOADED = ["merged-gradient", "pipe-sgd"]
AFTER = (2, 3)
BY_HAND = ["merged-gradient", "pipe-sgd", "pipe-sgd:warmup_steps=5", "cocod:period=3"]
WAYS = ("assigned", "in place", "mixed")
PATTERNS = ("step", "synchronize")


def run() -> dict[Any, Any | Raised]:
    hvd.init()
    cases: dict[Any, Callable[[], Any]] = {"applied": applied, "clipped": clipped}
    for strategy in STRATEGIES:
        for way, clear in CLEAR.items():
            cases[strategy, way] = partial(cleared, strategy, clear)
    for strategy in LOADED:
        for after in AFTER:
            cases["loaded", strategy, after] = partial(loaded, strategy, after)
    for strategy in BY_HAND:
        for way in WAYS:
            for pattern in PATTERNS:
                cases[strategy, way, pattern] = partial(by_hand, strategy, way, pattern)
        cases["copied", strategy] = partial(copied, strategy)
    for strategy in BY_HAND[1:]:
        cases["data", strategy] = partial(by_data, strategy)
    return run_cases(cases)


def run_started_again() -> dict[str, Weights | Raised]:
    importlib.import_module("mpi4py.MPI")  # it finalises MPI, so that Horovod does not
    os.environ.pop("HOROVOD_CYCLE_TIME")  # Horovod crashes at a second start with it
    hvd.init()
    return run_cases({strategy: partial(started_again, strategy) for strategy in BY_HAND})
