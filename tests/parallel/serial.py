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
from equation import Matrix, Rounds, fragments_of
from problem import Loss, loss_of, weights_of
from torch import nn
from torch.optim import Optimizer

from hvd_pipe import strategy

Vectors = Sequence[torch.Tensor | None]  # one value a parameter; None: it has no gradient
Reduce = Callable[[Sequence[Vectors]], Vectors]
Change = Callable[[nn.Module], object]  # what a script does to the gradients before step()

PER_NODE = 2
"""Workers of a node, of which the last may have fewer."""


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


class _Rounds(Rounds):
    """Rounds whose averages are those of workers that are there, perhaps by way of float16."""

    def start(self) -> None:
        self.starts = self._positions()
        weights, *momenta = self.starts
        self.averages = [
            self.workers.average(weights, self.columns),
            *(self.workers.average(each) for each in momenta),  # which travel uncompressed
        ]

    def _end(self, start: Matrix, end: Matrix, z: Matrix) -> Matrix:
        return np.where(np.isnan(start), end, super()._end(start, end, z))

    def end(self) -> None:
        super().end()
        outer = self.anchor if self.method.outer != "none" else self.averages[0]
        self.workers.base[self.columns] = outer


class CoCoD(Workers):
    """x_i[s+1] = mean_j x_j[s] + (x_i after k local steps - x_i[s]), and all options of this.

    ``halves``: what travels is float16 on its way. The last worker leaves after some steps.
    """

    def __init__(
        self,
        *arguments: Any,
        options: strategy.CoCoD,
        halves: bool = False,
        leaves_after: int | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._options, self._halves, self._leaves_after = options, halves, leaves_after
        self._shares = np.array(options.weights or [1.0] * len(self.models))
        self.sizes = [p.numel() for p in self.models[0].parameters()]
        self.base = np.full(sum(self.sizes), np.nan)
        """What differences are taken from; NaN before the first average."""
        self._momenta = ["momenta", "squares"] if options.momentum == "average" else []
        columns = np.split(np.arange(sum(self.sizes)), np.cumsum(self.sizes)[:-1])
        self._rounds = [
            _Rounds(options, self, [int(i) for n in own for i in columns[n]], self._momenta)
            for own in fragments_of(self.sizes, options.fragments)
        ]
        self._steps = self._local_steps = self._fragment = 0

    def step(self, change: Change | None = None) -> None:
        options, gradients = self._options, self._gradients()
        if self._steps < options.warmup_steps:
            self._update([self._mean_of(gradients)] * len(self.models), change)
        else:
            if self._local_steps == 0:
                self._rounds[self._fragment].start()
            self._update(self._within_nodes(gradients), change)
            self._local_steps += 1
            if self._local_steps == options.period // options.fragments:
                self._rounds[self._fragment].end()
                self._local_steps = 0
                self._fragment = (self._fragment + 1) % options.fragments
        self._steps += 1

    def synchronize(self) -> None:
        for name in ("weights", *self._momenta):
            values = getattr(self, name)
            setattr(self, name, np.broadcast_to(self.average(values), values.shape))
        self.base = self.weights[0]
        self._local_steps = self._fragment = 0

    def average(self, values: Matrix, columns: Any = None) -> Matrix:
        """Of the workers that are there; of differences from the base, where float16 travels."""
        there = len(values)
        if self._leaves_after is not None and self._steps >= self._leaves_after:
            there -= 1
        if self._halves and columns is not None and np.isfinite(self.base[columns]).all():
            base = self.base[columns]
            return np.asarray(base + self._rounded(values - base))
        return np.asarray(np.average(values[:there], axis=0, weights=self._shares[:there]))

    def _rounded(self, values: Matrix) -> Matrix:
        """The average of numbers that are float16 on their way."""
        size, whole = len(values), np.zeros_like(values[0], dtype=np.float16)
        for x, share in zip(values, self._shares, strict=True):
            whole += (x * (share * size / self._shares.sum())).astype(np.float16)
        return (whole / np.float16(size)).astype(np.float64)

    def _mean_of(self, gradients: list[Vectors]) -> Vectors:
        """Of all workers, in the warm-up."""
        if not self._halves and self._options.weights is None:
            return self._reduce(gradients)
        mean = self._rounded if self._halves else self.average
        return [
            torch.from_numpy(mean(torch.stack(column).numpy()))  # type: ignore[arg-type]
            for column in zip(*gradients, strict=True)
        ]

    def _within_nodes(self, gradients: list[Vectors]) -> list[Vectors]:
        """What each worker applies: its own gradient, or the mean of those of its node."""
        if self._options.within == "none":
            return gradients
        result: list[Vectors] = []
        for first in range(0, len(gradients), PER_NODE):
            node = slice(first, first + PER_NODE)
            shares = torch.from_numpy(self._shares[node] / self._shares[node].sum())
            means = [
                torch.tensordot(shares, torch.stack(column), 1)  # type: ignore[arg-type]
                for column in zip(*gradients[node], strict=True)
            ]
            result += [means] * len(shares)
        return result

    def _matrix(self, tensors: Callable[[int], list[torch.Tensor]]) -> Matrix:
        rows = [torch.cat([t.flatten().double() for t in tensors(i)]) for i in self._numbers]
        return torch.stack(rows).numpy()

    @property
    def _numbers(self) -> range:
        return range(len(self.models))

    def _set(self, tensors: Callable[[int], list[torch.Tensor]], matrix: Matrix) -> None:
        for i, row in zip(self._numbers, matrix, strict=True):
            for t, values in zip(
                tensors(i), np.split(row.copy(), np.cumsum(self.sizes)), strict=False
            ):
                t.copy_(torch.from_numpy(values).view_as(t))

    def _live(self, i: int) -> list[torch.Tensor]:
        return [p.data for p in self.models[i].parameters()]

    def _kept(self, *keys: str) -> Callable[[int], list[torch.Tensor]]:
        """What optimizers keep of all parameters; NaN where they keep nothing yet."""

        def tensors(i: int) -> list[torch.Tensor]:
            states = [self.optimizers[i].state.get(p, {}) for p in self.models[i].parameters()]
            return [
                next((state[key] for key in keys if key in state), torch.full_like(p, np.nan))
                for state, p in zip(states, self._live(i), strict=True)
            ]

        return tensors

    weights = property(
        lambda self: self._matrix(self._live), lambda self, value: self._set(self._live, value)
    )
    momenta, squares = (
        property(
            lambda self, keys=keys: self._matrix(self._kept(*keys)),
            lambda self, value, keys=keys: self._set(self._kept(*keys), value),
        )
        for keys in (("momentum_buffer", "exp_avg"), ("exp_avg_sq",))
    )


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
