"""Horovod's own `broadcast_optimizer_state` on one rank, where it fails half-way."""

from __future__ import annotations

import horovod.torch as stock
import pytest
import torch
from torch import nn

import hvd_pipe.torch as hvd


@pytest.fixture(autouse=True, scope="module")
def initialised() -> None:
    hvd.init()


def test_the_next_step_is_a_step_where_the_broadcast_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Horovod makes a step of zeros in it, which is left out. When it failed before that, the next
    step of the training was left out instead, and the next broadcast did nothing.
    """
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0, momentum=0.9), [("w", parameter)]
    )
    for clears in (False, True):
        before = parameter.detach().clone()
        fail(optimizer, monkeypatch)
        if clears:
            optimizer.zero_grad()
        (parameter.sum() * 3).backward()
        optimizer.step()
        assert not torch.equal(parameter, before)
        optimizer.state.clear()
    fail(optimizer, monkeypatch)
    before = parameter.detach().clone()
    stock.broadcast_optimizer_state(optimizer, 0)
    assert torch.equal(parameter, before)
    optimizer.zero_grad()
    parameter.sum().backward()
    optimizer.step()
    assert torch.equal(parameter, before - 1)


def fail(optimizer: torch.optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no memory for the zeros with which Horovod makes its step."""

    def new(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new", new)
        with pytest.raises(MemoryError):
            stock.broadcast_optimizer_state(optimizer, 0)
