"""A small training in float64, and the same in one process that has the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

RANKS, STEPS, LR = 2, 8, 0.1

Change = Callable[[nn.Module, int], object]
"""What a script does to the gradients of a step between ``backward()`` and ``step()``."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)
    ).double()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator).double()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = (model(batch(step, rank)) ** 2).mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def leave(model: nn.Module, step: int) -> None:
    """Change nothing."""


def trained_alone(
    change: Change,
    late: bool = False,
    steps: int = STEPS,
    loss: Callable[[nn.Module, int, int], torch.Tensor] = loss_of,
) -> torch.Tensor:
    """Train one process on the mean of all ranks' gradients; or, ``late``, of the step before."""
    model = make_model()
    optimizer, pending = sgd(model), None
    for step in range(steps + 1):
        mean: Any = None
        if step < steps:
            ranks = []
            for rank in range(RANKS):
                model.zero_grad()
                loss(model, step, rank).backward()
                ranks.append(
                    [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
                )
            mean = [sum(each) / RANKS for each in zip(*ranks, strict=True)]
        if late:
            mean, pending = pending, mean
        if mean is None:
            continue
        for parameter, gradient in zip(model.parameters(), mean, strict=True):
            parameter.grad = gradient
        if step < steps:  # what is drained at the end is nobody's to change
            change(model, step)
        optimizer.step()
    return weights_of(model)
