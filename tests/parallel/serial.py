"""The equations of the strategies, carried out for n workers in one process.

`Workers.train` is a plain loop. A test of a script that does more writes the script's own loop,
and a `Workers` takes the place of the n optimizers in it::

    workers = make_workers("pipe-sgd", 2, make_model, make_optimizer)
    for step in range(steps):
        workers.backward(loss_of, step)      on every worker: zero_grad() and loss.backward()
        workers.step()                       on every worker: optimizer.step()
        workers.record()
    workers.synchronize()

Plain torch and none of hvd_pipe's code, but for the options of a strategy. A gradient that is not
finite on one worker is left out on all of them when its time comes, as it should be under a
GradScaler.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from equation import fragments_of
from problem import Loss, loss_of, weights_of
from torch import nn
from torch.optim import Optimizer

from hvd_pipe import strategy

Vectors = Sequence[torch.Tensor | None]  # one value a parameter; None: it has no gradient
Reduce = Callable[[Sequence[Vectors]], Vectors]
Change = Callable[[nn.Module], object]  # what a script does to the gradients before step()
Named = dict[str, torch.Tensor]  # one tensor a parameter and, with momentum="average", a moment

PER_NODE = 2
"""Workers of a node, of which the last may have fewer."""
NONNEGATIVE = ("exp_avg_sq",)


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

    def train(
        self, steps: int, *, loss: Loss = loss_of, passes: int = 1, drains: Collection[int] = ()
    ) -> npt.NDArray[Any]:
        """The trajectory of an ordinary loop, with a drain after the steps in ``drains``."""
        for step in range(steps):
            self.backward(loss, *range(step * passes, (step + 1) * passes))
            self.step()
            self.record()
            if step in drains:
                self.synchronize()
                self.record()
        return self.trajectory

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

    def __init__(self, *arguments: Any, options: strategy.PipeSGD, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._warmup_steps, self._prediction = options.warmup_steps, options.prediction
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
    """x_i[s+1] = mean_j x_j[s] + (x_i after k local steps - x_i[s]), and all options of this.

    Args:
        options: Those of the strategy.
        rounds: Whether what travels is float16 on its way.
        leaves_after: After how many steps the last worker has left.
    """

    def __init__(
        self,
        *arguments: Any,
        options: strategy.CoCoD,
        rounds: bool = False,
        leaves_after: int | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self.clamped = 0
        """Numbers that would have become negative, and must not."""
        self._options, self._rounds, self._leaves_after = options, rounds, leaves_after
        self._weights = options.weights or (1.0,) * len(self.models)
        sizes = [p.numel() for p in self.models[0].parameters()]
        self._fragments = fragments_of(sizes, options.fragments)
        self._steps = self._local_steps = self._fragment = 0
        self._start: list[Named] = []
        self._mean: Named = {}
        self._base: Named = {}
        self._anchor: Named = {}
        self._velocity: Named = {}

    def step(self, change: Change | None = None) -> None:
        options, gradients = self._options, self._gradients()
        if self._steps < options.warmup_steps:
            average = self._average(gradients)
            self._update([average] * len(self.models), change)
        else:
            if self._local_steps == 0:
                self._start = self._values(self._fragment)
                self._mean = self._mean_of(self._start)
            self._update(self._within_nodes(gradients), change)
            self._local_steps += 1
            if self._local_steps == options.period // options.fragments:
                self._finish()
                self._local_steps = 0
                self._fragment = (self._fragment + 1) % options.fragments
        self._steps += 1

    def synchronize(self) -> None:
        values = self._values()
        self._base = self._exact_mean(values)
        self._set([self._base for _ in values])
        self._local_steps = self._fragment = 0

    def _average(self, gradients: list[Vectors]) -> Vectors:
        if self._rounds:
            return self._rounded(gradients)
        return self._weighted(gradients) if self._options.weights else self._reduce(gradients)

    def _within_nodes(self, gradients: list[Vectors]) -> list[Vectors]:
        """What each worker applies: its own gradient, or the mean of those of its node."""
        if self._options.within == "none":
            return gradients
        nodes = [
            range(first, min(first + PER_NODE, len(gradients)))
            for first in range(0, len(gradients), PER_NODE)
        ]
        return [self._weighted(gradients, node) for node in nodes for _ in node]

    def _outer_model(self, mean: Named) -> Named:
        """The outer model after DiLoCo's outer step; momenta keep their mean."""
        lr, mu = self._options.outer_lr, self._options.outer_momentum
        weights = {name: m for name, m in mean.items() if "." not in name}
        for name, m in weights.items():
            change = self._anchor.get(name, m) - m
            self._velocity[name] = mu * self._velocity.get(name, torch.zeros_like(m)) + change
            self._anchor[name] = m + change - lr * (change + mu * self._velocity[name])
        return {**mean, **{name: self._anchor[name] for name in weights}}

    def _finish(self) -> None:
        """End a round."""
        alpha, beta, mean = self._options.pull_back, self._options.anchor_momentum, self._mean
        if self._options.outer != "none":
            mean = self._outer_model(mean)
        self._base |= mean
        z = dict(mean)
        if beta:
            for name, m in ((name, m) for name, m in mean.items() if "." not in name):
                moved_by = beta * self._velocity.get(name, torch.zeros_like(m))
                self._velocity[name] = moved_by + (m - self._anchor.get(name, m))
                z[name] = self._anchor[name] = self._anchor.get(name, m) + self._velocity[name]
        moved = []
        for end, begin in zip(self._values(self._fragment), self._start, strict=True):
            new = {}
            for name in begin:
                x, progress = end[name], end[name] - begin[name]
                x = mean[name] + progress if alpha is None else x - alpha * (x - z[name])
                if name.endswith(NONNEGATIVE):
                    self.clamped += int((x < 0).sum())
                    x = x.clamp(min=0)
                new[name] = x
            moved.append(new)
        self._set(moved)

    def _mean_of(self, values: list[Named]) -> Named:
        exact = self._exact_mean(values)
        weights = [name for name in exact if "." not in name]  # momenta travel uncompressed
        if not self._rounds or not set(weights) <= set(self._base):
            return exact
        for name in weights:
            differences = [[value[name] - self._base[name]] for value in values]
            exact[name] = self._base[name] + self._rounded(differences)[0]
        return exact

    def _exact_mean(self, values: list[Named]) -> Named:
        return {name: self._weighted([[value[name]] for value in values])[0] for name in values[0]}

    def _weighted(
        self, vectors: Sequence[Vectors], workers: Sequence[int] | None = None
    ) -> list[torch.Tensor]:
        """The mean over some workers, or over all that are there."""
        present = range(len(vectors)) if workers is None else workers
        if self._leaves_after is not None and self._steps >= self._leaves_after:
            present = present[:-1]
        total = sum(self._weights[i] for i in present)
        columns = [[self._weights[i] / total * x for x in vectors[i]] for i in present]
        return [torch.stack(column).sum(0) for column in zip(*columns, strict=True)]

    def _rounded(self, vectors: Sequence[Vectors]) -> list[torch.Tensor]:
        """As `_weighted`, with numbers that are float16 on their way."""
        size, total = len(vectors), sum(self._weights)
        result = []
        for column in zip(*vectors, strict=True):
            whole = torch.zeros_like(column[0], dtype=torch.float16)
            for x, weight in zip(column, self._weights, strict=True):
                whole += (x * (weight * size / total)).to(torch.float16)
            result.append((whole / size).double())
        return result

    def _live(self, worker: int) -> Named:
        model, optimizer = self.models[worker], self.optimizers[worker]
        tensors: Named = {}
        for number, p in enumerate(model.parameters()):
            tensors[str(number)] = p.data
            if self._options.momentum == "average":
                for key, value in optimizer.state[p].items():
                    if isinstance(value, torch.Tensor) and value.shape == p.shape:
                        tensors[f"{number}.{key}"] = value
        return tensors

    def _values(self, fragment: int | None = None) -> list[Named]:
        """What is averaged, of all fragments or of one; momenta belong to the only one."""
        return [
            {
                name: tensor.clone()
                for name, tensor in self._live(i).items()
                if fragment is None or int(name.split(".")[0]) in self._fragments[fragment]
            }
            for i in range(len(self.models))
        ]

    def _set(self, values: list[Named]) -> None:
        for worker, own in enumerate(values):
            live = self._live(worker)
            for name, value in own.items():
                live[name].copy_(value)


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


def make_workers(
    given: str | strategy.CoCoD,
    n: int,
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], Optimizer],
    reduce: Reduce = mean,
    **named: Any,
) -> Workers:
    """The workers of a strategy, which is written as users write it."""
    arguments = n, make_model, make_optimizer, reduce
    if given == "adasum":
        return Adasum(*arguments)
    options = strategy.parse(given) if isinstance(given, str) else given
    if isinstance(options, strategy.PipeSGD):
        return PipeSGD(*arguments, options=options)
    if isinstance(options, strategy.CoCoD):
        return CoCoD(*arguments, options=options, **named)
    return Synchronous(*arguments)  # the options of merged-gradient change no equation


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


def _adasum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    dot = (a * b).sum()
    return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b
