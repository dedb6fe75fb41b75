"""Uses of models: of several dtypes, compiled, recomputed; and of how gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.torch as stock
import numpy as np
import torch
from problem import batch, loss_of, make_model, weights_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from uses_common import STEPS, Array, Script, make_momentum, make_sgd

import hvd_pipe.torch as hvd

# Models: of several dtypes, compiled, with recomputed or shared parts, in autocast.

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Mixed(nn.Module):
    """A linear map of each dtype; they share nothing, so that each has its own dtype's errors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.maps = nn.ModuleList(nn.Linear(6, 3).to(dtype) for dtype in DTYPES)

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [next(each.parameters()).dtype for each in self.maps]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        parts = [
            each(inputs.to(dtype)) for each, dtype in zip(self.maps, self.dtypes, strict=True)
        ]
        return torch.stack([part.double() for part in parts])


def mixed_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.mse_loss(model(inputs), targets.expand(len(DTYPES), -1, -1))


def mixed(strategy: str) -> Array:
    """In units of the dtype's precision: what a rounding of a weight near 1 may change."""
    model = Mixed()

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        for p in model.parameters():
            assert p.grad is None or p.grad.dtype == p.dtype
        return mixed_loss(model, rank, step)

    return Script(make=lambda: model, loss=loss).run(strategy) / precisions(model)


def simulate_mixed(strategy: str, n: int) -> Array:
    """The same model, all of it in float64."""
    weights = Script(make=lambda: Mixed().double(), loss=mixed_loss).expected(strategy, n)
    return weights / precisions(Mixed())


def precisions(model: nn.Module) -> Array:
    return np.concatenate(
        [np.full(p.numel(), torch.finfo(p.dtype).eps) for p in model.parameters()]
    )


def compiled(strategy: str) -> Array:
    torch.compiler.reset()
    make: Any = partial(torch.compile, make_model(), backend="aot_eager")
    return Script(make=make).run(strategy)


def checkpointed_loss(model: nn.Module, rank: int, step: int, use_reentrant: bool) -> torch.Tensor:
    assert isinstance(model, nn.Sequential)
    inputs, targets = batch(rank, step)
    hidden = checkpoint(model[1:4], model[0](inputs), use_reentrant=use_reentrant)
    return nn.functional.mse_loss(model[4](hidden), targets)


def autocast_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, rank, step)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(14)
        self.first, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        self.last.weight = self.first.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(inputs)))[:, :3]


# How gradients are reduced.


def adasum(strategy: str) -> Array:
    """Beside stock Horovod's own."""
    ours = Script(arguments={"op": hvd.Adasum}).run(strategy)
    model = make_model()
    optimizer = stock.DistributedOptimizer(
        make_momentum(model), model.named_parameters(), op=stock.Adasum
    )
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), number).backward()
        optimizer.step()
        np.testing.assert_allclose(ours[number], weights_of(model), rtol=0, atol=1e-12)
    return ours


def in_groups(strategy: str, groups: Callable[[list[nn.Parameter]], Any]) -> Array:
    model = make_model()
    arguments = {"groups": groups(list(model.parameters()))}
    return Script(make=lambda: model, arguments=arguments).run(strategy)


LARGEST_GRADIENT = 0.8
LOSSES = {"fp16": 3 * 2.0**-11, "int8": 2 / 254}
"""What a compressor may lose of a gradient, as a part of the largest one in a message.

float16: one rounding of each worker's, one of the sum, one of the average. Codecs: one of each
worker's and one of the average.
"""


def compressed(strategy: str, kind: str) -> Array:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        for p in model.parameters():
            assert p.grad is None or float(p.grad.abs().max()) < LARGEST_GRADIENT
        return loss_of(model, rank, step)

    arguments = {"compression": getattr(hvd.Compression, kind)}
    return Script(make_optimizer=make_sgd, loss=loss, arguments=arguments).run(strategy)


def compression_tolerance(kind: str) -> float:
    """The sum of the errors of all updates; the descent does not make them larger.

    Under CoCoD it is models that lose as much: of a round, a part of what it moved the model by,
    which is the updates in it.
    """
    return STEPS * 0.05 * LOSSES[kind] * LARGEST_GRADIENT
