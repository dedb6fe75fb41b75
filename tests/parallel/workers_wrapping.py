"""What of the user's optimizer and script must survive the wrapping, on two ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from cases import Raised, run_cases
from problem import OPTIMIZERS, STEPS, Weights, loss_of, make_model, train, weights_of
from torch import nn
from torch.optim.lr_scheduler import StepLR

import hvd_pipe.torch as hvd

LOCAL_STEPS = 5  # before wrapping
SCHEDULED_STEPS = 6


def wrap(model: nn.Module, plain: torch.optim.Optimizer, strategy: Any = None) -> Any:
    return hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)


def scheduled(strategy: str, before: bool) -> list[float]:
    """The updates of a weight with gradient 1 on rank 0 and 2 on rank 1; lr 1, 1/2, 1/4, ..."""
    model = nn.Linear(1, 1, bias=False).double()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    if before:
        schedule = StepLR(plain, step_size=1, gamma=0.5)
        optimizer = wrap(model, plain, strategy)
    else:
        optimizer = wrap(model, plain, strategy)
        schedule = StepLR(optimizer, step_size=1, gamma=0.5)
    weights = [model.weight.item()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when it believes step() was never called
        for _ in range(SCHEDULED_STEPS):
            optimizer.zero_grad()
            (model.weight.sum() * (hvd.rank() + 1)).backward()
            optimizer.step()
            schedule.step()
            weights.append(model.weight.item())
    assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    return [old - new for old, new in pairwise(weights)]


def continued() -> Weights:
    """Momentum from some steps on rank 0's data, which all ranks make; then wrapped."""
    model = make_model()
    plain = OPTIMIZERS["momentum"](model)
    train(model, plain, rank=0, steps=LOCAL_STEPS)
    return train(model, wrap(model, plain), hvd.rank())


def identity() -> dict[str, Any]:
    model = make_model()
    groups = [
        {"params": [p], "lr": 0.1 * i, "name": name}
        for i, (name, p) in enumerate(model.named_parameters())
    ]
    plain = torch.optim.SGD(groups, lr=3.0, momentum=0.5, nesterov=True)
    defaults, groups = dict(plain.defaults), [dict(group) for group in plain.param_groups]
    optimizer = wrap(model, plain)
    return {
        "is an SGD": isinstance(optimizer, torch.optim.SGD),
        "class": type(optimizer).__name__,
        "defaults": optimizer.defaults == defaults,
        "groups": [
            kept.keys() == given.keys() and all(kept[key] is given[key] for key in given)
            for kept, given in zip(optimizer.param_groups, groups, strict=True)
        ],
    }


def hooked() -> tuple[int, int]:
    """How often hooks ran that were registered before and after wrapping."""
    model = make_model()
    plain = OPTIMIZERS["momentum"](model)
    calls = {"before": 0, "after": 0}

    def count(key: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            calls[key] += 1

        return hook

    plain.register_step_pre_hook(count("before"))
    optimizer = wrap(model, plain)
    optimizer.register_step_post_hook(count("after"))
    train(model, optimizer, hvd.rank())
    return calls["before"], calls["after"]


def two_optimizers(strategies: tuple[str, str]) -> list[Weights]:
    """As for a GAN: two models with equal names, their optimizers stepping in turns."""
    models = [make_model() for _ in strategies]
    optimizers = [
        wrap(model, OPTIMIZERS[kind](model), strategy)
        for model, kind, strategy in zip(models, ("momentum", "adam"), strategies, strict=True)
    ]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        optimizer.synchronize()
    return [weights_of(model) for model in models]


def given_as(strategy: Any, environment: str | None = None) -> Weights:
    """The trajectory of a strategy that is given as an object, or by the environment."""
    if environment is not None:
        os.environ["HVD_PIPE_STRATEGY"] = environment
    try:
        model = make_model()
        optimizer = wrap(model, OPTIMIZERS["momentum"](model), strategy)
    finally:
        os.environ.pop("HVD_PIPE_STRATEGY", None)
    return train(model, optimizer, hvd.rank(), drains={STEPS - 1})


def with_closure(strategy: str) -> tuple[Weights, list[bool]]:
    """The last weights; whether each ``step(closure)`` returned the closure's loss."""
    model = make_model()
    optimizer = wrap(model, OPTIMIZERS["momentum"](model), strategy)
    returned = []
    for step in range(STEPS):
        losses: list[torch.Tensor] = []

        def closure(step: int = step, losses: list[torch.Tensor] = losses) -> torch.Tensor:
            optimizer.zero_grad()
            losses.append(loss_of(model, hvd.rank(), step))
            losses[-1].backward()
            return losses[-1]

        loss = optimizer.step(closure)
        returned.append(len(losses) == 1 and loss is losses[0])
    optimizer.synchronize()
    return weights_of(model), returned


PAIRS = [
    ("merged-gradient", "merged-gradient"),
    ("pipe-sgd", "pipe-sgd"),
    ("merged-gradient", "pipe-sgd"),
    ("cocod:period=4", "pipe-sgd:warmup_steps=5"),
]
# How a strategy is given, the environment variable, and the cell of `cells` that it must equal.
WAYS: dict[str, tuple[Any, str | None, str]] = {
    "nothing": (None, None, "merged-gradient"),
    "environment": (None, "pipe-sgd:warmup_steps=5", "pipe-sgd:warmup_steps=5"),
    "argument over environment": ("cocod:period=4", "pipe-sgd", "cocod:period=4"),
    "MergedGradient": (hvd.MergedGradient(bucket_bytes=64), None, "merged-gradient"),
    "PipeSGD": (hvd.PipeSGD(warmup_steps=5), None, "pipe-sgd:warmup_steps=5"),
    "CoCoD": (hvd.CoCoD(period=3, warmup_steps=4), None, "cocod:period=3,warmup_steps=4"),
}
STRATEGIES = ["merged-gradient", "pipe-sgd", "cocod:period=4"]


def run() -> dict[Any, Any | Raised]:
    hvd.init()
    cases: dict[Any, Callable[[], Any]] = {
        "continued": continued,
        "identity": identity,
        "hooked": hooked,
    }
    for strategy in STRATEGIES:
        cases["closure", strategy] = partial(with_closure, strategy)
        for before in (True, False):
            cases["scheduled", strategy, before] = partial(scheduled, strategy, before)
    for pair in PAIRS:
        cases["two", pair] = partial(two_optimizers, pair)
    for way, (strategy, environment, _) in WAYS.items():
        cases["given", way] = partial(given_as, strategy, environment)
    return run_cases(cases)
