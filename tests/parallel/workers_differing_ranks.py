"""Two ranks of which one differs: test_differing_ranks.py says what becomes of them."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from cases import run_cases
from problem import OPTIMIZERS, Weights, loss_of, make_model, train
from torch import nn
from torch.optim import SGD

import hvd_pipe.torch as hvd

AT = 5  # the step before which rank 1 does something that rank 0 does not

STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=2")


# While it trains: each is a job of its own, as ranks that have gone apart do not come together.


def late_weight(frozen: bool) -> tuple[nn.Module, nn.Parameter]:
    model = make_model(torch.float32)
    late = nn.Parameter(torch.ones(7), requires_grad=not frozen)
    model.register_parameter("late", late)
    return model, late


def join_alone(strategy: str, how: str, compression: str, steps: int) -> None:
    """Before step `AT` a parameter joins on rank 1 alone; what follows is not caught."""
    hvd.init()
    model, late = late_weight(frozen=how == "unfreeze")
    known = [p for p in model.parameters() if p is not late or how == "unfreeze"]
    optimizer: Any = hvd.DistributedOptimizer(
        SGD(known, lr=0.01),
        model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        strategy=strategy,
    )
    for step in range(steps):
        if (hvd.rank(), step) == (1, AT):
            if how == "unfreeze":
                late.requires_grad_(True)
            else:
                optimizer.add_param_group({"params": [late]})
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        if late.requires_grad:
            loss = loss + late.square().sum()
        loss.backward()
        optimizer.step()
    optimizer.synchronize()


def fail_alone(strategy: str, compression: str) -> None:
    """Rank 1's forward pass raises in the middle of training."""
    hvd.init()
    model = make_model(torch.float32)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adam"](model),
        model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        strategy=strategy,
    )

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        if (rank, step) == (1, AT):
            raise RuntimeError("rank 1 has no memory left")
        return loss_of(model, rank, step)

    train(model, optimizer, hvd.rank(), loss=loss)


# A rank that is slow differs in time only.

PACES = {"alike": (0.0, 0.0), "rank 0 is slow": (0.01, 0.0), "rank 1 is slow": (0.0, 0.01)}
PACED = (
    # A fixed plan: int8's chunks follow the buckets, which a measured plan may cut otherwise.
    "merged-gradient:plan=single",
    "merged-gradient:plan=wfbp",
    *(strategy for strategy in STRATEGIES if strategy != "merged-gradient"),
    "pipe-sgd:prediction=local",
    "cocod:period=3,momentum=average",
    "cocod:period=4,fragments=4",
)


def paced(strategy: str, compression: Any, pauses: tuple[float, float]) -> Weights:
    model = make_model(torch.float32)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model),
        model.named_parameters(),
        compression=compression,
        strategy=strategy,
    )

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        time.sleep(pauses[rank] * (step % 3))  # before forward, and not in every step
        return loss_of(model, rank, step)

    return train(model, optimizer, hvd.rank(), loss=loss, steps=24, drains={11, 23})


def run_paced() -> dict[Any, Any]:
    hvd.init()
    codecs = {"none": hvd.Compression.none, "int8": hvd.Int8(chunk=8, error_feedback=True)}
    return run_cases(
        {
            (strategy, codec, pace): partial(paced, strategy, codecs[codec], PACES[pace])
            for strategy in PACED
            for codec in codecs
            for pace in PACES
        }
    )
