"""Which gradients count as new where no hook tells."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hvd_pipe.torch.parameters import NewGradients


def _assigned(p: nn.Parameter) -> None:
    p.grad = torch.zeros(3)


def _in_place(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.copy_(torch.ones(3))


def _zeroed(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.zero_()


def _zeros_in_place(p: nn.Parameter) -> None:
    """As docs/pytorch.md says: nothing tells them from cleared ones."""
    assert p.grad is not None
    p.grad.copy_(torch.zeros(3))


def _cleared(p: nn.Parameter) -> None:
    p.grad = None


def _by_data(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.data.copy_(torch.ones(3))


def _nothing(_: nn.Parameter) -> None:
    gc.collect()


def _sparse(p: nn.Parameter) -> None:
    p.grad = torch.ones(3).to_sparse()


@pytest.mark.parametrize(
    ("change", "new"),
    [
        (_assigned, True),
        (_in_place, True),
        (_sparse, True),
        (_zeroed, False),
        (_zeros_in_place, False),
        (_cleared, False),
        (_by_data, False),
        (_nothing, False),
    ],
)
def test_what_is_new(change: Callable[[nn.Parameter], None], new: bool) -> None:
    """A gradient that lies in a bucket, as after a step, with ones that were applied."""
    parameter, gradients = nn.Parameter(torch.zeros(3)), NewGradients()
    parameter.grad = torch.full((5,), 2.0)[:3]
    gradients.note_old([parameter])
    change(parameter)
    assert gradients.any_new([parameter]) == new
    gradients.note_old([parameter])
    assert not gradients.any_new([parameter])


def test_a_new_tensor_where_the_old_one_was() -> None:
    """Its address and its version may be those of the one that is gone."""
    parameter, gradients = nn.Parameter(torch.zeros(3)), NewGradients()
    for _ in range(10):
        parameter.grad = torch.ones(3)
        assert gradients.any_new([parameter])
        gradients.note_old([parameter])
        parameter.grad = None
