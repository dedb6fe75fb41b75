"""Which model's buffers CoCoD averages: the one that runs with the optimizer's parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from hvd_pipe.torch.strategies.model_average import ModelBuffers

Values = dict[str, torch.Tensor]


def model_with_statistics() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def own(model: nn.Module) -> Values:
    return dict(model.named_parameters())


def computed(model: nn.Module) -> Values:
    return {name: value * 1.0 for name, value in model.named_parameters()}


def after_an_inner_step(model: nn.Module) -> Values:
    """Fast weights, as for learning to learn."""
    names, values = zip(*model.named_parameters(), strict=True)
    loss = functional_call(model, dict(zip(names, values, strict=True)), (inputs(),)).pow(2).mean()
    gradients = torch.autograd.grad(loss, values, create_graph=True)
    fast = (value - 0.1 * g for value, g in zip(values, gradients, strict=True))
    return dict(zip(names, fast, strict=True))


def inputs() -> torch.Tensor:
    return torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize("make", [own, computed, after_an_inner_step])
def test_a_model_that_runs_by_functional_call(make: object) -> None:
    """With computed weights in the parameters' places, the model was not found.

    CoCoD then left each rank its own statistics of batches, and said nothing.
    """
    model, other = model_with_statistics(), model_with_statistics()
    values = make(model)  # type: ignore[operator]
    buffers = ModelBuffers()
    buffers.want(list(model.parameters()))
    other(inputs())
    functional_call(model, values, (inputs(),)).sum().backward()
    buffers.step()
    buffers.step()
    assert [reference() for reference in buffers._models] == [model]
