"""When buckets leave under torch.compile: what docs/uses.md says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hvd_pipe.torch as hvd

LAYERS = 6
progress: list[int] = []
"""How many gradients were ready each time that the backward pass came by a layer."""

ready = [0]


@torch.library.custom_op("hvd_pipe_test::mark", mutates_args=())
def mark(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@mark.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("hvd_pipe_test::mark_backward", mutates_args=())
def mark_backward(gradient: torch.Tensor) -> torch.Tensor:
    progress.append(ready[0])
    return gradient.clone()


@mark_backward.register_fake
def _(gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient)


mark.register_autograd(lambda context, gradient: mark_backward(gradient))


class Marked(nn.Module):
    """A layer that the backward pass notes as it comes by; compilers leave operators whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(mark(x)))


def gradients_ready(compiled: str) -> list[int]:
    """For each layer from the last one on: how many gradients had been ready by then."""
    torch.compiler.reset()
    hvd.init()
    layers = [Marked() for _ in range(LAYERS)]
    if compiled == "layer by layer":
        model: Any = nn.Sequential(*(torch.compile(each, backend="aot_eager") for each in layers))
    else:
        model = nn.Sequential(*layers)
    run = torch.compile(model, backend="aot_eager") if compiled == "whole" else model
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        strategy="merged-gradient:plan=wfbp",
    )
    engine: Any = optimizer._hvd_pipe  # type: ignore[attr-defined]
    on_gradient, collect = engine.on_gradient, engine.collect

    def counted(index: int, gradient: torch.Tensor) -> None:
        on_gradient(index, gradient)
        ready[0] = len(engine.current.completed)

    def collected(index: int, gradient: torch.Tensor) -> bool:
        taken = bool(collect(index, gradient))
        ready[0] = len(engine.current.completed)
        return taken

    engine.on_gradient, engine.collect = counted, collected
    found = []
    for _ in range(2):  # in the first step, compilers compile
        progress.clear()
        ready[0] = 0
        optimizer.zero_grad()
        run(torch.ones(2, 4, requires_grad=True)).sum().backward()
        optimizer.step()
        found = list(progress)
    return found


@pytest.mark.parametrize("compiled", ["not", "layer by layer"])
def test_gradients_come_during_the_backward_pass(compiled: str) -> None:
    found = gradients_ready(compiled)
    assert len(found) == LAYERS
    assert found[1:] == sorted(found[1:])
    # A layer's own two gradients may still be to come when the pass leaves it.
    assert all(count >= 2 * (i - 1) for i, count in enumerate(found))


def test_a_model_that_is_compiled_whole_has_its_gradients_at_the_end() -> None:
    """Its backward pass is one function to autograd: nothing can travel behind it."""
    assert gradients_ready("whole") == [0] * LAYERS
