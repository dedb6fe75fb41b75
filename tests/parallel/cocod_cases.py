"""CoCoD's options: runs by case, on a rank and for n workers in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from problem import OPTIMIZERS as COMMON
from problem import STEPS, Weights, loss_of, make_model
from serial import CoCoD as CoCoDWorkers
from serial import make_workers
from torch import nn
from torch.optim import Adam, Optimizer

import hvd_pipe.torch as hvd
from hvd_pipe.strategy import CoCoD
from hvd_pipe.torch.compression import Compression, Int8


def _hasty_adam(model: nn.Module) -> Optimizer:
    """Second moments that fall quickly, so that mean + (end - start) can be below zero."""
    return Adam(model.parameters(), lr=0.01, betas=(0.9, 0.2), eps=1e-3)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {**COMMON, "hasty adam": _hasty_adam}


@dataclass(frozen=True)
class Case:
    """One run; ``weights`` beyond the number of ranks are left out."""

    options: CoCoD
    optimizer: str = "momentum"
    drains: tuple[int, ...] = ()
    compression: str = "none"
    dtype: torch.dtype = torch.float64

    def strategy(self, n: int) -> CoCoD:
        weights = self.options.weights
        return CoCoD(**{**vars(self.options), "weights": weights and weights[:n]})

    def __str__(self) -> str:
        what = [f"{k}={v}" for k, v in vars(self.options).items() if v != getattr(CoCoD(), k)]
        what += [self.optimizer, self.compression, str(self.dtype).removeprefix("torch.")]
        return ", ".join([*what, *([f"drained after {self.drains}"] if self.drains else [])])


COMPRESSIONS: dict[str, Any] = {
    "none": Compression.none,
    "fp16": Compression.fp16,
    "bf16": Compression.bf16,
    "int8": Compression.int8,
    "int8 with feedback": Int8(error_feedback=True),
}

WEIGHTS = (3.0, 1.0, 2.5, 1.5)
PULL = {"pull_back": 0.6, "anchor_momentum": 0.7}
OUTER = {"outer": "nesterov", "outer_lr": 0.3, "outer_momentum": 0.6}

EXACT = [
    Case(CoCoD(weights=WEIGHTS)),
    Case(CoCoD(weights=WEIGHTS), "adam", drains=(13, 14)),
    Case(CoCoD(3, 4, weights=WEIGHTS)),
    Case(CoCoD(3, 4, weights=WEIGHTS), "adam", drains=(2, 13)),
    Case(CoCoD(momentum="average")),
    Case(CoCoD(momentum="average"), "adam"),
    Case(CoCoD(momentum="average"), "hasty adam", drains=(13, 14)),
    Case(CoCoD(3, 4, momentum="average", weights=WEIGHTS), "adam", drains=(2, 13)),
    Case(CoCoD(pull_back=0.6)),
    Case(CoCoD(pull_back=0.6), "adam", drains=(13, 14)),
    Case(CoCoD(**PULL)),
    Case(CoCoD(2, 5, **PULL), "adam", drains=(2, 13)),
    Case(CoCoD(momentum="average", weights=WEIGHTS, **PULL), "momentum", drains=(13,)),
    Case(CoCoD(**OUTER)),
    Case(CoCoD(2, 5, **OUTER), "adam", drains=(2, 13, 14)),
    Case(CoCoD(momentum="average", weights=WEIGHTS, **OUTER), "adam", drains=(13,)),
    Case(CoCoD(fragments=2)),
    Case(CoCoD(6, 4, fragments=3), "adam", drains=(2, 13, 14)),
    Case(CoCoD(fragments=4, weights=WEIGHTS), "adam", drains=(13,)),
    Case(CoCoD(fragments=2, **PULL), "adam", drains=(15,)),
    Case(CoCoD(4, 3, fragments=4, **OUTER), drains=(12,)),
]
WITHIN = [
    Case(CoCoD(within="node")),
    Case(CoCoD(3, 4, within="node", weights=WEIGHTS), "adam", drains=(13,)),
    Case(CoCoD(fragments=4, within="node", **OUTER), "adam", drains=(2, 14)),
    Case(CoCoD(2, within="node", momentum="average"), drains=(7,)),
]
COMPRESSED = [
    Case(CoCoD(), compression="fp16", drains=(13,)),
    Case(CoCoD(3, 4), "adam", compression="fp16"),
    Case(CoCoD(weights=WEIGHTS), compression="fp16"),
    Case(CoCoD(momentum="average", **PULL), "adam", compression="fp16"),
    Case(CoCoD(2, **OUTER), compression="fp16", drains=(13,)),
    Case(CoCoD(fragments=4), compression="fp16", drains=(14,)),
]
CODED = [
    Case(CoCoD(), compression="bf16", drains=(13,)),
    Case(CoCoD(), compression="int8"),
    Case(CoCoD(weights=WEIGHTS), compression="int8 with feedback", drains=(13,)),
    Case(CoCoD(fragments=2), compression="int8 with feedback", drains=(13,)),
]
HALF = [
    Case(CoCoD(), dtype=torch.float16),
    Case(CoCoD(weights=WEIGHTS, momentum="average"), dtype=torch.float16),
    Case(CoCoD(pull_back=0.6), dtype=torch.float16),
    Case(CoCoD(), dtype=torch.bfloat16),
]


# On a rank ---------------------------------------------------------------------------------------


def wrap(
    model: nn.Module, case: Case, *, n: int | None = None, plain: Optimizer | None = None
) -> Any:
    """Wrap an optimizer; ``n`` is how many ranks there are to be."""
    return hvd.DistributedOptimizer(
        plain or OPTIMIZERS[case.optimizer](model),
        model.named_parameters(),
        compression=COMPRESSIONS[case.compression],
        strategy=case.strategy(n or hvd.size()),
    )


@cache
def trajectory(case: Case) -> Weights:
    """As `problem.train` does it, also for a dtype that numpy lacks."""
    model = make_model(case.dtype)
    optimizer, records = wrap(model, case), []

    def record() -> None:
        wide = torch.promote_types(case.dtype, torch.float32)
        records.append(torch.cat([p.detach().flatten() for p in model.parameters()]).to(wide))

    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        record()
        if step in case.drains or step == STEPS - 1:
            optimizer.synchronize()
            record()
    return torch.stack(records).numpy()


def make_reference(case: Case, n: int, leaves_after: int | None = None) -> CoCoDWorkers:
    """Workers in one process that do as ranks do."""
    workers = make_workers(
        case.strategy(n),
        n,
        make_model,
        OPTIMIZERS[case.optimizer],
        halves=case.compression == "fp16" and n > 1,
        leaves_after=leaves_after,
    )
    assert isinstance(workers, CoCoDWorkers)
    return workers


@cache
def expected(case: Case, n: int) -> Weights:
    return make_reference(case, n).train(STEPS, drains={*case.drains, STEPS - 1})
