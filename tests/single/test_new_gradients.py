"""Which gradients count as new where no hook tells."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hvd_pipe.torch.parameters import NewGradients

CHANGES: dict[str, tuple[Callable[[Any], object], bool]] = {
    "assigned": (lambda p: setattr(p, "grad", torch.zeros(3)), True),
    "in place": (lambda p: p.grad.copy_(torch.ones(3)), True),
    "sparse": (lambda p: setattr(p, "grad", torch.ones(3).to_sparse()), True),
    "zeroed": (lambda p: p.grad.zero_(), False),
    # As docs/pytorch.md says: nothing tells them from cleared ones.
    "zeros in place": (lambda p: p.grad.copy_(torch.zeros(3)), False),
    "cleared": (lambda p: setattr(p, "grad", None), False),
    "by data": (lambda p: p.grad.data.copy_(torch.ones(3)), False),
    "nothing": (lambda _: gc.collect(), False),
}


@pytest.mark.parametrize(("change", "new"), CHANGES.values(), ids=CHANGES)
def test_what_is_new(change: Callable[[Any], object], new: bool) -> None:
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
