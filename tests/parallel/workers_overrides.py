"""The functions that we replace: state that one rank alone has loaded; ends in unequal steps."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from cases import run_cases
from problem import OPTIMIZERS, Weights, make_model, train, weights_of

import hvd_pipe.torch as hvd

STEPS_BEFORE = 3
OPTIMIZER_NAMES = ("momentum", "adam", "adamw-groups")


def resumed(name: str, wrapped: bool) -> tuple[Weights, dict[str, Any]]:
    """Rank 0 trains alone, and hands weights and optimizer state on; then all ranks train."""
    model = make_model()
    optimizer: Any = OPTIMIZERS[name](model)
    if hvd.rank() == 0:
        train(model, optimizer, rank=0, steps=STEPS_BEFORE)
        optimizer.param_groups[0]["lr"] = 0.02
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = copy.deepcopy(optimizer.state_dict())  # its tensors go on living
    if not wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    return train(model, optimizer, hvd.rank(), steps=4), state


def lbfgs_state() -> dict[str, Any]:
    """Horovod refuses this one: its state is nested and holds None."""
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    if hvd.rank() == 0:

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 6, dtype=torch.float64)).pow(2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer.state_dict()


def run() -> dict[Any, Any]:
    hvd.init()
    cases: dict[Any, Any] = {
        (name, wrapped): lambda name=name, wrapped=wrapped: resumed(name, wrapped)
        for name in OPTIMIZER_NAMES
        for wrapped in (True, False)
    }
    return run_cases({**cases, "lbfgs": lbfgs_state})


def leave_in_flight(strategy: str, slow_rank: int) -> Weights:
    """Train and return without synchronize(), one rank a while after the other."""
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    for step in range(4):
        if hvd.rank() == slow_rank:
            time.sleep(0.5)
        train(model, optimizer, hvd.rank() + step, steps=1)
    return weights_of(model)


def leave_by_exception() -> None:
    """Rank 1 fails with a message in flight; it must not stay to see it arrive."""
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy="pipe-sgd"
    )
    train(model, optimizer, hvd.rank(), steps=2)
    if hvd.rank() == 1:
        raise RuntimeError("rank 1 stops here")
    train(model, optimizer, hvd.rank(), steps=2)
