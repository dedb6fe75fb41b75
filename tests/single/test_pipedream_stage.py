"""A worker's stage in PyTorch, beside no other worker."""

from __future__ import annotations

import math

import pytest
import torch
from horovod.common.process_sets import ProcessSet
from torch import nn

from hvd_pipe.pipeline.messages import Boundary
from hvd_pipe.pipeline.stage import Buffer, Clipping, Feed, MicrobatchIndex, Norms
from hvd_pipe.torch.pipedream.graph import cut, specs, trace
from hvd_pipe.torch.pipedream.stage import TorchStage
from hvd_pipe.torch.pipedream.tensors import TorchMessages, split
from hvd_pipe.torch.pipedream.weights import Updates, WeightVersions


class Shifted(nn.Module):
    """A stage that ends in the sum of a parameter, which reaches it by views alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.zeros(4))
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)) + self.shift.unsqueeze(0)
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("samples", [1, 2])
def test_gradients_do_not_stay_in_the_memory_of_messages(samples: int) -> None:
    """Autograd gives a parameter the very gradient that has come, where nothing is to be summed.

    The message's memory is then posted for the next one, before the gradient is applied.
    """
    sample = (torch.ones(2, 4),)
    traced = trace(Shifted(), sample)
    names = [layer.name for layer in traced.layers]
    cuts = cut(traced, [names[:-1], names[-1:]], specs(traced, sample))
    device = torch.device("cpu")
    boundary = Boundary(cuts[0].outputs, lambda x: TorchMessages(x, 2, "stage 0", False, device))

    def overwrite(message: Buffer) -> None:
        message[:] = 255

    optimizer = torch.optim.SGD(cuts[0].module.parameters(), lr=1.0)
    clipping = Clipping(None, False, Norms(0, 2), None, ProcessSet([0]), lambda x, *_: x)
    updates = Updates(optimizer, None, None, clipping, mean=True)
    stage = TorchStage(cuts[0], None, updates, None, boundary, False, overwrite, device)
    stage.feed = Feed([(torch.ones(samples, 4), torch.zeros(samples, 2))], 1, split)
    stage.begin(training=True)
    index, norms = MicrobatchIndex(0, 0), (math.nan, math.nan)
    stage.forward(index, 0)
    stage.output(index)
    gradient = torch.full((samples, 4), 0.5)
    stage.take_gradient(index, boundary.gradients.pack(index, [gradient], 0, norms))
    stage.backward(index, 0)
    stage.update(1, keep=False)
    assert cuts[0].module.get_parameter("shift").tolist() == [-0.5 * samples] * 4


@pytest.mark.parametrize("keep", [True, False])
def test_optimizers_may_give_parameters_other_tensors(keep: bool) -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    versions = WeightVersions([weight])
    with versions.updating(1, keep):
        weight.data = weight.data + 1.0
    if keep:
        versions.use(0)
        assert weight.item() == 1.0
    versions.restart()
    assert weight.item() == 2.0
