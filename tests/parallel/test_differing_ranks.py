"""A rank that differs from the other: both are told, or the job ends; nobody waits for ever."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import on_ranks
from problem import OPTIMIZERS, Weights, loss_of, make_model, train
from ranks import run_ranks
from torch import nn
from torch.optim import SGD

import hvd_pipe.torch as hvd

AT = 5  # the step before which rank 1 does something that rank 0 does not

STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=2")


# While it trains: each is a job of its own, whose ranks end by what they raise.


def join_alone(strategy: str, how: str, compression: str, steps: int) -> None:
    """Before step `AT` a parameter joins on rank 1 alone."""
    hvd.init()
    model = make_model(torch.float32)
    late = nn.Parameter(torch.ones(7), requires_grad=how != "unfreeze")
    model.register_parameter("late", late)
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


@pytest.mark.parametrize(
    ("strategy", "how", "codec", "steps"),
    [
        ("merged-gradient", "add_param_group", "none", AT + 4),
        ("cocod:period=2,fragments=2", "add_param_group", "none", AT + 4),
        # Rank 0 has no step left after that one: it meets rank 1 in its last synchronize().
        ("pipe-sgd", "unfreeze", "int8", AT + 1),
        ("cocod:period=2", "unfreeze", "none", AT + 1),
    ],
)
def test_a_parameter_that_joins_on_one_rank(
    strategy: str, how: str, codec: str, steps: int
) -> None:
    """Not by Horovod's stall check, which would end the job with another message."""
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, join_alone, strategy, how, codec, steps)
    first, second = str(caught.value).split("--- rank ")[1:3]
    assert "HvdPipeError: ranks have sent different things" in first
    assert "HvdPipeError: ranks have sent different things" in second


# A rank that is slow differs in time only.


@on_ranks(2, init=hvd.init)
@pytest.mark.parametrize(
    "compression",
    [hvd.Compression.none, hvd.Int8(chunk=8, error_feedback=True)],
    ids=["none", "int8"],
)
@pytest.mark.parametrize(
    "strategy",
    [
        # A fixed plan: int8's chunks follow the buckets, which a measured plan may cut otherwise.
        "merged-gradient:plan=single",
        "merged-gradient:plan=wfbp",
        *STRATEGIES[1:],
        "pipe-sgd:prediction=local",
        "cocod:period=3,momentum=average",
        "cocod:period=4,fragments=4",
    ],
)
def test_a_slow_rank_changes_no_number(strategy: str, compression: Any) -> None:
    def trained(slow_rank: int | None) -> Weights:
        model = make_model(torch.float32)
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](model),
            model.named_parameters(),
            compression=compression,
            strategy=strategy,
        )

        def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
            if rank == slow_rank:
                time.sleep(0.01 * (step % 3))  # before forward, and not in every step
            return loss_of(model, rank, step)

        return train(model, optimizer, hvd.rank(), loss=loss, steps=24, drains={11, 23})

    alike = trained(None)
    for slow_rank in range(2):
        np.testing.assert_array_equal(trained(slow_rank), alike)
