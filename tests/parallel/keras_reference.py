"""All workers of a strategy in one process: the equations of `keras_problem`, in NumPy.

None of hvd_pipe's code, but for what a user passes: gradients, updates and averages are written
out here. ``test_keras_equations`` compares gradients and updates with plain Keras. Row r of a
matrix is worker r's, with all weights, or one momentum of each, in a line.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from fragments_reference import fragments_of
from keras_problem import STEPS, batch, make_model

from hvd_pipe.strategy import CoCoD, PipeSGD, parse

Matrix = npt.NDArray[np.float64]

RANKS_A_NODE = 2


@dataclass(frozen=True)
class Rule:
    """An optimizer of Keras, by the names of its arguments; see `keras_problem.OPTIMIZERS`."""

    rate: Callable[[int], float]  # by the number of updates before
    momentum: float = 0.0
    decay: float = 0.0
    norm: float = np.inf
    betas: tuple[float, float] | None = None
    epsilon: float = 1e-7
    average_every: int | None = None  # how often weights become their moving averages
    passes: int = 1  # how many gradients make an update


def rounded(value: float) -> float:
    """A constant as Keras makes a tensor of it, of float32, before it casts that to float64."""
    return float(np.float32(value))


RULES = {
    "sgd": Rule(lambda _: 0.1),
    "momentum": Rule(lambda _: 0.05, momentum=rounded(0.9), decay=rounded(0.01)),
    "adam": Rule(lambda _: 0.01, betas=(0.9, 0.999)),
    "forgetful": Rule(lambda _: 0.01, betas=(0.9, 0.3), epsilon=1e-3),
    "clipped": Rule(lambda _: 0.1, momentum=0.5, norm=0.3),
    "scheduled": Rule(lambda step: rounded(0.1 if step <= 4 else 0.05 if step <= 11 else 0.02)),
    "averaged": Rule(lambda _: 0.1, average_every=4),
    "accumulating": Rule(lambda _: 0.1, momentum=0.5, passes=3),
}


# The weights that all begin with: kernels and biases, in turn. They are made here, on all ranks,
# as the names of a later model count those before it.
TENSORS: list[Matrix] = [each.numpy() for each in make_model().trainable_variables]
COLUMNS = np.cumsum([each.size for each in TENSORS])[:-1]  # where the next tensor begins


class Workers:
    """n models with their optimizers."""

    def __init__(self, n: int, rule: Rule) -> None:
        self.rule, self.updates = rule, 0
        self.sizes = [each.size for each in TENSORS]
        self.weights = np.tile(np.concatenate([each.ravel() for each in TENSORS]), (n, 1))
        self.momenta, self.squares, self.averages = np.zeros((3, *self.weights.shape))

    def gradients(self, step: int) -> Matrix:
        """Every worker's own, the mean over the passes that make one update."""
        passes = range(step * self.rule.passes, (step + 1) * self.rule.passes)
        return np.mean([self._backward(number) for number in passes], axis=0)

    def _backward(self, step: int) -> Matrix:
        """The gradients of the mean squared error of `keras_problem.make_model`."""
        n, flat = len(self.weights), np.split(self.weights, COLUMNS, axis=1)
        layers = [each.reshape(n, *t.shape) for each, t in zip(flat, TENSORS, strict=True)]
        kernels, biases = layers[::2], layers[1::2]
        x, y = (np.array(parts) for parts in zip(*(batch(r, step) for r in range(n)), strict=True))
        inputs = [x]
        for kernel, bias in zip(kernels, biases, strict=True):
            output = inputs[-1] @ kernel + bias[:, None]
            inputs.append(np.tanh(output))
        slope = 2 * (output - y) / y[0].size
        gradients: list[Matrix] = []
        for kernel, into in zip(kernels[::-1], inputs[-2::-1], strict=True):
            gradients = [into.swapaxes(1, 2) @ slope, slope.sum(axis=1), *gradients]
            slope = (slope @ kernel.swapaxes(1, 2)) * (1 - into**2)
        return np.concatenate([each.reshape(n, -1) for each in gradients], axis=1)

    def update(self, gradients: Matrix) -> None:
        rule, rate = self.rule, self.rule.rate(self.updates)
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        gradients = gradients * np.minimum(1, rule.norm / norms)
        self.weights = self.weights * (1 - rule.decay * rate)
        self.updates += 1
        if rule.betas is None:
            self.momenta = rule.momentum * self.momenta - rate * gradients
            self.weights = self.weights + self.momenta
        else:
            first, second = rule.betas
            self.momenta = self.momenta + (1 - first) * (gradients - self.momenta)
            self.squares = self.squares + (1 - second) * (gradients**2 - self.squares)
            p, q = (rounded(beta) ** self.updates for beta in rule.betas)
            rate *= np.sqrt(1 - q) / (1 - p)
            self.weights = self.weights - rate * self.momenta / (
                np.sqrt(self.squares) + rule.epsilon
            )
        if rule.average_every:
            old = 0.99 if self.updates > 1 else 0.0
            self.averages = old * self.averages + (1 - old) * self.weights
            if self.updates % rule.average_every == 0:
                self.weights = self.averages

    def lead(self, guess: Matrix) -> Matrix:
        """Move the weights as an update with ``guess`` would; return where they were."""
        true, ahead = self.weights, copy.copy(self)
        ahead.update(guess)
        self.weights = ahead.weights
        return true


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
        self.anchor: Matrix | None = None
        self.velocity = np.zeros(len(weights))
        self.clamped = 0

    def start(self) -> None:
        self.starts = self._positions()

    def _positions(self) -> list[Matrix]:
        weights = self.workers.weights[:, self.columns]
        return [weights, *(getattr(self.workers, name) for name in self.momenta)]

    def end(self) -> None:
        averages = [mean(each, self.method.weights) for each in self.starts]
        averages[0] = self._anchored(averages[0])
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
        momenta = ["momenta", "squares"] if workers.rule.betas else ["momenta"]
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
        self._update_late()
        if self.rounds:
            self.workers.weights = mean(self.workers.weights, self.shares)


def trajectory(n: int, strategy: str, optimizer: str) -> npt.NDArray[Any]:
    """Every worker's weights after every update, and after the last drain: (n, records, size)."""
    return _trained(n, strategy, optimizer)[0]


def values_clamped(n: int, strategy: str, optimizer: str) -> int:
    """How often a value was kept from getting below zero."""
    return _trained(n, strategy, optimizer)[1]


@functools.cache
def _trained(n: int, strategy: str, optimizer: str) -> tuple[npt.NDArray[Any], int]:
    rule = RULES[optimizer]
    workers = Workers(n, rule)
    equation = Equation(strategy, workers)
    records: list[Matrix] = []
    for step in range(STEPS // rule.passes):
        records += [workers.weights] * (rule.passes - 1)
        equation.step(step)
        records.append(workers.weights)
    equation.synchronize()
    if equation.rounds:
        workers.averages = mean(workers.averages, None)
    records.append(workers.averages if rule.average_every else workers.weights)
    return np.array(records).swapaxes(0, 1), sum(each.clamped for each in equation.rounds)
