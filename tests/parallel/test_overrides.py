"""State from one rank reaches all; a rank that ends early does not end the others."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from on_ranks import gather, on_ranks
from problem import OPTIMIZERS, make_model, train, weights_of
from ranks import run_ranks

import hvd_pipe.torch as hvd

two = on_ranks(2, init=hvd.init)


@two
def test_nested_state() -> None:
    """Horovod refuses LBFGS: its state is nested and holds None."""
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
    first, second = gather(optimizer.state_dict())
    assert first["state"]
    torch.testing.assert_close(first, second, rtol=0, atol=0)


# Ends of scripts: each a job of its own, whose ranks end when they return.


def wrapped(strategy: str) -> tuple[Any, Any]:
    hvd.init()
    model = make_model()
    plain = OPTIMIZERS["momentum"](model)
    return model, hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)


def leave_in_flight(strategy: str, slow_rank: int) -> bool:
    """Train and return without synchronize(), one rank a while after the other."""
    model, optimizer = wrapped(strategy)
    for step in range(4):
        if hvd.rank() == slow_rank:
            time.sleep(0.5)
        train(model, optimizer, hvd.rank() + step, steps=1)
    return bool(np.isfinite(weights_of(model)).all())


def leave_by_exception() -> None:
    """Rank 1 fails with a message in flight; it must not stay to see it arrive."""
    model, optimizer = wrapped("pipe-sgd")
    train(model, optimizer, hvd.rank(), steps=2)
    if hvd.rank() == 1:
        raise RuntimeError("rank 1 stops here")
    train(model, optimizer, hvd.rank(), steps=2)


@pytest.mark.parametrize(("strategy", "slow_rank"), [("pipe-sgd", 1), ("cocod:period=2", 0)])
def test_a_script_may_end_without_synchronize(strategy: str, slow_rank: int) -> None:
    """The fast rank used to shut Horovod down while the slow one was about to send its last."""
    assert run_ranks(2, leave_in_flight, strategy, slow_rank) == [True, True]


def test_an_exception_ends_the_job_at_once() -> None:
    with pytest.raises(AssertionError, match="rank 1 stops here"):
        run_ranks(2, leave_by_exception)
