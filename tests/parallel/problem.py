"""The training problem that ranks and the serial reference share: a model, optimizers and data.

Everything is a function of the rank and the step, so a run on n ranks and a simulation of n
workers in one process see the same numbers. Float64 unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

STEPS = 30

Weights = npt.NDArray[Any]  # of the model's dtype
Loss = Callable[[nn.Module, int, int], torch.Tensor]  # of a model, a rank and a step


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Six tensors of 24 to 240 bytes in float64: some share a bucket of 64 bytes, most do not."""
    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return layers.to(dtype)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Eight inputs and targets; no two workers and no two steps see the same ones."""
    generator = torch.Generator().manual_seed(100_000 * (rank + 1) + step)
    inputs = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    targets = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), targets.to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step, next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(inputs), targets)


def _momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def _adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01)


def _adamw_in_groups(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "lr": 0.01, "weight_decay": 0.1},
        {"params": vectors, "lr": 0.03, "weight_decay": 0.0},
    ]
    return AdamW(groups)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "momentum": _momentum,
    "adam": _adam,
    "adamw-groups": _adamw_in_groups,
}


def weights_of(model: nn.Module) -> Weights:
    """All parameters in one vector, copied; a state dict waits for updates that were deferred."""
    state = model.state_dict()
    vector = torch.cat([state[name].flatten() for name, _ in model.named_parameters()])
    return vector.cpu().numpy().copy()


def train(
    model: nn.Module,
    optimizer: Any,
    rank: int,
    *,
    loss: Loss = loss_of,
    steps: int = STEPS,
    first: int = 0,
    passes: int = 1,
    drains: Collection[int] = (),
    scaler: torch.amp.GradScaler | None = None,
) -> Weights:
    """An ordinary loop from step ``first`` on; the weights after each, and each ``synchronize()``.

    That one is called after the steps in ``drains``. The step's number that ``loss`` gets goes up
    with each of the ``passes`` backward passes a step.
    """
    records = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for number in range(passes):
            loss_now = loss(model, rank, step * passes + number)
            (loss_now if scaler is None else scaler.scale(loss_now)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        records.append(weights_of(model))
        if step in drains:
            optimizer.synchronize()
            records.append(weights_of(model))
    return np.array(records)


LR_OF_ONE = 2.0**-6


def one_weight(strategy: str) -> tuple[nn.Linear, Any]:
    """On a rank: a model whose gradient is 1 on all ranks in every step, and its optimizer."""
    from hvd_pipe.torch import DistributedOptimizer  # noqa: PLC0415 - references need none

    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    plain = SGD(model.parameters(), lr=LR_OF_ONE)
    return model, DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)


def update_one(model: nn.Linear, optimizer: Any, steps: int, gradient: float = 1.0) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        (model.weight.sum() * gradient).backward()
        optimizer.step()


def updates_of(model: nn.Linear) -> float:
    """The sum of all updates so far, in units of the learning rate."""
    return -model.weight.item() / LR_OF_ONE
