"""Pipe-SGD with weight prediction: trajectories, and quadratics near the limit of stability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cases import Raised, run_cases
from problem import OPTIMIZERS as COMMON
from problem import loss_of, make_model, weights_of
from torch import nn
from torch.optim import SGD, Optimizer

import hvd_pipe.torch as hvd

STEPS = 16
PREDICTIONS = ("none", "local", "previous")

Array = npt.NDArray[np.float64]
Limits = Mapping[tuple[str, float], float]  # by prediction and momentum


@dataclass(frozen=True)
class Cell:
    """One run: ``passes`` backward passes a step; ``synchronize()`` after the steps in drains."""

    prediction: str
    optimizer: str
    warmup: int = 0
    passes: int = 1
    drains: tuple[int, ...] = ()

    @property
    def strategy(self) -> str:
        return f"pipe-sgd:prediction={self.prediction},warmup_steps={self.warmup}"

    def __str__(self) -> str:
        passes = f", {self.passes} passes" if self.passes > 1 else ""
        drains = f", drained after {self.drains}" if self.drains else ""
        return f"{self.prediction}, {self.optimizer}, warm-up {self.warmup}{passes}{drains}"


CELLS = [
    Cell(prediction, optimizer, warmup, **options)
    for prediction in ("local", "previous")
    for optimizer in ("momentum", "adam")
    for warmup in (0, 5)
    for options in ({}, {"passes": 2}, {"drains": (3, 8, 9)})
]
CELLS += [Cell(prediction, "nesterov") for prediction in ("local", "previous")]
STATES = {
    "momentum": ("momentum_buffer",),
    "nesterov": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "step"),
}


def _nesterov(model: nn.Module) -> Optimizer:
    """One that changes gradients in place."""
    return SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True)


OPTIMIZERS = {**COMMON, "nesterov": _nesterov}


def state_of(optimizer: Optimizer, kind: str) -> Array:
    """What the optimizer keeps of every parameter, in one vector; zeros before its first step."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key in STATES[kind]:
                value = optimizer.state.get(p, {}).get(key)
                numel = 1 if key == "step" else p.numel()
                found.append(np.zeros(numel) if value is None else value.numpy().reshape(-1))
    return np.concatenate(found)


def trajectory(cell: Cell) -> dict[str, Any]:
    """After every step and every ``synchronize()``: weights, state, how often hooks have run."""
    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(
        OPTIMIZERS[cell.optimizer](model),
        model.named_parameters(),
        backward_passes_per_step=cell.passes,
        strategy=cell.strategy,
    )
    calls = {"before": 0, "after": 0}

    def count(when: str, *_: Any) -> None:
        calls[when] += 1

    optimizer.register_step_pre_hook(partial(count, "before"))
    optimizer.register_step_post_hook(partial(count, "after"))
    weights, states, hooks = [], [], []

    def record() -> None:
        weights.append(weights_of(model))
        states.append(state_of(optimizer, cell.optimizer))
        hooks.append((calls["before"], calls["after"]))

    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(cell.passes):
            loss_of(model, hvd.rank(), step * cell.passes + number).backward()
        optimizer.step()
        record()
        if step in cell.drains or step == STEPS - 1:
            optimizer.synchronize()
            record()
    return {"weights": np.array(weights), "states": np.array(states), "hooks": hooks}


def scaled(prediction: str) -> Array:
    """The weights as `trajectory` has them, with gradients of a scaled loss."""
    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model),
        model.named_parameters(),
        strategy=f"pipe-sgd:prediction={prediction}",
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    weights = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, hvd.rank(), step)).backward()
        scaler.step(optimizer)
        scaler.update()
        weights.append(weights_of(model))
    optimizer.synchronize()
    return np.array([*weights, weights_of(model)])


MOMENTA = (0.0, 0.5, 0.9)
FACTORS = (0.95, 1.05)  # of the limit
LEARNING_RATE = 0.1
CENTRES = (1.0, 3.0)  # of the ranks
QUADRATIC_STEPS = {"none": 3000, "local": 400, "previous": 400}


def quadratic(prediction: str, limits: Limits) -> tuple[Array, Array]:
    """Minimise L/2 (w - c)**2, with another centre c on every rank, from 0.

    There is a weight for every momentum and every factor of the limit: they do not meet.

    Returns:
        The weights at which gradients are computed, after every step; the weights after the final
        ``synchronize()``. Momenta are the last axis but one, factors the last.
    """
    weights = [nn.Parameter(torch.zeros(len(FACTORS)).double()) for _ in MOMENTA]
    curvatures = [
        torch.tensor(FACTORS).double() * limits[prediction, mu] / LEARNING_RATE for mu in MOMENTA
    ]
    groups = [{"params": [w], "momentum": mu} for w, mu in zip(weights, MOMENTA, strict=True)]
    optimizer = hvd.DistributedOptimizer(
        SGD(groups, lr=LEARNING_RATE), strategy=f"pipe-sgd:prediction={prediction}"
    )
    records = []
    for _ in range(QUADRATIC_STEPS[prediction]):
        optimizer.zero_grad()
        torch.stack(
            [
                (curvature / 2 * (w - CENTRES[hvd.rank()]) ** 2).sum()
                for w, curvature in zip(weights, curvatures, strict=True)
            ]
        ).sum().backward()
        optimizer.step()
        records.append(torch.stack([w.detach() for w in weights]).numpy())
    optimizer.synchronize()
    return np.array(records), torch.stack([w.detach() for w in weights]).numpy()


def run(limits: Limits) -> dict[Any, Any | Raised]:
    hvd.init()
    return run_cases(
        {
            **{cell: partial(trajectory, cell) for cell in CELLS},
            **{f"scaled {name}": partial(scaled, name) for name in PREDICTIONS[1:]},
            **{name: partial(quadratic, name, limits) for name in PREDICTIONS},
        }
    )
