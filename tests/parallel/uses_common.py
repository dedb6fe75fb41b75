"""What the uses share: a loop on ranks, and the same loop with all workers in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from problem import OPTIMIZERS, Loss, loss_of, make_model, weights_of
from serial import Change, Reduce, Workers, make_workers, mean
from torch import nn
from torch.optim import SGD, Optimizer
from uses import STRATEGIES

import hvd_pipe.torch as hvd

STEPS = 11  # of CoCoD's rounds of three steps three, and a part of one

PROCESS_SETS = {2: [], 3: [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])]}
"""By the number of ranks in a job, what to call ``hvd.init`` with."""

Array = npt.NDArray[Any]
MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], Optimizer]

MERGED, FORWARD, PIPE, COCOD = STRATEGIES
FLOAT32 = 1e-6  # of weights below 1, after some roundings
make_momentum = OPTIMIZERS["momentum"]
make_float32 = partial(make_model, torch.float32)


def make_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05)


# On a rank.


def wrap(model: nn.Module, plain: Optimizer, strategy: str, **arguments: Any) -> Any:
    return hvd.DistributedOptimizer(
        plain, model.named_parameters(), strategy=strategy, **arguments
    )


def rows(model: nn.Module, optimizer: Any, step: Callable[[int], object]) -> Array:
    """The weights after every step, and after a ``synchronize()`` at the end."""
    records = []
    for number in range(STEPS):
        step(number)
        records.append(weights_of(model))
    optimizer.synchronize()
    records.append(weights_of(model))
    return np.array(records)


def ordinary(
    strategy: str,
    *,
    make: MakeModel = make_model,
    make_optimizer: MakeOptimizer = make_momentum,
    loss: Loss = loss_of,
    **arguments: Any,
) -> Array:
    """The loop of every tutorial."""
    model = make()
    optimizer = wrap(model, make_optimizer(model), strategy, **arguments)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss(model, hvd.rank(), number).backward()
        optimizer.step()

    return rows(model, optimizer, step)


# In a test.


def simulate(
    strategy: str,
    n: int,
    *,
    make: MakeModel = make_model,
    make_optimizer: MakeOptimizer = make_momentum,
    loss: Loss = loss_of,
    reduce: Reduce = mean,
    change: Change | None = None,
    before_step: Callable[[Workers, int], object] = lambda workers, number: None,
) -> Array:
    """The same loop for all workers of the strategy."""
    workers = make_workers(strategy, n, make, make_optimizer, reduce)
    for number in range(STEPS):
        workers.backward(loss, number)
        before_step(workers, number)
        workers.step(change)
        workers.record()
    before_step(workers, STEPS)
    workers.synchronize()
    workers.record()
    return workers.trajectory


def same(**options: Any) -> dict[str, Any]:
    """The two sides of a use whose loop is ordinary."""
    return {"run": partial(ordinary, **options), "expected": partial(simulate, **options)}
