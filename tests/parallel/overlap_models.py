"""Models and optimizers that meet `overlap="forward"` in different ways."""

from __future__ import annotations

from typing import Any

import torch
from problem import batch, make_model
from torch import nn
from torch.optim import SGD

ODD = 11  # the step in which something changes


class Attention(nn.Module):
    """``out_proj`` is read by its parent, and never called; dropout draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.grow = nn.Linear(6, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.encoder(self.grow(inputs)[None])[0])
        return result


class Tied(nn.Module):
    """The head has the weights of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = (inputs.abs().sum(1) * 7).long() % 10
        result: torch.Tensor = self.head(torch.tanh(self.middle(self.embedding(tokens))))
        return result[:, :3]


class Skipping(nn.Module):
    """Leaves layers out in some steps, not the same on all ranks; has an early exit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.early = nn.Linear(6, 3)
        self.number = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        if self.number % 5 == 4:
            return self.early(hidden)  # type: ignore[no-any-return]
        if self.number % 3 != 2:
            hidden = torch.tanh(self.middle(hidden))
        return self.last(hidden)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM hands its weights to one function."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(6, 5, 2), nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.lstm(inputs)[0])
        return result


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(10, 6, sparse=True), nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = (inputs.abs().sum(1) * 7).long() % 10
        result: torch.Tensor = self.out(self.embedding(tokens))
        return result


class Clipping(SGD):
    """Clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        super().step()


def numbered_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Early exits at the same steps on all ranks, skipped layers one step apart."""
    inputs, targets = batch(rank, step, next(model.parameters()).dtype)
    model.number = step + (rank if step % 5 < 3 else 0)  # type: ignore[assignment]
    return nn.functional.mse_loss(model(inputs), targets)


def sequential() -> nn.Module:
    return make_model(torch.float32)


def pending(optimizer: Any) -> list[int]:
    """The buckets that are not applied yet."""
    return list(getattr(getattr(optimizer, "_hvd_pipe", None), "_pending", ()))


def read_all(model: nn.Module, _: Any, step: int) -> None:
    """A script that logs the norm of its weights."""
    assert sum(float(p.detach().norm()) for p in model.parameters()) > 0
