"""What the uses share: a loop on ranks, and the same loop with all workers in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from problem import OPTIMIZERS, loss_of, make_model, weights_of
from serial import Change, Reduce, Vectors, make_workers
from torch import nn
from torch.optim import SGD, Optimizer
from uses import STRATEGIES

import hvd_pipe.torch as hvd

STEPS = 11  # of CoCoD's rounds of three steps three, and a part of one

PROCESS_SETS = {2: [], 3: [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])]}
"""By the number of ranks in a job, what to call ``hvd.init`` with."""

Array = npt.NDArray[Any]
MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[nn.Module], Optimizer]

MERGED, FORWARD, PIPE, COCOD = STRATEGIES
FLOAT32 = 1e-6  # of weights below 1, after some roundings
make_momentum = OPTIMIZERS["momentum"]
make_float32 = partial(make_model, torch.float32)


def make_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05)


def mean(vectors: Sequence[Vectors]) -> Vectors:
    """The average over workers, to which one without a gradient contributes zero."""
    averages: list[torch.Tensor | None] = []
    for column in zip(*vectors, strict=True):
        present = [gradient for gradient in column if gradient is not None]
        averages.append(torch.stack(present).sum(0) / len(column) if present else None)
    return averages


def wrap(model: nn.Module, plain: Optimizer, strategy: str, **arguments: Any) -> Any:
    return hvd.DistributedOptimizer(
        plain, model.named_parameters(), strategy=strategy, **arguments
    )


Event = Callable[[Any, Any, int], object]
"""What a script does at a step, with a model and its optimizer, wrapped or plain."""


def nothing(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """An event that is none."""


def clear(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()


@dataclass(frozen=True)
class Script:
    """A training loop, which a rank runs and which workers play in one process.

    Args:
        make: Makes the model.
        make_optimizer: Makes the plain optimizer.
        loss: Of a model, a rank and a step; None: the rank skips ``backward()``.
        arguments: Of the distributed optimizer.
        reduce: What becomes of the workers' gradients.
        setup: After wrapping, with -1 for the step.
        before: Before gradients are cleared.
        clear: Clears gradients, on a rank.
        between: After ``backward()``, with the local gradients.
        prepared: After ``synchronize()``, with the gradients that are applied; gets no optimizer.
        after: After ``step()``.
        column: One more number a row.
    """

    make: MakeModel = make_model
    make_optimizer: MakeOptimizer = make_momentum
    loss: Callable[[nn.Module, int, int], torch.Tensor | None] = loss_of
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reduce: Reduce = mean
    setup: Event = nothing
    before: Event = nothing
    clear: Event = clear
    between: Event = nothing
    prepared: Event | None = None
    after: Event = nothing
    column: Callable[[Any], float] | None = None

    def run(self, strategy: str) -> Array:
        """On a rank: the weights after every step, and after ``synchronize()``."""
        model = self.make()
        optimizer = wrap(model, self.make_optimizer(model), strategy, **self.arguments)
        self.setup(model, optimizer, -1)
        records = []
        for number in range(STEPS):
            self.before(model, optimizer, number)
            self.clear(model, optimizer, number)
            self._backward(model, optimizer, hvd.rank(), number)
            if self.prepared is None:
                optimizer.step()
            else:
                optimizer.synchronize()
                self.prepared(model, None, number)
                with optimizer.skip_synchronize():
                    optimizer.step()
            self.after(model, optimizer, number)
            records.append([*weights_of(model), *self._more(optimizer)])
        optimizer.synchronize()
        records.append([*weights_of(model), *self._more(optimizer)])
        return np.array(records)

    def expected(self, strategy: str, n: int) -> Array:
        """In a test: the same of all workers."""
        workers = make_workers(strategy, n, self.make, self.make_optimizer, self.reduce)
        pairs = list(zip(workers.models, workers.optimizers, strict=True))
        for model, optimizer in pairs:
            self.setup(model, optimizer, -1)
        records: list[list[list[float]]] = [[] for _ in pairs]
        for number in range(STEPS + 1):
            if number == STEPS:
                workers.synchronize()
            else:
                for rank, (model, optimizer) in enumerate(pairs):
                    self.before(model, optimizer, number)
                    optimizer.zero_grad()
                    self._backward(model, optimizer, rank, number)
                if strategy != COCOD and any(has_gradients(model) for model, _ in pairs):
                    for model, optimizer in pairs:
                        count_as_zero(model, optimizer)
                workers.step(self._change(number))
                for model, optimizer in pairs:
                    self.after(model, optimizer, number)
            for record, (model, optimizer) in zip(records, pairs, strict=True):
                record.append([*weights_of(model), *self._more(optimizer)])
        return np.array(records)

    def _backward(self, model: nn.Module, optimizer: Any, rank: int, number: int) -> None:
        loss = self.loss(model, rank, number)
        if loss is not None:
            loss.backward()
        self.between(model, optimizer, number)

    def _change(self, number: int) -> Change | None:
        prepared = self.prepared
        return prepared and (lambda model: prepared(model, None, number))

    def _more(self, optimizer: Any) -> list[float]:
        return [] if self.column is None else [self.column(optimizer)]

    @property
    def sides(self) -> dict[str, Any]:
        """The two sides of a use."""
        return {"run": self.run, "expected": self.expected}


PLAIN = Script()


def has_gradients(model: nn.Module) -> bool:
    return any(p.grad is not None for p in model.parameters())


def count_as_zero(model: nn.Module, optimizer: Optimizer) -> None:
    """What an optimizer trains has a gradient where any has one, as in Horovod."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for p in model.parameters():
        if id(p) not in owned:
            p.grad = None
        elif p.grad is None and p.requires_grad:
            p.grad = torch.zeros_like(p)


