"""Scripts that keep ``import horovod.torch as hvd`` and take the optimizer alone from here."""

from __future__ import annotations

import importlib
import warnings
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from cases import run_cases
from problem import Weights, make_model, train, weights_of
from torch import nn
from workers_resume import (
    FEEDBACK,
    PLANNED,
    Array,
    Case,
    advance,
    finish,
    load,
    saved,
)

from hvd_pipe.runtime.watch import watchdog
from hvd_pipe.torch import DistributedOptimizer

LR = 2.0**-6
EARLY, LATE, MORE = 5, 25, 16  # a plan is due between the first two, and in the last, if none is
STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=2")
BEFORE, AFTER = 7, 20  # steps before hvd.shutdown(), and after hvd.init()

RESUMED = [
    *(
        Case(strategy, optimizer)
        for strategy in ("merged-gradient", "pipe-sgd", "pipe-sgd:prediction=previous")
        for optimizer in ("momentum", "adam", "adamw-groups", "sgd")
    ),
    Case("merged-gradient", saved=PLANNED),
    Case("cocod:period=4", "sgd", saved=8),  # drained before it is saved
]


def resumed(case: Case, before: int) -> tuple[list[Array], list[Array]]:
    """A run beside one that rank 0 alone loads; all have stepped ``before`` times."""
    model, optimizer = case.start()
    advance(model, optimizer, range(case.saved))
    if case.strategy.startswith("cocod"):
        optimizer.synchronize()
    content = saved(model, optimizer) if hvd.rank() == 0 else b""
    whole = finish(case, model, optimizer)
    model, optimizer = case.start(seed=8 + hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    advance(model, optimizer, range(50, 50 + before))
    if hvd.rank() == 0:
        load(model, optimizer, content)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return whole, finish(case, model, optimizer)


def fresh(name: str) -> tuple[Weights, Weights, float, Weights]:
    """Nobody has a state: weights before and after, the rate, and weights two steps later."""
    model, optimizer = Case("merged-gradient", name).start()
    if hvd.rank() == 0:
        optimizer.param_groups[0]["lr"] = 0.125
    before = weights_of(model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    rate = float(optimizer.param_groups[0]["lr"])
    after = weights_of(model)
    train(model, optimizer, hvd.rank(), steps=2)
    return before, after, rate, weights_of(model)


def names() -> tuple[list[str], bool]:
    """What scripts read of Horovod's optimizers."""
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    found = optimizer._parameter_names
    return list(found.values()), all(p in found for p in model.parameters())


def warned() -> list[str]:
    model = make_model()
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    model(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(one.message) for one in caught]


def one_weight(strategy: str) -> tuple[nn.Linear, Any]:
    """A model whose gradient is 1 on both ranks in every step."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=LR)
    return model, DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)


def step(model: nn.Linear, optimizer: Any) -> None:
    optimizer.zero_grad()
    model.weight.sum().backward()
    optimizer.step()


def joined(strategy: str) -> tuple[float, float, float]:
    """Uneven data: rank 0 has less. The weight after joining, synchronizing and going on."""
    model, optimizer = one_weight(strategy)
    for _ in range(LATE if hvd.rank() else EARLY):
        step(model, optimizer)
    hvd.join()
    before = model.weight.item()
    optimizer.synchronize()
    after = model.weight.item()
    for _ in range(MORE):
        step(model, optimizer)
    optimizer.synchronize()
    return before, after, model.weight.item()


def mixed() -> tuple[float, float]:
    """Messages of the script's own between backward and step, by name, handle and number."""
    model, optimizer = one_weight("pipe-sgd")
    total = 0.0
    for _ in range(5):
        optimizer.zero_grad()
        model.weight.sum().backward()
        handle = hvd.allreduce_async(torch.ones(3) * hvd.rank(), op=hvd.Sum)
        optimizer.step()
        total += float(hvd.synchronize(handle)[0]) + float(hvd.allreduce(torch.ones(1), name="x"))
    optimizer.synchronize()
    return total, model.weight.item()


def init_again() -> float:
    """A library calls hvd.init() once more, on one rank only, between two steps."""
    model, optimizer = one_weight("merged-gradient")
    for number in range(6):
        if number == 3 and hvd.rank() == 1:
            hvd.init()
        step(model, optimizer)
    return model.weight.item()


def run() -> tuple[bool, dict[Any, Any]]:
    hvd.init()
    cases: dict[Any, Any] = {
        f"{before} before: {case}": partial(resumed, case, before)
        for case in RESUMED
        for before in (0, 3)
    }
    cases |= {("fresh", name): partial(fresh, name) for name in ("adamw-groups", "sgd")}
    cases |= {"names": names, "warned": warned, "mixed": mixed, "init again": init_again}
    cases |= {("joined", strategy): partial(joined, strategy) for strategy in STRATEGIES}
    results = run_cases(cases)
    return watchdog._reporter is not None, results


# Horovod can start again over MPI, if somebody else has initialised that. Over Gloo it may find
# where the other ranks listened the time before, and abort.


def restarted(case: Case) -> tuple[list[Array], list[Array]]:
    """A run beside one in which Horovod ends after some steps and starts again."""
    model, optimizer = case.start()
    whole = advance(model, optimizer, range(BEFORE + AFTER))
    optimizer.synchronize()
    whole.append(weights_of(model))
    model, optimizer = case.start()
    rows = advance(model, optimizer, range(BEFORE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hvd.shutdown()
    optimizer.state_dict()
    hvd.init()
    rows += advance(model, optimizer, range(BEFORE, BEFORE + AFTER))
    optimizer.synchronize()
    return whole, [*rows, weights_of(model)]


RESTARTED = [
    Case("merged-gradient"),
    Case("pipe-sgd", "adam"),
    Case("cocod:period=3"),
    Case("pipe-sgd", compression=FEEDBACK),
]


def run_restarts() -> dict[Any, Any]:
    importlib.import_module("mpi4py.MPI")
    hvd.init()
    cases = {str(case): partial(restarted, case) for case in RESTARTED}
    results = run_cases(cases)
    results["watched"] = watchdog._reporter is not None
    hvd.shutdown()
    return results
