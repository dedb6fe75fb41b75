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
nightly = pytest.mark.nightly


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


def check_both_are_told(*args: object) -> None:
    """Not by Horovod's stall check, which would end the job with another message."""
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, join_alone, *args)
    first, second = str(caught.value).split("--- rank ")[1:3]
    assert "HvdPipeError: ranks have sent different things" in first
    assert "HvdPipeError: ranks have sent different things" in second


@pytest.mark.parametrize(
    ("how", "codec"),
    # nightly: as the last steps' below, but for the codec
    [("add_param_group", "none"), pytest.param("unfreeze", "int8", marks=nightly)],
)
@pytest.mark.parametrize(
    "strategy", [*STRATEGIES, "cocod:period=2,warmup_steps=20", "cocod:period=2,fragments=2"]
)
def test_a_parameter_that_joins_on_one_rank(strategy: str, how: str, codec: str) -> None:
    check_both_are_told(strategy, how, codec, AT + 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_that_joins_on_one_rank_at_the_very_end(strategy: str) -> None:
    """Rank 0 has no step left after that one: it meets rank 1 in its last synchronize()."""
    check_both_are_told(strategy, "unfreeze", "none", AT + 1)


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


@pytest.mark.parametrize(
    "strategy", [STRATEGIES[0], *(pytest.param(each, marks=nightly) for each in STRATEGIES[1:])]
)
def test_an_exception_on_one_rank_ends_the_job(strategy: str) -> None:
    codec = "int8" if strategy == "pipe-sgd" else "none"
    with pytest.raises(AssertionError, match="rank 1 has no memory left") as caught:
        run_ranks(2, fail_alone, strategy, codec)
    assert "stall" not in str(caught.value).lower()  # Horovod's own check, after a minute


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
