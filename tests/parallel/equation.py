"""What each strategy makes of all workers' steps, in NumPy and in one process.

None of hvd_pipe's code, but for the options of a strategy. Row r of a matrix is worker r's, with
all weights, or one momentum of each, in a line.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_pipe.strategy import CoCoD, PipeSGD, parse

Matrix = npt.NDArray[np.float64]

RANKS_A_NODE = 2


def fragments_of(sizes: list[int], count: int) -> list[list[int]]:
    """The indices of each fragment's tensors: the largest first, each into the smallest so far."""
    found: list[list[int]] = [[] for _ in range(count)]
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        min(found, key=lambda own: sum(sizes[j] for j in own)).append(i)
    return [sorted(own) for own in found]


def mean(rows: Matrix, weights: tuple[float, ...] | None) -> Matrix:
    """The mean of the workers, for each of them."""
    return np.broadcast_to(np.average(rows, axis=0, weights=weights), rows.shape)


def within_nodes(gradients: Matrix, method: CoCoD) -> Matrix:
    """Every worker's gradients, averaged over its node's workers if these train synchronously."""
    if method.within == "none":
        return gradients
    nodes = [slice(i, i + RANKS_A_NODE) for i in range(0, len(gradients), RANKS_A_NODE)]
    return np.concatenate(
        [mean(gradients[node], method.weights and method.weights[node]) for node in nodes]
    )


class Rounds:
    """What a round of CoCoD's ends with, of some columns of the weights, and of some momenta."""

    def __init__(
        self, method: CoCoD, workers: Any, weights: list[int], momenta: list[str]
    ) -> None:
        self.method, self.workers, self.columns, self.momenta = method, workers, weights, momenta
        self.starts: list[Matrix] = []
        self.anchor: Matrix | None = None
        self.velocity = np.zeros(len(weights))
        self.clamped = 0

    def start(self) -> None:
        self.starts = self._positions()
        weights = self.method.weights
        self.averages = [np.average(each, axis=0, weights=weights) for each in self.starts]

    def _positions(self) -> list[Matrix]:
        weights = self.workers.weights[:, self.columns]
        return [weights, *(getattr(self.workers, name) for name in self.momenta)]

    def end(self) -> None:
        averages = [self._anchored(self.averages[0]), *self.averages[1:]]
        ends = [
            self._end(*each) for each in zip(self.starts, self._positions(), averages, strict=True)
        ]
        weights = self.workers.weights.copy()
        weights[:, self.columns] = ends[0]
        self.workers.weights = weights
        for name, value in zip(self.momenta, ends[1:], strict=True):
            least = 0.0 if name == "squares" else -np.inf  # a root is taken of squares
            self.clamped += int((value < least).sum())
            setattr(self.workers, name, np.maximum(value, least))

    def _end(self, start: Matrix, end: Matrix, z: Matrix) -> Matrix:
        alpha = self.method.pull_back
        return z + (end - start) if alpha is None else end - alpha * (end - z)

    def _anchored(self, average: Matrix) -> Matrix:
        """The outer model of the weights, or their anchor, where there is one."""
        method = self.method
        if method.outer == "none" and method.pull_back is None:
            return average
        if self.anchor is None:
            self.anchor = average
        if method.outer != "none":
            mu, change = method.outer_momentum, self.anchor - average
            self.velocity = mu * self.velocity + change
            self.anchor = self.anchor - method.outer_lr * (change + mu * self.velocity)
        else:
            self.velocity = method.anchor_momentum * self.velocity + (average - self.anchor)
            self.anchor = self.anchor + self.velocity
        return self.anchor


def rounds_of(method: CoCoD, workers: Any) -> list[Rounds]:
    """The rounds of all fragments, in the order in which they end."""
    columns = np.split(np.arange(workers.weights.shape[1]), np.cumsum(workers.sizes)[:-1])
    momenta = []
    if method.momentum == "average":
        momenta = ["momenta", "squares"] if workers.has_squares else ["momenta"]
    parts = fragments_of([8 * size for size in workers.sizes], method.fragments)
    return [
        Rounds(method, workers, [int(i) for number in own for i in columns[number]], momenta)
        for own in parts
    ]


class Equation:
    """What a strategy makes of all workers' steps.

    Args:
        strategy: Its name and options; None averages nothing.
        workers: `Workers`, or others with ``weights``, ``sizes``, ``gradients`` and ``update``.
    """

    def __init__(self, strategy: str | None, workers: Any) -> None:
        self.method = None if strategy is None else parse(strategy)
        self.workers = workers
        self.shares = getattr(self.method, "weights", None)
        self.rounds = rounds_of(self.method, workers) if isinstance(self.method, CoCoD) else []
        self._pending: Matrix | None = None
        self._true: Matrix | None = None
        self._steps = 0

    def step(self, data: Any) -> None:
        """A step of all workers; ``data`` is what they compute their gradients of."""
        method, workers = self.method, self.workers
        mine = workers.gradients(data)
        since_warmup = self._steps - getattr(method, "warmup_steps", 0)
        self._steps += 1
        if isinstance(method, PipeSGD) and since_warmup >= 0:
            self._update_late()
            guess = {"local": mine, "previous": self._pending}.get(method.prediction)
            self._pending = mean(mine, self.shares)
            if guess is not None:
                self._true = workers.lead(guess)
        elif isinstance(method, CoCoD) and since_warmup >= 0:
            if since_warmup == 0:
                self.rounds[0].start()
            workers.update(within_nodes(mine, method))
            turn, rest = divmod(since_warmup + 1, method.period // method.fragments)
            if rest == 0:
                self.rounds[(turn - 1) % len(self.rounds)].end()
                self.rounds[turn % len(self.rounds)].start()
        else:
            workers.update(mine if method is None else mean(mine, self.shares))

    def _update_late(self) -> None:
        if self._true is not None:
            self.workers.weights = self._true
        if self._pending is not None:
            self.workers.update(self._pending)

    def synchronize(self) -> None:
        """Leave nothing in flight; the next step begins as the first one after the warm-up."""
        self._update_late()
        self._pending = self._true = None
        if self.rounds:
            self.workers.weights = mean(self.workers.weights, self.shares)
            self._steps = min(self._steps, self.method.warmup_steps)

    def forget(self) -> None:
        """Drop the gradients that are in flight."""
        self._pending = None

    def move(self, old: list[int]) -> None:
        """Go on with workers that are as these old ones were; averages stay what they are."""
        self.workers.weights = self.workers.weights[old]
        self._pending = None if self._pending is None else self._pending[old]
        self._true = None if self._true is None else self._true[old]
        for each in self.rounds:
            each.starts = [start[old] for start in each.starts]
