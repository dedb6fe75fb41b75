"""DistributedOptimizer keeps what the user's optimizer is and has; schedulers follow it."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from cells import Cell
from on_ranks import on_ranks
from problem import OPTIMIZERS, STEPS, loss_of, make_model, weights_of
from torch import nn
from torch.optim.lr_scheduler import StepLR

import hvd_pipe.torch as hvd

STRATEGIES = ["merged-gradient", "pipe-sgd", "cocod:period=4"]

pytestmark = on_ranks(2, init=hvd.init)


def wrap(model: nn.Module, plain: torch.optim.Optimizer, strategy: Any = None) -> Any:
    return hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)


def assert_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_scheduler_follows(strategy: str, before: bool) -> None:
    """The gradient is 1 on rank 0 and 2 on rank 1; learning rates are 1, 1/2, 1/4, ..."""
    torch.manual_seed(1)
    rates = 0.5 ** np.arange(6)
    model = nn.Linear(1, 1, bias=False).double()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = StepLR(plain, step_size=1, gamma=0.5) if before else None
    optimizer = wrap(model, plain, strategy)
    schedule = schedule or StepLR(optimizer, step_size=1, gamma=0.5)
    weights = [model.weight.item()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when it believes step() was never called
        for _ in rates:
            optimizer.zero_grad()
            (model.weight.sum() * (hvd.rank() + 1)).backward()
            optimizer.step()
            schedule.step()
            weights.append(model.weight.item())
    assert schedule.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
    wanted = {
        "merged-gradient": 1.5 * rates,
        "pipe-sgd": 1.5 * rates * (rates < 1),  # the first step applies nothing
        # Local updates; a round that starts with equal models ends with nothing to add.
        "cocod:period=4": (hvd.rank() + 1) * rates,
    }
    assert_close(-np.diff(weights), wanted[strategy])


@pytest.mark.parametrize(
    "pair",
    [
        ("merged-gradient", "merged-gradient"),
        ("pipe-sgd", "pipe-sgd"),
        ("merged-gradient", "pipe-sgd"),
        ("cocod:period=4", "pipe-sgd:warmup_steps=5"),
    ],
    ids=" and ".join,
)
def test_two_optimizers_in_one_script(pair: tuple[str, str]) -> None:
    """As for a GAN: two models with equal names, their optimizers stepping in turns."""
    kinds = ("momentum", "adam")
    models = [make_model() for _ in pair]
    optimizers = [
        wrap(model, OPTIMIZERS[kind](model), strategy)
        for model, kind, strategy in zip(models, kinds, pair, strict=True)
    ]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        optimizer.synchronize()
    for model, kind, strategy in zip(models, kinds, pair, strict=True):
        assert_close(weights_of(model), Cell(strategy, kind).expected(2)[hvd.rank(), -1])
