"""CoCoD: replicas differ between rounds and are equal, buffers too, after synchronize()."""

from __future__ import annotations

from typing import Any

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


def copied(tensors: Any) -> State:
    return {name: np.array(tensor.detach()) for name, tensor in tensors}


@on_ranks(3, init=hvd.init)  # a mean of three is not exact
@pytest.mark.parametrize("loss", [loss, loss_of_parts], ids=["a model", "its parts"])
def test_replicas_are_equal_to_their_mean_after_synchronize(loss: Loss) -> None:
    """After ten steps, and after three more. Momenta stay local, and integers are rank 0's."""
    torch.manual_seed(3)
    model = Normed().double()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy="cocod")
    if hvd.rank() == 1:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                assert module.num_batches_tracked is not None
                module.num_batches_tracked += EXTRA_BATCHES

    def moment() -> tuple[State, State]:
        """The state of the model, and the momenta."""
        momenta = ((n, optimizer.state[p]["momentum_buffer"]) for n, p in model.named_parameters())
        return copied(model.state_dict().items()), copied(momenta)

    batches = 0
    for steps in (10, 3):
        batches += steps
        train(model, optimizer, hvd.rank(), loss=loss, steps=steps)
        before, momenta = moment()
        optimizer.synchronize()
        after, same = moment()
        everyone, ends = gather(before), gather(after)
        for name, value in after.items():
            for other in ends:
                np.testing.assert_array_equal(other[name], value, name)
            seen = [state[name] for state in everyone]
            if value.dtype.kind == "f":
                np.testing.assert_allclose(value, np.mean(seen, axis=0), rtol=0, atol=1e-12)
                if not name.endswith("0.bias"):  # those of a layer before BatchNorm do not learn
                    assert not np.array_equal(seen[0], seen[1]), name
            else:
                extra = EXTRA_BATCHES if batches == 10 else 0
                assert [*map(int, seen)] == [batches, batches + extra, batches]
                assert int(value) == batches
        for name, value in momenta.items():
            np.testing.assert_array_equal(same[name], value, name)
        first, *others = gather(momenta)
        for other in others:
            assert not np.array_equal(first["encoder.0.weight"], other["encoder.0.weight"])
