"""What pipelines train, for ranks and for the serial reference: models, their cuts, and data.

Everything is a function of names and seeds, so that all ranks and the reference in the test's own
process see the same numbers. Float64.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

Batch = tuple[Any, torch.Tensor]  # an input, or a tuple of inputs, and a target
MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

SIZES = (14, 14, 14, 14, 14, 14, 13)  # of an epoch's minibatches: 7 of them, the last one smaller
FEATURES = (2, 6)  # channels and places of an input
WORDS = 2000  # that the second of two inputs has: more than bfloat16 can tell apart


class Mixed(nn.Module):
    """Conv, BatchNorm, LSTM, LayerNorm and tied weights: what stale weights hurt silently.

    No bias stands right before a BatchNorm: its gradient would be noise, which Adam would blow up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.layer_norm = nn.LayerNorm(5)
        self.tied = nn.Linear(5, 5)
        self.last_norm = nn.BatchNorm1d(4)
        self.flatten = nn.Flatten()
        self.head = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.conv(x)))
        x = self.layer_norm(self.lstm(x)[0])
        x = torch.tanh(self.tied(torch.tanh(self.tied(x))))
        result: torch.Tensor = self.head(self.flatten(self.last_norm(x)))
        return result


class Skipping(nn.Module):
    """Linears, of which some reach over several stages: two tensors cross two of the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.one = nn.Linear(12, 5)
        self.two = nn.Linear(5, 5)
        self.three = nn.Linear(5, 5)
        self.four = nn.Linear(5, 5)
        self.five = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.one(self.flatten(x)))
        second = torch.tanh(self.two(first))
        third = torch.tanh(self.three(second))
        fourth = torch.tanh(self.four(third)) + first
        result: torch.Tensor = self.five(torch.cat([fourth, second], dim=1))
        return result


class Paired(nn.Module):
    """Two inputs: the second, of integers and without a gradient, is for the last stage alone."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.one = nn.Linear(12, 5)
        self.two = nn.Linear(5, 5)
        self.three = nn.Linear(5, 5)
        self.words = nn.Embedding(WORDS, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.two(torch.tanh(self.one(self.flatten(x)))))
        result: torch.Tensor = self.head(torch.tanh(self.three(x)) + self.words(word))
        return result


@dataclass(frozen=True)
class Plan:
    """How a model is cut, by the layers that begin later stages, and workers of each stage."""

    cuts: tuple[str, ...]
    replicas: tuple[int, ...]

    @property
    def workers(self) -> int:
        return sum(self.replicas)

    @property
    def straight(self) -> bool:
        return set(self.replicas) == {1}

    def stage_of(self, model: nn.Module) -> Callable[[str], int]:
        """A function from a parameter's or buffer's name to the stage that holds it.

        The models above define their layers in forward order.
        """
        order = [name for name, _ in model.named_children()]
        starts = [order.index(cut) for cut in self.cuts]

        def stage(name: str) -> int:
            place = order.index(name.partition(".")[0])
            return sum(start <= place for start in starts)

        return stage


MIXED_CUTS = {
    1: (),
    2: ("lstm",),
    3: ("lstm", "tied"),
    4: ("lstm", "layer_norm", "last_norm"),
}
SKIPPING_CUTS = {1: (), 2: ("three",), 3: ("two", "four"), 4: ("two", "three", "five")}


def plan(config: str, cuts: dict[int, tuple[str, ...]] = MIXED_CUTS) -> Plan:
    """The plan of "2-1" and its like."""
    replicas = tuple(map(int, config.split("-")))
    return Plan(cuts[len(replicas)], replicas)


def make_mixed(*frozen: str) -> nn.Module:
    """The mixed model, with parameters that are not trained."""
    torch.manual_seed(7)
    model = Mixed().double()
    for name, p in model.named_parameters():
        p.requires_grad = not name.startswith(frozen) if frozen else True
    return model


def make_skipping() -> nn.Module:
    torch.manual_seed(8)
    return Skipping().double()


def make_sparse() -> nn.Module:
    """A chain in which most layers have no parameters."""
    torch.manual_seed(9)
    layers = OrderedDict[str, nn.Module](
        flatten=nn.Flatten(),
        one=nn.Linear(12, 5),
        tanh=nn.Tanh(),
        soft=nn.Softplus(),
        two=nn.Linear(5, 3),
    )
    return nn.Sequential(layers).double()


def make_paired() -> nn.Module:
    torch.manual_seed(10)
    return Paired().double()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mixed": make_mixed,
    "some frozen": lambda: make_mixed("lstm.weight_hh", "tied.bias", "head.weight"),
    "first frozen": lambda: make_mixed("conv", "norm"),
    "last frozen": lambda: make_mixed("last_norm", "head"),
    "skipping": make_skipping,
    "sparse": make_sparse,
    "paired": make_paired,
}


def epoch(number: int, sizes: Sequence[int] = SIZES, paired: bool = False) -> list[Batch]:
    """The minibatches of an epoch: alike on all ranks, unlike any other epoch's."""
    generator = torch.Generator().manual_seed(1000 + number)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batches: list[Batch] = [(draw(size, *FEATURES), draw(size, 3)) for size in sizes]
    if paired:
        words = [torch.randint(WORDS, (size,), generator=generator) for size in sizes]
        return [((x, word), y) for (x, y), word in zip(batches, words, strict=True)]
    return batches


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def _grouped(parameters: list[nn.Parameter]) -> Optimizer:
    """Groups by the number of dimensions, as for weight decay, of which a stage may lack some."""
    groups = [[p for p in parameters if p.dim() == n] for n in range(5)]
    return SGD([{"params": group} for group in groups], lr=0.02, momentum=0.9)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: Adam(parameters, lr=0.01),
    "grouped": _grouped,
}
