"""State from one rank reaches all; a rank that ends early does not end the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import workers_overrides
from cases import of_case
from problem import OPTIMIZERS, make_model, train
from ranks import once, run_ranks
from workers_overrides import OPTIMIZER_NAMES, STEPS_BEFORE

results = once(lambda: run_ranks(2, workers_overrides.run))


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped before", "wrapped after"])
@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_a_state_that_rank_0_alone_has_loaded(name: str, wrapped: bool) -> None:
    """Stock Horovod hangs here: it steps on ranks whose state is empty, and on those only."""
    model = make_model()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, rank=0, steps=STEPS_BEFORE)
    optimizer.param_groups[0]["lr"] = 0.02
    ranks = of_case(results(), (name, wrapped))
    for _, state in ranks:
        plain = {key: value for key, value in state.items() if key != "hvd_pipe"}
        assert_same(plain, optimizer.state_dict())
    np.testing.assert_array_equal(ranks[0][0], ranks[1][0])


def test_nested_state() -> None:
    first, second = of_case(results(), "lbfgs")
    assert first["state"]
    assert_same(first, second)


@pytest.mark.parametrize("slow_rank", [0, 1])
@pytest.mark.parametrize("strategy", ["pipe-sgd", "cocod:period=2"])
def test_a_script_may_end_without_synchronize(strategy: str, slow_rank: int) -> None:
    """The fast rank used to shut Horovod down while the slow one was about to send its last."""
    weights = run_ranks(2, workers_overrides.leave_in_flight, strategy, slow_rank)
    assert all(np.isfinite(w).all() for w in weights)


def test_an_exception_ends_the_job_at_once() -> None:
    with pytest.raises(AssertionError, match="rank 1 stops here"):
        run_ranks(2, workers_overrides.leave_by_exception)
