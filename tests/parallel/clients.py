"""What `test_clients` compares trainings with: one process that has all ranks' batches."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from on_ranks import gather
from problem import Weights, weights_of
from serial import make_workers
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

FOLDER = Path(__file__).resolve().parents[2] / "torch_examples" / "clients"


def script(name: str) -> Any:
    """Return a script of torch_examples/clients as a module; its imports take seconds."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


class Recorded(Dataset[Any]):
    """A data set that keeps in which order a rank has taken its items.

    Args:
        items: The items.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items
        self.order: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.order.append(index)
        return self.item(index, len(self.order) - 1)

    def item(self, index: int, number: int) -> Any:
        """Return an item that a rank takes after so many others."""
        return self.items[index]

    def batches(self, size: int) -> list[list[Any]]:
        """Return all ranks' batches, by rank; the last batch of an epoch may be smaller."""
        orders = gather(self.order)
        epoch = len(self) // len(orders)
        for first in range(0, len(orders[0]), epoch):  # the ranks share the items of an epoch
            taken = [index for order in orders for index in order[first : first + epoch]]
            assert sorted(taken) == list(range(len(self)))
        assert orders[0][:epoch] != orders[0][epoch : 2 * epoch]
        return [
            [
                default_collate([self.item(order[n], n) for n in range(first, end)])
                for begin in range(0, len(order), epoch)
                for first in range(begin, begin + epoch, size)
                for end in [min(first + size, begin + epoch)]
            ]
            for order in orders
        ]


def grouped(epochs: int, batches: int, accumulation: int) -> list[range]:
    """Return the numbers of each step's batches; the last step of an epoch may have fewer."""
    return [
        range(first, min(first + accumulation, end))
        for end in range(batches, (epochs + 1) * batches, batches)
        for first in range(end - batches, end, accumulation)
    ]


@dataclass(frozen=True)
class Training:
    """A client's training without the client.

    Args:
        model: The model before its first step.
        optimizer: Makes the optimizer of a model.
        loss: The loss of a step: of a model and of the batches of a rank.
        batches: By rank.
        steps: The numbers of each step's batches.
        schedule: Makes the learning-rate schedule of an optimizer.
        change: What happens to a model's gradients before an update.
        after: What happens to a model after a step, called with the number of the step.
        result: What is compared, of the model of the first rank.
    """

    model: nn.Module
    optimizer: Callable[[nn.Module], Optimizer]
    loss: Callable[[nn.Module, list[Any]], torch.Tensor]
    batches: Sequence[Sequence[Any]]
    steps: Sequence[range]
    schedule: Callable[[Optimizer], Any] = lambda _: None
    change: Callable[[nn.Module], object] = lambda _: None
    after: Callable[[nn.Module, int], object] = lambda *_: None
    result: Callable[[nn.Module], nn.Module] = lambda model: model

    def simulated(self, strategy: str) -> nn.Module:
        """Return what training by a strategy's equation makes."""
        ranks = len(self.batches)
        workers = make_workers(strategy, ranks, lambda: copy.deepcopy(self.model), self.optimizer)
        schedules = [self.schedule(each) for each in workers.optimizers]

        def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
            return self.loss(model, [self.batches[rank][i] for i in self.steps[step]])

        for step in range(len(self.steps)):
            workers.backward(loss, step)
            workers.step(self.change)
            for model, schedule in zip(workers.models, schedules, strict=True):
                if schedule is not None:
                    schedule.step()
                self.after(model, step)
        workers.synchronize()
        return self.result(workers.models[0])


def clipping(norm: float) -> Callable[[nn.Module], object]:
    """Return what clips a model's gradients to a norm; 0 leaves them."""
    if not norm:
        return lambda _: None
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), norm)


def difference(one: Weights, other: Weights) -> float:
    return float(np.abs(one - other).max())


def check(model: nn.Module, training: Training, strategy: str) -> None:
    """Assert that a model is what one process makes of all batches, and not of a rank's alone."""
    alone = [replace(training, batches=[batches]) for batches in training.batches]
    compare(
        model,
        training.simulated(strategy),
        [each.simulated("merged-gradient") for each in alone],
        1e-10,
    )


def compare(
    model: nn.Module, wanted: nn.Module, alone: Sequence[nn.Module], tolerance: float
) -> None:
    """Assert that all ranks have the model that is wanted, and that a rank alone has another."""
    mine, right = weights_of(model), weights_of(wanted)
    for other in gather(mine):
        assert difference(mine, other) <= tolerance
    assert difference(mine, right) <= tolerance
    for other in alone:
        assert difference(weights_of(other), right) > 1000 * tolerance
