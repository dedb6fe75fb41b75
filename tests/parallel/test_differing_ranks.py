"""A rank that differs from the other: both are told, or the job ends; nobody waits for ever."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from problem import loss_of, make_model
from ranks import run_ranks
from torch import nn
from torch.optim import SGD

import hvd_pipe.torch as hvd

AT = 5  # the step before which rank 1 does something that rank 0 does not


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
