"""CoCoD: replicas differ between rounds and are equal, buffers too, after synchronize()."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from on_ranks import gather, on_ranks
from problem import Loss, batch, train
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


LOSSES = {"a model": loss, "its parts": loss_of_parts}

pytestmark = [
    on_ranks(3, init=hvd.init),  # a mean of three is not exact
    pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES),
]


@functools.cache
def moments(loss: Loss) -> list[list[Moment]]:
    """Each rank's: after ten steps, a ``synchronize()``, three more steps, and another one."""
    torch.manual_seed(3)
    model = Normed().double()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy="cocod")
    if hvd.rank() == 1:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                assert module.num_batches_tracked is not None
                module.num_batches_tracked += EXTRA_BATCHES

    def copy(tensors: Any) -> State:
        return {name: np.array(tensor.detach()) for name, tensor in tensors}

    def moment() -> Moment:
        named = list(model.named_parameters())
        momenta = copy((name, optimizer.state[p]["momentum_buffer"]) for name, p in named)
        return Moment(copy(named), copy(model.named_buffers()), momenta)

    mine = []
    for steps in (10, 3):
        train(model, optimizer, hvd.rank(), loss=loss, steps=steps)
        mine.append(moment())
        optimizer.synchronize()
        mine.append(moment())
    return gather(mine)


def at(loss: Loss, number: int) -> list[Moment]:
    return [rank[number] for rank in moments(loss)]


def assert_means(before: list[State], after: list[State]) -> None:
    for name in before[0]:
        mean = np.mean([state[name] for state in before], axis=0)
        for state in after:
            np.testing.assert_allclose(state[name], mean, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("moment", [0, 2])
def test_replicas_differ_between(loss: Loss, moment: int) -> None:
    """In what they learn, what they have seen, and the momenta that they build from it."""
    first, *others = at(loss, moment)
    for other in others:
        for name in ("encoder.0.weight", "encoder.1.weight", "decoder.0.weight", "decoder.1.bias"):
            assert not np.array_equal(first.parameters[name], other.parameters[name]), name
            assert not np.array_equal(first.momenta[name], other.momenta[name]), name
        for name in ("encoder.1.running_mean", "decoder.1.running_var"):
            assert not np.array_equal(first.buffers[name], other.buffers[name]), name


@pytest.mark.parametrize("moment", [1, 3])
def test_replicas_are_equal_after_synchronize(loss: Loss, moment: int) -> None:
    first, *others = at(loss, moment)
    for other in others:
        for name, value in (first.parameters | first.buffers).items():
            assert np.array_equal(value, (other.parameters | other.buffers)[name]), name


@pytest.mark.parametrize("moment", [0, 2])
def test_they_are_equal_to_the_mean(loss: Loss, moment: int) -> None:
    before, after = at(loss, moment), at(loss, moment + 1)
    assert_means([m.parameters for m in before], [m.parameters for m in after])
    floating = [
        [{k: v for k, v in m.buffers.items() if v.dtype.kind == "f"} for m in moments]
        for moments in (before, after)
    ]
    assert sorted(floating[0][0]) == [
        "decoder.1.running_mean",
        "decoder.1.running_var",
        "encoder.1.running_mean",
        "encoder.1.running_var",
    ]
    assert_means(*floating)


def test_integer_buffers_come_from_rank_0(loss: Loss) -> None:
    name = "encoder.1.num_batches_tracked"
    seen = [[int(rank.buffers[name]) for rank in at(loss, moment)] for moment in range(4)]
    assert seen == [[10, 10 + EXTRA_BATCHES, 10], [10] * 3, [13] * 3, [13] * 3]


@pytest.mark.parametrize("moment", [0, 2])
def test_momenta_stay_local(loss: Loss, moment: int) -> None:
    for before, after in zip(at(loss, moment), at(loss, moment + 1), strict=True):
        for name, value in before.momenta.items():
            assert np.array_equal(value, after.momenta[name]), name
