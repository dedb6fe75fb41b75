"""Pipe-SGD's weight prediction: it is its equation, and how far it moves the limit of stability.

The limits are those of `stable_rate`; docs/pipe-sgd.md has a table of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from on_ranks import gather, on_ranks
from problem import OPTIMIZERS as COMMON
from problem import loss_of, make_model, weights_of
from serial import make_workers
from torch import nn
from torch.optim import SGD, Optimizer

import hvd_pipe.torch as hvd
from hvd_pipe.planning.methods import stable_rate

STEPS = 16
PREDICTIONS = ("none", "local", "previous")
MOMENTA = (0.0, 0.5, 0.9)
FACTORS = (0.95, 1.05)  # of the limit
LEARNING_RATE = 0.1
CENTRES = (1.0, 3.0)  # of the ranks
QUADRATIC_STEPS = {"none": 3000, "local": 400, "previous": 400}

Array = npt.NDArray[np.float64]
two = on_ranks(2, init=hvd.init)


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


def nesterov(model: nn.Module) -> Optimizer:
    """One that changes gradients in place."""
    return SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True)


OPTIMIZERS = {**COMMON, "nesterov": nesterov}


def state_of(optimizer: Optimizer, kind: str) -> Array:
    """What the optimizer keeps of every parameter, in one vector; zeros before its first step."""
    parts = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key in STATES[kind]:
                value = optimizer.state.get(p, {}).get(key)
                numel = 1 if key == "step" else p.numel()
                parts.append(np.zeros(numel) if value is None else value.numpy().reshape(-1))
    return np.concatenate(parts)


@cache
def simulate(cell: Cell) -> tuple[Array, Array]:
    """All workers' weights, and the state of an optimizer, which is the same on all of them."""
    workers = make_workers(cell.strategy, 2, make_model, OPTIMIZERS[cell.optimizer])
    states = []

    def record() -> None:
        workers.record()
        states.append(state_of(workers.optimizers[0], cell.optimizer))

    for step in range(STEPS):
        workers.backward(loss_of, *range(step * cell.passes, (step + 1) * cell.passes))
        workers.step()
        record()
        if step in cell.drains or step == STEPS - 1:
            workers.synchronize()
            record()
    return workers.trajectory, np.array(states)


@two
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_trajectory(cell: Cell) -> None:
    """Gradients are computed at the predicted weights, and the true ones come back.

    The guess "previous" was the gradient as the update had left it: SGD with ``nesterov`` and
    ``foreach`` adds the momentum to it, in place. The optimizer and the user's hooks know of true
    updates only.
    """
    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(
        OPTIMIZERS[cell.optimizer](model),
        model.named_parameters(),
        backward_passes_per_step=cell.passes,
        strategy=cell.strategy,
    )
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    weights, states, updates = [], [], 0

    def record() -> None:
        weights.append(weights_of(model))
        states.append(state_of(optimizer, cell.optimizer))
        assert calls == ["before", "after"] * updates

    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(cell.passes):
            loss_of(model, hvd.rank(), step * cell.passes + number).backward()
        optimizer.step()
        updates = step + (step < cell.warmup)  # the last gradient is in flight
        record()
        if step in cell.drains or step == STEPS - 1:
            optimizer.synchronize()
            updates = step + 1
            record()
    wanted, wanted_states = simulate(cell)
    np.testing.assert_allclose(weights, wanted[hvd.rank()], rtol=0, atol=1e-12)
    np.testing.assert_allclose(states, wanted_states, rtol=0, atol=1e-12)
    # Replicas are equal after the last synchronize(); with "previous", which all guess, always.
    rows = slice(-1, None) if cell.prediction == "local" else slice(None)
    first, second = gather((np.array(weights)[rows], np.array(states)))
    assert np.array_equal(first[0], second[0])
    assert np.array_equal(first[1], second[1])


@two
@pytest.mark.parametrize("prediction", PREDICTIONS[1:])
def test_a_guess_has_its_own_loss_scale(prediction: str) -> None:
    """Scales are powers of two, so weights are those of a run without one."""
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
    weights.append(weights_of(model))
    wanted = simulate(Cell(prediction, "momentum"))[0][hvd.rank()]
    np.testing.assert_allclose(weights, wanted, rtol=0, atol=1e-12)


def test_predictions_can_be_told_apart() -> None:
    for optimizer in STATES:
        ends = [simulate(Cell(prediction, optimizer))[0][0, -1] for prediction in PREDICTIONS]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert np.abs(ends[one] - ends[other]).max() > 1e-3


@two
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_stability(prediction: str) -> None:
    """The weights come to rest just below the limit, and go off just above it.

    L/2 (w - c)**2 is minimised from 0, with another centre c on every rank. There is a weight for
    every momentum and every factor of the limit: they do not meet.
    """
    weights = [nn.Parameter(torch.zeros(len(FACTORS)).double()) for _ in MOMENTA]
    limits = [stable_rate(hvd.PipeSGD(prediction=prediction), mu) for mu in MOMENTA]
    curvatures = [torch.tensor(FACTORS).double() * each / LEARNING_RATE for each in limits]
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
    parts = np.array_split(np.abs(np.diff(records, axis=0)), 10)
    early, late = parts[0].max(axis=0), parts[-1].max(axis=0)  # by momentum and factor
    for row in range(len(MOMENTA)):
        for column, factor in enumerate(FACTORS):
            stable = factor < 1
            ratio = late[row, column] / early[row, column]
            assert ratio < 1e-2 if stable else ratio > 1e2
            if stable:
                assert float(weights[row][column]) == pytest.approx(np.mean(CENTRES), abs=1e-2)
