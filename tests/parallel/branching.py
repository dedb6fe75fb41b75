"""Models that use other parameters, or use them in another order, on other ranks or steps."""

from __future__ import annotations

import torch
from problem import batch
from torch import nn

SWITCH = 40  # the step after which the branches of `Branches` change places


class Heads(nn.Module):
    """Two heads, of which a forward pass uses those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = (nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3))

    def forward(self, inputs: torch.Tensor, left: bool, right: bool) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        return sum(
            (head(hidden) for head, used in ((self.left, left), (self.right, right)) if used),
            start=hidden[:, :3],
        )


class Branches(nn.Module):
    """Two layers, either of which may come first; gradients come in the opposite order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor, a_first: bool) -> torch.Tensor:
        first, second = (self.a, self.b) if a_first else (self.b, self.a)
        hidden: torch.Tensor = self.out(torch.tanh(second(torch.tanh(first(inputs)))))
        return hidden


def heads_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """The right head: used by all ranks, by rank 0 only, by rank 1 only, by none, and so on."""
    inputs, targets = batch(rank, step, torch.float32)
    users: tuple[tuple[int, ...], ...] = ((0, 1), (0,), (1,), ())
    right = rank in users[step % len(users)]
    return nn.functional.mse_loss(model(inputs, left=True, right=right), targets)


def never_right_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """A parameter without a gradient on any rank at any step, as in a model partly in use."""
    inputs, targets = batch(rank, step, torch.float32)
    return nn.functional.mse_loss(model(inputs, left=True, right=False), targets)


def branches_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = batch(rank, step, torch.float32)
    return nn.functional.mse_loss(model(inputs, a_first=step < SWITCH), targets)


def opposite_branches_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """On no step do the two ranks' gradients come in the same order."""
    inputs, targets = batch(rank, step, torch.float32)
    return nn.functional.mse_loss(model(inputs, a_first=rank == 0), targets)
