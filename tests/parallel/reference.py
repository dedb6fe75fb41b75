"""The equations of the strategies, carried out for n workers in one process.

Plain torch and none of hvd_pipe's code: n copies of the model, an ordinary optimizer each, and
Python loops where the real thing has messages. Each function returns the weights of every worker
after every step, and once more after each ``synchronize()``, which comes after the steps in
``drains`` and after the last one. Shape: (workers, records, weights).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch
from problem import STEPS, loss_of, make_model, weights_of
from torch import nn
from torch.optim import Optimizer

Vectors = list[torch.Tensor]  # one value a parameter
Trajectory = npt.NDArray[np.float64]
MakeOptimizer = Callable[[nn.Module], Optimizer]


class Workers:
    """n models with their optimizers; ``passes`` backward passes make one gradient, their sum."""

    def __init__(self, n: int, make_optimizer: MakeOptimizer, passes: int = 1) -> None:
        self.models = [make_model() for _ in range(n)]
        self.optimizers = [make_optimizer(model) for model in self.models]
        self.passes = passes
        self.records: list[list[npt.NDArray[np.float64]]] = [[] for _ in range(n)]

    def gradients(self, step: int) -> list[Vectors]:
        """g_i: each worker's gradient of its own data at its own weights."""
        for rank, model in enumerate(self.models):
            model.zero_grad()
            for number in range(self.passes):
                loss_of(model, rank, step * self.passes + number).backward()
        return [[_grad(p).clone() for p in model.parameters()] for model in self.models]

    def update(self, gradients: Sequence[Vectors]) -> None:
        """One step of each worker's optimizer, with the gradient given for it."""
        for model, optimizer, gradient in zip(
            self.models, self.optimizers, gradients, strict=True
        ):
            for p, g in zip(model.parameters(), gradient, strict=True):
                p.grad = g.clone()
            optimizer.step()

    @property
    def positions(self) -> list[Vectors]:
        return [[p.detach().clone() for p in model.parameters()] for model in self.models]

    def move(self, positions: Sequence[Vectors]) -> None:
        with torch.no_grad():
            for model, position in zip(self.models, positions, strict=True):
                for p, x in zip(model.parameters(), position, strict=True):
                    p.copy_(x)

    def record(self) -> None:
        for record, model in zip(self.records, self.models, strict=True):
            record.append(weights_of(model))

    @property
    def trajectory(self) -> Trajectory:
        return np.array(self.records)


def mean(vectors: Sequence[Vectors]) -> list[Vectors]:
    """The average over workers, handed to every worker."""
    average = [torch.stack(column).mean(0) for column in zip(*vectors, strict=True)]
    return [average for _ in vectors]


def synchronous(
    n: int, make_optimizer: MakeOptimizer, passes: int = 1, drains: Collection[int] = ()
) -> Trajectory:
    """w[t+1] = update(w[t], mean_i g_i(w[t])): stock Horovod, and MergedGradient."""
    workers = Workers(n, make_optimizer, passes)
    for step in range(STEPS):
        workers.update(mean(workers.gradients(step)))
        workers.record()
        if step in drains or step == STEPS - 1:
            workers.record()  # nothing is ever pending, so synchronize() changes nothing
    return workers.trajectory


def pipe_sgd(
    n: int,
    make_optimizer: MakeOptimizer,
    passes: int = 1,
    drains: Collection[int] = (),
    *,
    warmup: int,
) -> Trajectory:
    """w[t+1] = update(w[t], mean_i g_i(w[t-1])), once the warm-up is over."""
    workers = Workers(n, make_optimizer, passes)
    pending: list[Vectors] | None = None
    for step in range(STEPS):
        average = mean(workers.gradients(step))
        if step < warmup:
            workers.update(average)
        else:
            if pending is not None:
                workers.update(pending)
            pending = average
        workers.record()
        if step in drains or step == STEPS - 1:
            if pending is not None:
                workers.update(pending)
            pending = None
            workers.record()
    return workers.trajectory


def cocod(
    n: int,
    make_optimizer: MakeOptimizer,
    passes: int = 1,
    drains: Collection[int] = (),
    *,
    period: int,
    warmup: int,
) -> Trajectory:
    """x_i[s+1] = mean_j x_j[s] + (x_i after k local steps - x_i[s]), once the warm-up is over."""
    workers = Workers(n, make_optimizer, passes)
    start: list[Vectors] = []
    local_steps = 0
    for step in range(STEPS):
        gradients = workers.gradients(step)
        if step < warmup:
            workers.update(mean(gradients))
        else:
            if local_steps == 0:
                start = workers.positions
            workers.update(gradients)
            local_steps += 1
            if local_steps == period:
                workers.move(_mean_plus_progress(start, workers.positions))
                local_steps = 0
        workers.record()
        if step in drains or step == STEPS - 1:
            workers.move(mean(workers.positions))
            local_steps = 0
            workers.record()
    return workers.trajectory


def _mean_plus_progress(start: list[Vectors], end: list[Vectors]) -> list[Vectors]:
    return [
        [a + (e - s) for a, e, s in zip(average, ends, starts, strict=True)]
        for average, ends, starts in zip(mean(start), end, start, strict=True)
    ]


def _grad(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad
