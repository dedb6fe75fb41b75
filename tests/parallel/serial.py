"""All workers of a strategy in one process, for scripts that do more than a plain loop.

`reference.py` has the equations of whole runs. Here a test writes the script's own loop, and a
`Workers` takes the place of the n optimizers in it::

    workers = make_workers("pipe-sgd", 2, make_model, make_optimizer)
    for step in range(steps):
        workers.backward(loss_of, step)      on every worker: zero_grad() and loss.backward()
        workers.step()                       on every worker: optimizer.step()
        workers.record()
    workers.synchronize()

Plain torch and none of hvd_pipe's code. A gradient that is not finite on one worker is left out on
all of them when its time comes, as it should be under a GradScaler.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from problem import Loss, weights_of
from torch import nn
from torch.optim import Optimizer

Vectors = Sequence[torch.Tensor | None]  # one value a parameter; None: it has no gradient
Reduce = Callable[[Sequence[Vectors]], Vectors]
Change = Callable[[nn.Module], object]  # what a script does to the gradients before step()


def mean(vectors: Sequence[Vectors]) -> Vectors:
    """The average over workers."""
    return [_reduced(column, lambda t: t.mean(0)) for column in zip(*vectors, strict=True)]


def total(vectors: Sequence[Vectors]) -> Vectors:
    """The sum over workers."""
    return [_reduced(column, lambda t: t.sum(0)) for column in zip(*vectors, strict=True)]


class Workers(abc.ABC):
    """n models with their optimizers, which follow one strategy."""

    def __init__(
        self,
        n: int,
        make_model: Callable[[], nn.Module],
        make_optimizer: Callable[[nn.Module], Optimizer],
        reduce: Reduce = mean,
    ) -> None:
        self.models = [make_model() for _ in range(n)]
        self.optimizers = [make_optimizer(model) for model in self.models]
        self.overflowed = [False] * n
        """Whose last step left an update out, as its gradient was not finite."""
        self._reduce = reduce
        self._records: list[list[npt.NDArray[Any]]] = [[] for _ in range(n)]

    def backward(self, loss: Loss, *numbers: int) -> None:
        """Every worker's gradient, summed over backward passes with these numbers."""
        for rank, model in enumerate(self.models):
            model.zero_grad()
            for number in numbers:
                loss(model, rank, number).backward()

    @abc.abstractmethod
    def step(self, change: Change | None = None) -> None:
        """One step of the strategy; ``change`` is applied to the gradients it updates with."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Finish what is in flight."""

    def set_option(self, option: str, value: float) -> None:
        """Set a hyperparameter of all optimizers, such as the learning rate."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group[option] = value

    def record(self, more: Sequence[float] = ()) -> None:
        """Add a row: all weights, and what else is worth comparing, a number a worker."""
        for rank, (record, model) in enumerate(zip(self._records, self.models, strict=True)):
            record.append(np.array([*weights_of(model), *more[rank : rank + 1]]))

    @property
    def trajectory(self) -> npt.NDArray[Any]:
        """All rows of all workers: (workers, rows, columns)."""
        return np.array(self._records)

    @property
    def positions(self) -> list[list[torch.Tensor]]:
        return [[p.detach().clone() for p in model.parameters()] for model in self.models]

    def move(self, positions: Sequence[Vectors]) -> None:
        with torch.no_grad():
            for model, position in zip(self.models, positions, strict=True):
                for p, x in zip(model.parameters(), position, strict=True):
                    assert x is not None
                    p.copy_(x)

    def _gradients(self) -> list[Vectors]:
        return [
            [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            for model in self.models
        ]

    def _update(self, gradients: Sequence[Vectors], change: Change | None = None) -> None:
        """One update of each worker's optimizer, with the gradient given for it."""
        self.overflowed = [not _is_finite(vectors) for vectors in gradients]
        trained = zip(self.models, self.optimizers, gradients, self.overflowed, strict=True)
        for model, optimizer, vectors, overflowed in trained:
            if overflowed:
                continue
            _put(model, vectors)
            if change is not None:
                change(model)
            optimizer.step()


class Synchronous(Workers):
    """w[t+1] = update(w[t], mean_i g_i(w[t]))."""

    def step(self, change: Change | None = None) -> None:
        self._update([self._reduce(self._gradients())] * len(self.models), change)

    def synchronize(self) -> None:
        """Nothing is ever pending."""


class PipeSGD(Workers):
    """w[t+1] = update(w[t], mean_i g_i(w[t-1])), once the warm-up is over.

    With a prediction, ``g_i(w[t])`` becomes ``g_i(x_i[t])``, where ``x_i[t]`` is what the update
    would make of ``w[t]`` with a guess of the pending gradient: this worker's own part of it
    (``local``), or the one that was applied last (``previous``), if one was since the last drain.

    `Workers.models` hold x; `true_optimizers` tell of w.
    """

    def __init__(
        self, *arguments: Any, warmup_steps: int = 0, prediction: str = "none", **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        self._warmup_steps, self._prediction = warmup_steps, prediction
        self._pending: Vectors | None = None
        self._true: list[list[torch.Tensor]] | None = None
        self._steps = 0

    def step(self, change: Change | None = None) -> None:
        own = self._gradients()
        average = self._reduce(own)
        self._back()
        self.overflowed = [False] * len(self.models)
        self._steps += 1
        if self._steps <= self._warmup_steps:
            self._update([average] * len(self.models), change)
            return
        due, self._pending = self._pending, average
        if due is not None:
            self._update([due] * len(self.models), change)
        if self._prediction == "local":
            self._lead(own)
        elif self._prediction == "previous" and due is not None:
            self._lead([due] * len(self.models))

    def synchronize(self) -> None:
        self._back()
        if self._pending is not None:
            self._update([self._pending] * len(self.models))
        self._pending = None

    def _lead(self, guesses: Sequence[Vectors]) -> None:
        """Copies of model and optimizer make the predicted update."""
        self._true = self.positions
        ahead = []
        for model, optimizer, guess in zip(self.models, self.optimizers, guesses, strict=True):
            other_model, other = copy.deepcopy((model, optimizer))
            _put(other_model, guess)
            other.step()
            ahead.append([p.detach() for p in other_model.parameters()])
        self.move(ahead)

    def _back(self) -> None:
        if self._true is not None:
            self.move(self._true)
        self._true = None


class CoCoD(Workers):
    """x_i[s+1] = mean_j x_j[s] + (x_i after k local steps - x_i[s])."""

    def __init__(self, *arguments: Any, period: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._period, self._local_steps = period, 0
        self._start: list[list[torch.Tensor]] = []

    def step(self, change: Change | None = None) -> None:
        if self._local_steps == 0:
            self._start = self.positions
        self._update(self._gradients(), change)
        self._local_steps += 1
        if self._local_steps == self._period:
            self.move(_mean_plus_progress(self._start, self.positions))
            self._local_steps = 0

    def synchronize(self) -> None:
        self.move([mean(self.positions)] * len(self.models))
        self._local_steps = 0


class Adasum(Workers):
    """x = start + adasum_i(update_i), tensor by tensor; for two workers.

    adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b
    """

    def step(self, change: Change | None = None) -> None:
        start = self.positions
        self._update(self._gradients(), change)
        first, second = self.positions
        position = [
            s + _adasum(a - s, b - s) for s, a, b in zip(start[0], first, second, strict=True)
        ]
        self.move([position] * 2)

    def synchronize(self) -> None:
        """Nothing is ever pending."""


_CLASSES: dict[str, Callable[..., Workers]] = {
    "merged-gradient": Synchronous,
    "pipe-sgd": PipeSGD,
    "cocod": CoCoD,
    "adasum": Adasum,
}


def make_workers(
    strategy: str,
    n: int,
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], Optimizer],
    reduce: Reduce = mean,
) -> Workers:
    """The workers of a strategy, which is written as users write it."""
    name, _, options = strategy.partition(":")
    if name == "merged-gradient":  # its options change no equation
        options = ""
    pairs = (option.split("=") for option in options.split(",") if option)
    given = {key: int(value) if value.isdigit() else value for key, value in pairs}
    return _CLASSES[name](n, make_model, make_optimizer, reduce, **given)


def accumulating(schedule: Collection[int]) -> list[range]:
    """The numbers of the backward passes of each step, with so many passes in each.

    >>> accumulating([2, 1, 2])
    [range(0, 2), range(2, 3), range(3, 5)]
    """
    numbers, first = [], 0
    for passes in schedule:
        numbers.append(range(first, first + passes))
        first += passes
    return numbers


def _reduced(
    column: Sequence[torch.Tensor | None], reduce: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    present = [tensor for tensor in column if tensor is not None]
    assert len(present) in (0, len(column)), "workers differ in which parameters have gradients"
    return reduce(torch.stack(present)) if present else None


def _put(model: nn.Module, vectors: Vectors) -> None:
    for p, g in zip(model.parameters(), vectors, strict=True):
        p.grad = None if g is None else g.clone()


def _is_finite(vectors: Vectors) -> bool:
    return all(bool(torch.isfinite(vector).all()) for vector in vectors if vector is not None)


def _mean_plus_progress(
    start: list[list[torch.Tensor]], end: list[list[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    average = [torch.stack(column).mean(0) for column in zip(*start, strict=True)]
    return [
        [a + (e - s) for a, e, s in zip(average, ends, starts, strict=True)]
        for ends, starts in zip(end, start, strict=True)
    ]


def _adasum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot = (a * b).sum()
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b
