"""MergedGradient does what stock Horovod does, bit for bit at two ranks, in float32.

At two ranks a sum has one rounding whatever the order of its terms, so equality is exact even
while the plan changes from the default one to the measured one; that happens in every run here
that is not given a plan. Compression.fp16 rounds each gradient before the sum, so it, too, is
exact.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import horovod.torch as stock
import numpy as np
import pytest
import torch
from branching import (
    SWITCH,
    Branches,
    Heads,
    branches_loss,
    heads_loss,
    never_right_loss,
    opposite_branches_loss,
)
from hops import hops_between
from on_ranks import on_ranks
from problem import STEPS, Loss, Weights, batch, loss_of, make_model, train
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.torch.strategies import base
from hvd_pipe.torch.strategies.settings import GradientHooks

two = on_ranks(2, init=hvd.init)

TENSORS = 6  # of the model
MAX_CALLED, MAX_FILES = 88, 17  # that are called meanwhile, 8 of a recorder that notes nothing


def mixed_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step, torch.float32)
    head, tail = model.children()
    return nn.functional.mse_loss(tail(torch.tanh(head(inputs)).double()), targets.double())


def mixed_dtypes() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3).double())


def compare(
    make: Callable[[], nn.Module],
    loss: Loss = loss_of,
    options: Callable[[ModuleType], dict[str, Any]] = lambda _: {},
    steps: int = STEPS,
    **strategy: str,
) -> Weights:
    """Train by stock Horovod, then by us, from the same weights on the same data, to the same."""
    both = []
    for module in (stock, hvd):
        torch.manual_seed(1)
        model = make()
        plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        given = options(module)
        optimizer = module.DistributedOptimizer(
            plain, model.named_parameters(), **given, **(strategy if module is hvd else {})
        )
        passes = given.get("backward_passes_per_step", 1)
        both.append(train(model, optimizer, module.rank(), loss=loss, steps=steps, passes=passes))
    wanted, ours = both
    assert wanted.shape == ours.shape
    different = np.flatnonzero((wanted != ours).any(axis=1))
    assert not len(different), (
        f"{len(different)} of {len(wanted)} steps differ, the first is step {different[0]}, "
        f"at most by {np.abs(wanted - ours).max():.3g}"
    )
    assert not np.array_equal(wanted[0], wanted[-1])  # it did learn something
    return ours


class MaxScaled:
    """A compressor of a user's own: 127 levels up to a message's largest value.

    It stays float32, so that values can be summed on the wire.
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        scale = tensor.abs().max() / 127
        return (tensor / scale).round() * scale if scale > 0 else tensor.clone(), None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: None) -> torch.Tensor:
        return tensor


def small_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Gradients that are far below the control words, which are ones."""
    return loss_of(model, rank, step) * 1e-3


MLP = partial(make_model, torch.float32)

CASES: dict[str, Callable[[], Weights]] = {
    "as it is": partial(compare, MLP),
    "two passes": partial(compare, MLP, options=lambda _: {"backward_passes_per_step": 2}),
    "sum": partial(compare, MLP, options=lambda module: {"op": module.Sum}),
    "predivide": partial(compare, MLP, options=lambda _: {"gradient_predivide_factor": 2.0}),
    "fp16": partial(compare, MLP, options=lambda module: {"compression": module.Compression.fp16}),
    "a compressor of the user's own": partial(
        compare,
        MLP,
        small_loss,
        options=lambda _: {"compression": MaxScaled},
        strategy="merged-gradient:plan=wfbp",
    ),
    "groups": partial(compare, MLP, options=lambda _: {"groups": 2}),
    "a head that only some ranks use": partial(compare, Heads, heads_loss),
    "a head that only some ranks use, one message a tensor": partial(
        compare, Heads, heads_loss, strategy="merged-gradient:plan=wfbp"
    ),
    "a head that nobody uses": partial(compare, Heads, never_right_loss),
    "two dtypes": partial(compare, mixed_dtypes, mixed_loss),
    "two dtypes, one message": partial(
        compare, mixed_dtypes, mixed_loss, strategy="merged-gradient:plan=single"
    ),
    "branches that change places": partial(compare, Branches, branches_loss, steps=3 * SWITCH),
    "ranks with opposite orders": partial(
        compare, Branches, opposite_branches_loss, steps=2 * STEPS
    ),
}


@two
@pytest.mark.parametrize("case", CASES)
def test_equal_to_stock_horovod(case: str) -> None:
    CASES[case]()


@two
def test_a_gradient_passes_few_functions() -> None:
    """A ratchet; docs/architecture.md draws them, from a gradient's hook to parameters' update.

    A step's first gradient does more: it begins the step. What earlier tests have left would be
    called, too.
    """
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        strategy="merged-gradient:plan=wfbp",
    )

    def step() -> None:
        loss_of(model, hvd.rank(), 0).backward()
        optimizer.step()

    step()
    step()
    gc.collect()
    gc.disable()
    with hops_between(base._hook(GradientHooks()).__code__, first=1, last=TENSORS) as hops:
        step()
    gc.enable()
    listed = "\n".join(f"{hop.file} {hop.function}" for hop in hops)
    assert hops[0].function == "_hook.<locals>.on_gradient", listed
    assert "DistributedMixin._apply" in listed
    assert len(hops) <= MAX_CALLED, listed
    assert len({hop.file for hop in hops}) <= MAX_FILES, listed