def at(steps: dict[int, Event]) -> Event:
    """An event that is another one at each of these steps."""
    return lambda model, optimizer, number: steps.get(number, nothing)(model, optimizer, number)


@dataclass(frozen=True)
class Pair:
    """Two models with an optimizer each."""

    makes: Sequence[MakeModel]
    references: Sequence[MakeModel]
    optimizers: Sequence[tuple[MakeOptimizer, MakeOptimizer]]
    phases: Sequence[tuple[Callable[..., torch.Tensor], Sequence[int]]]
    freeze: bool = False

    def run(self, strategy: str) -> Array:
        models = [make() for make in self.makes]
        optimizers: list[Any] = [
            hvd.DistributedOptimizer(
                make(model), model.named_parameters(prefix=str(i)), strategy=strategy
            )
            for i, (model, (make, _)) in enumerate(zip(models, self.optimizers, strict=True))
        ]
        records = []
        for number in range(STEPS):
            for loss, trained in self.phases:
                for i, model in enumerate(models):
                    model.requires_grad_(i in trained or not self.freeze)
                for i in trained:
                    optimizers[i].zero_grad()
                loss(*models, hvd.rank(), number).backward()
                for i in trained:
                    optimizers[i].step()
                for model in models:
                    model.requires_grad_(True)
            records.append(np.concatenate([weights_of(model) for model in models]))
        for i, optimizer in enumerate(optimizers):
            if i not in self.phases[-1][1]:
                optimizer.zero_grad()  # what another one's loss has left
            optimizer.synchronize()
        return np.array([*records, np.concatenate([weights_of(model) for model in models])])

    def expected(self, strategy: str, n: int) -> Array:
        both = [
            make_workers(strategy, n, make, make_optimizer, mean)
            for make, (_, make_optimizer) in zip(self.references, self.optimizers, strict=True)
        ]
        for number in range(STEPS):
            for loss, trained in self.phases:
                for rank, models in enumerate(zip(*(each.models for each in both), strict=True)):
                    for model in models:
                        model.zero_grad()
                    loss(*models, rank, number).backward()
                for workers in (both[i] for i in trained):
                    pairs = zip(workers.models, workers.optimizers, strict=True)
                    for model, optimizer in pairs if strategy != COCOD else ():
                        count_as_zero(model, optimizer)
                    workers.step()
            for workers in both:
                workers.record()
        for workers in both:
            workers.synchronize()
            workers.record()
        return np.concatenate([workers.trajectory for workers in both], axis=2)

    @property
    def sides(self) -> dict[str, Any]:
        """The two sides of a use."""
        return {"run": self.run, "expected": self.expected}
