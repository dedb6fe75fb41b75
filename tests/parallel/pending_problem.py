"""A small training in float64, and the same in one process that has the gradients of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from on_ranks import gather
from serial import Vectors, make_workers
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.strategy import MergedGradient, PipeSGD

RANKS, STEPS, LR = 2, 8, 0.1

Change = Callable[[nn.Module, int], object]
"""What a script does to the gradients of a step between ``backward()`` and ``step()``."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 3)
    ).double()


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator).double()


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = (model(batch(step, rank)) ** 2).mean()
    return loss


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def leave(model: nn.Module, step: int) -> None:
    """Change nothing."""


def trained_alone(
    change: Change,
    late: bool = False,
    steps: int = STEPS,
    loss: Callable[[nn.Module, int, int], torch.Tensor] = loss_of,
) -> torch.Tensor:
    """Train one process on the mean of all ranks' gradients; or, ``late``, of the step before."""
    strategy = "pipe-sgd" if late else "merged-gradient"
    workers = make_workers(strategy, RANKS, make_model, sgd, mean)
    for step in range(steps):
        workers.backward(lambda model, rank, step: loss(model, step, rank), step)
        workers.step(lambda model, step=step: change(model, step))
    workers.synchronize()  # what is drained at the end is nobody's to change
    return weights_of(workers.models[0])


def mean(ranks: Sequence[Vectors]) -> Vectors:
    """The average, in which a parameter that a rank has no gradient of counts as zero."""
    columns = [[g for g in column if g is not None] for column in zip(*ranks, strict=True)]
    return [torch.stack(column).sum(0) / RANKS for column in columns]


# On ranks.

EXACT = {
    "merged-gradient": MergedGradient(bucket_bytes=400),
    "overlap": MergedGradient(bucket_bytes=400, overlap="forward"),
}
PIPE = {"pipe-sgd": PipeSGD(bucket_bytes=400)}
SENDING = pytest.mark.parametrize("name", [*EXACT, *PIPE])


def distributed(model: nn.Module, name: str, **arguments: Any) -> Any:
    strategy = {**EXACT, **PIPE}[name]
    optimizer = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), strategy=strategy, **arguments
    )
    if name == "overlap":  # updates are deferred after the first step, which changes nothing
        for _ in range(optimizer._hvd_pipe.settings.passes):
            torch.stack(
                [p.sum() * 0.0 for p in model.parameters() if p.requires_grad]
            ).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def train(model: nn.Module, optimizer: Any, steps: range, change: Change = leave) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        change(model, step)
        optimizer.step()


def check(model: nn.Module, optimizer: Any, change: Change, name: str) -> None:
    """Drain, and compare with one process."""
    optimizer.synchronize()
    wanted = trained_alone(change, late=name in PIPE)
    torch.testing.assert_close(weights_of(model), wanted, rtol=0, atol=1e-15)


def assert_equal_on_ranks(model: nn.Module) -> None:
    first, second = gather(weights_of(model).tolist())
    assert first == second


def clip(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@contextlib.contextmanager
def raises_on_all(kind: type[Exception], match: str) -> Iterator[None]:
    with pytest.raises(kind, match=match) as caught:
        yield
    assert len(set(gather(str(caught.value)))) == 1


@contextlib.contextmanager
def out_of_memory_at(parameter: torch.Tensor, ranks: tuple[int, ...] = (1,)) -> Iterator[None]:
    """A backward pass raises where it comes to a parameter, on some ranks."""
    if hvd.rank() not in ranks:
        yield
        return

    def fail(gradient: torch.Tensor) -> None:
        raise MemoryError("out of memory")

    hook = parameter.register_hook(fail)
    with pytest.raises(MemoryError):
        yield
    hook.remove()
