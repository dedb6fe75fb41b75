"""CoCoD on a model with BatchNorm: what each rank's replica holds at some moments."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from cases import Raised, run_cases
from problem import batch, train
from torch import nn

import hvd_pipe.torch as hvd

EXTRA_BATCHES = 7  # more of them has rank 1 seen than the others

State = dict[str, npt.NDArray[Any]]


class Moment(NamedTuple):
    """Parameters and buffers by name, and the momenta."""

    parameters: State
    buffers: State
    momenta: State


class Normed(nn.Module):
    """A convolution and a linear layer, each with BatchNorm behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten())
        self.decoder = nn.Sequential(nn.Linear(16, 3), nn.BatchNorm1d(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.decoder(torch.tanh(self.encoder(inputs)))
        return result


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.mse_loss(model(inputs.unsqueeze(1)), targets)


def loss_of_parts(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """As a script does that keeps its encoder and its decoder apart."""
    assert isinstance(model, Normed)
    inputs, targets = batch(rank, step)
    hidden = model.encoder(inputs.unsqueeze(1))
    return nn.functional.mse_loss(model.decoder(torch.tanh(hidden)), targets)


def moments(loss: Any) -> list[Moment]:
    """After ten steps, after ``synchronize()``, after three more steps, after it once more."""
    torch.manual_seed(3)
    model = Normed().double()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy="cocod")
    if hvd.rank() == 1:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                assert module.num_batches_tracked is not None
                module.num_batches_tracked += EXTRA_BATCHES
    result = []
    for steps in (10, 3):
        train(model, optimizer, hvd.rank(), loss=loss, steps=steps)
        result.append(_moment(model, optimizer))
        optimizer.synchronize()
        result.append(_moment(model, optimizer))
    return result


def _moment(model: nn.Module, optimizer: Any) -> Moment:
    def copy(tensors: Any) -> State:
        return {name: np.array(tensor.detach()) for name, tensor in tensors}

    return Moment(
        copy(model.named_parameters()),
        copy(model.named_buffers()),
        copy((n, optimizer.state[p]["momentum_buffer"]) for n, p in model.named_parameters()),
    )


CASES = {"a model": partial(moments, loss), "its parts": partial(moments, loss_of_parts)}


def run() -> dict[str, list[Moment] | Raised]:
    hvd.init()
    return run_cases(CASES)
