"""Models of all kinds that a pipeline must cut, with a sample for each; and a serial pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from hvd_pipe.torch.pipedream.graph import StageModule

Sample = tuple[Tensor, ...]


class Plain(nn.Module):
    """Convolutions, batch norm, in-place activations, functional dropout, a view by sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.ReLU(),
        )
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.5)
        self.classifier = nn.Linear(16, 3)
        self.never = nn.Linear(2, 2)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("offset", torch.tensor(0.25), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.features(x), 2)
        x = self.norm(x.view(x.size(0), -1))
        x = F.dropout(self.dropout(x), 0.25, training=self.training)
        return self.classifier(x) * self.scale + self.offset + torch.tensor(0.5)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.relu_(self.stem(x))
        for block in self.blocks:
            x = block(x)
        pooled = F.adaptive_avg_pool2d(x, 1)
        return {"logits": self.fc(torch.flatten(pooled, 1)), "features": pooled}


class UNet(nn.Module):
    """Long skips, and a size that a later stage asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.middle = nn.Conv2d(4, 4, 3, padding=1)
        self.up2, self.up1 = nn.Conv2d(8, 3, 3, padding=1), nn.Conv2d(6, 3, 3, padding=1)
        self.last = nn.Conv2d(3 + 2, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.down1(x))
        b = F.relu(self.down2(F.max_pool2d(a, 2)))
        y = F.relu(self.middle(F.max_pool2d(b, 2)))
        y = F.relu(self.up2(torch.cat([F.interpolate(y, size=b.shape[2:]), b], dim=1)))
        n, _, h, w = a.shape
        y = F.interpolate(y, size=(h, w)).view(n, -1, h, w)
        return self.last(torch.cat([F.relu(self.up1(torch.cat([y, a], 1))), x], 1))


class Language(nn.Module):
    """Integers in, an LSTM's tuple, layer norm, and a weight used at both ends."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.lstm2 = nn.LSTM(6, 6, batch_first=True)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        n, t = tokens.shape
        y, (h, c) = self.lstm(self.norm(self.embedding(tokens)))
        y, _ = self.lstm2(y, (h, c))
        y = torch.tanh(self.mix(y)) + (h.transpose(0, 1) if state is None else state)
        return self.head(y).view(n * t, -1), c


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Several inputs, a padding mask, a class token, and one causal mask for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 6, 8))
        self.blocks = nn.ModuleList([Attention(), Attention()])
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8 + 2, 3)
        self.register_buffer("causal", torch.ones(6, 6).triu(1).bool())

    def forward(self, tokens: Tensor, padding: Tensor, extra: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(tokens.size(0), -1, -1), self.embedding(tokens)], dim=1)
        x = x + self.position[:, : x.shape[1]]
        for block in self.blocks:
            x = block(x, self.causal)
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.head(torch.cat([x[:, 0], extra], dim=-1))


class Twice(nn.Module):
    """A module that is called twice, with a batch norm called twice behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.alias = self.shared

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.shared(self.first(x)))
        return self.last(self.norm(torch.sigmoid(self.alias(x))))


class Branches(nn.Module):
    """A submodule that cannot be traced, with a tuple as its result."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return (self.a(x), x) if x.sum() > 0 else (x, self.b(x))

    def __init__(self) -> None:
        super().__init__()
        self.before, self.odd, self.after = nn.Linear(4, 4), self.Odd(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.odd(self.before(x))
        return self.after(a * b)


def _tokens(n: int, t: int, high: int) -> Tensor:
    return torch.randint(0, high, (n, t))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Sample]]] = {
    "plain": (Plain, lambda: (torch.randn(6, 2, 8, 8),)),
    "residual": (Residual, lambda: (torch.randn(6, 2, 6, 6),)),
    "unet": (UNet, lambda: (torch.randn(6, 2, 8, 8),)),
    "language": (Language, lambda: (_tokens(6, 5, 11),)),
    "tied": (lambda: Language(tied=True), lambda: (_tokens(6, 5, 11),)),
    "transformer": (
        Transformer,
        lambda: (_tokens(6, 5, 13), torch.zeros(6, 6).bool(), torch.randn(6, 2)),
    ),
    "twice": (Twice, lambda: (torch.randn(6, 4),)),
    "branches": (Branches, lambda: (torch.randn(6, 4),)),
}


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in tensors(part)]


def train(model: nn.Module, inputs: Sample, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    """Return a model's result and gradients."""
    model.zero_grad()
    torch.manual_seed(seed)
    result = model(*inputs)
    _loss(result).backward()
    return result, {key: p.grad for key, p in model.named_parameters()}


def train_stages(stages: Sequence[StageModule], inputs: Sample, seed: int = 0) -> Any:
    """Run stages as a pipeline does, each on tensors that know nothing of the stage before."""
    torch.manual_seed(seed)
    kept: list[tuple[list[Tensor], Any]] = []
    values: Sequence[Tensor] = inputs
    for number, stage in enumerate(stages):
        assert len(values) == len(stage.inputs)
        for value, spec in zip(values, stage.inputs, strict=True):
            spec.check(value.shape, str(value.dtype).removeprefix("torch."), f"stage {number}")
        gets = [
            value.detach().requires_grad_(spec.gradient)
            for value, spec in zip(values, stage.inputs, strict=True)
        ]
        values = stage.module(*gets)
        kept.append((gets, values))
    result = kept[-1][1]
    _loss(result).backward()
    for (_, sent), (gets, _) in reversed(list(itertools.pairwise(kept))):
        pairs = [
            (out, got.grad)
            for out, got in zip(sent, gets, strict=True)
            if out.requires_grad and got.grad is not None
        ]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
    return result


def _loss(result: Any) -> Tensor:
    return torch.stack([t.sin().sum() for t in tensors(result)]).sum()
