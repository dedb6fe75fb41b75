"""All workers of a strategy in one process: the equations, with plain Keras optimizers.

None of hvd_pipe's code: gradients are averaged with numpy.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from fragments_reference import fragments_of
from keras_problem import OPTIMIZERS, STEPS, batch, loss_of, make_model, weights_of

from hvd_pipe.strategy import CoCoD, PipeSGD, parse

Vectors = list[npt.NDArray[np.float64]]

RANKS_A_NODE = 2

MOMENTA = {
    "momentum": ("momentums",),
    "accumulating": ("momentums",),
    "adam": ("_momentums", "_velocities"),
    "forgetful": ("_momentums", "_velocities"),
}
ROOTS = ("_velocities",)  # which are not let below zero


class Workers:
    """n models with their optimizers.

    Args:
        n: How many.
        optimizer: Its name.
        momenta: Those attributes of the optimizers that belong to a worker's position.
    """

    def __init__(self, n: int, optimizer: str, momenta: tuple[str, ...] = ()) -> None:
        self._momenta = momenta
        self.models = [make_model() for _ in range(n)]
        self.optimizers = [OPTIMIZERS[optimizer]() for _ in range(n)]
        self.steps = self.optimizers[0].gradient_accumulation_steps or 1
        for model, each in zip(self.models, self.optimizers, strict=True):
            each.gradient_accumulation_steps = None
            each.build(model.trainable_variables)

    def gradients(self, step: int) -> list[Vectors]:
        """Every worker's own, the mean over the passes that make one update."""
        found = []
        for rank, model in enumerate(self.models):
            passes = []
            for number in range(step * self.steps, (step + 1) * self.steps):
                x, y = batch(rank, number)
                with tf.GradientTape() as tape:
                    loss = loss_of(model, x, y)
                passes.append([g.numpy() for g in tape.gradient(loss, model.trainable_variables)])
            found.append([np.mean(column, axis=0) for column in zip(*passes, strict=True)])
        return found

    def update(self, gradients: list[Vectors]) -> None:
        for model, optimizer, vectors in zip(self.models, self.optimizers, gradients, strict=True):
            optimizer.apply([tf.constant(v) for v in vectors], model.trainable_variables)

    def variables(self, worker: int) -> list[Any]:
        found = list(self.models[worker].trainable_variables)
        for name in self._momenta:
            found += getattr(self.optimizers[worker], name)
        return found

    def roots(self) -> list[bool]:
        """For each of `variables`, whether a root is taken of it."""
        weights = len(self.models[0].trainable_variables)
        return [name in ROOTS for name in ("", *self._momenta) for _ in range(weights)]

    def positions(self) -> list[Vectors]:
        return [[v.numpy() for v in self.variables(i)] for i in range(len(self.models))]

    def move(self, positions: list[Vectors]) -> None:
        for i, values in enumerate(positions):
            for variable, value in zip(self.variables(i), values, strict=True):
                variable.assign(value)

    def lead(self, guess: list[Vectors]) -> list[Vectors]:
        """Move the weights as an update with ``guess`` would; return where they were."""
        true = self.positions()
        kept = [[v.numpy() for v in each.variables] for each in self.optimizers]
        self.update(guess)
        for optimizer, values in zip(self.optimizers, kept, strict=True):
            for variable, value in zip(optimizer.variables, values, strict=True):
                variable.assign(value)
        return true

    def average_moving_averages(self) -> None:
        if not self.optimizers[0].use_ema:
            return
        kept = [each._model_variables_moving_average for each in self.optimizers]
        for column in zip(*kept, strict=True):
            average = np.mean([each.numpy() for each in column], axis=0)
            for each in column:
                each.assign(average)


def mean(vectors: list[Vectors], weights: tuple[float, ...] | None = None) -> Vectors:
    columns = zip(*vectors, strict=True)
    return [np.average(np.array(column), axis=0, weights=weights) for column in columns]


def within_nodes(vectors: list[Vectors], method: CoCoD) -> list[Vectors]:
    """Each worker's gradients, averaged over its node's workers if these train synchronously."""
    if method.within == "none":
        return vectors
    found: list[Vectors] = []
    for start in range(0, len(vectors), RANKS_A_NODE):
        node = slice(start, start + RANKS_A_NODE)
        found += [mean(vectors[node], method.weights and method.weights[node])] * len(
            vectors[node]
        )
    return found


class Rounds:
    """What a round of CoCoD's ends with, by its docstring; of all tensors, or of a fragment.

    Args:
        method: The rule.
        roots: For each tensor, whether a root is taken of it.
        weights: How many tensors, the first, are the model's: the others are momenta.
        own: The indices of the fragment's tensors among a worker's.
    """

    def __init__(self, method: CoCoD, roots: list[bool], weights: int, own: list[int]) -> None:
        self.method, self.roots, self.weights, self.own = method, roots, weights, own
        self.anchor: Vectors = []
        self.velocity: Vectors = []
        self.clamped = 0
        self.starts: list[Vectors] = []

    def start(self, workers: Workers) -> None:
        self.starts = self._mine(workers.positions())

    def end(self, workers: Workers) -> None:
        positions = workers.positions()
        ends = self.finish(self.starts, self._mine(positions))
        for position, values in zip(positions, ends, strict=True):
            for i, value in zip(self.own, values, strict=True):
                position[i] = value
        workers.move(positions)

    def _mine(self, positions: list[Vectors]) -> list[Vectors]:
        return [[position[i] for i in self.own] for position in positions]

    def finish(self, starts: list[Vectors], ends: list[Vectors]) -> list[Vectors]:
        alpha, average = self.method.pull_back, mean(starts, self.method.weights)
        if self.method.outer != "none":
            average = self._outer_models(average)
        z = average if alpha is None else self._anchors(average)
        found = []
        for start, end in zip(starts, ends, strict=True):
            one = []
            for i, (x, s) in enumerate(zip(end, start, strict=True)):
                value = average[i] + (x - s) if alpha is None else x - alpha * (x - z[i])
                if self.roots[i]:
                    self.clamped += int((value < 0).sum())
                    value = np.maximum(value, 0)
                one.append(value)
            found.append(one)
        return found

    def _outer_models(self, average: Vectors) -> Vectors:
        """The weights' outer models, and plain averages of momenta."""
        lr, mu, mine = self.method.outer_lr, self.method.outer_momentum, average[: self.weights]
        if not self.anchor:
            self.anchor, self.velocity = mine, [np.zeros_like(each) for each in mine]
        changes = [g - m for g, m in zip(self.anchor, mine, strict=True)]
        self.velocity = [mu * u + d for u, d in zip(self.velocity, changes, strict=True)]
        self.anchor = [
            g - lr * (d + mu * u)
            for g, d, u in zip(self.anchor, changes, self.velocity, strict=True)
        ]
        return [*self.anchor, *average[self.weights :]]

    def _anchors(self, average: Vectors) -> Vectors:
        """The weights' anchors, and plain averages of momenta."""
        mine = average[: self.weights]
        if not self.anchor:
            self.anchor, self.velocity = mine, [np.zeros_like(each) for each in mine]
        self.velocity = [
            self.method.anchor_momentum * v + (m - z)
            for v, m, z in zip(self.velocity, mine, self.anchor, strict=True)
        ]
        self.anchor = [z + v for z, v in zip(self.anchor, self.velocity, strict=True)]
        return [*self.anchor, *average[self.weights :]]


def trajectory(n: int, strategy: str, optimizer: str) -> npt.NDArray[Any]:
    """Every worker's weights after every update, and after the last drain: (n, records, size)."""
    return _trained(n, strategy, optimizer)[0]


def values_clamped(n: int, strategy: str, optimizer: str) -> int:
    """How often a value was kept from getting below zero."""
    return _trained(n, strategy, optimizer)[1]


@functools.cache
def _trained(n: int, strategy: str, optimizer: str) -> tuple[npt.NDArray[Any], int]:
    method = parse(strategy)
    follow = isinstance(method, CoCoD) and method.momentum == "average"
    workers = Workers(n, optimizer, MOMENTA[optimizer] if follow else ())
    turns: list[Rounds] = []
    if isinstance(method, CoCoD):
        first = workers.positions()[0]
        weights = len(workers.models[0].trainable_variables)
        turns = [Rounds(method, workers.roots(), weights, list(range(len(first))))]
        if method.fragments > 1:
            parts = fragments_of([value.nbytes for value in first], method.fragments)
            roots = [False] * weights
            turns = [Rounds(method, roots, len(own), own) for own in parts]
    records: list[list[Any]] = []
    pending: Vectors | None = None
    true: list[Vectors] = []
    local = 0
    average = functools.partial(mean, weights=getattr(method, "weights", None))
    for step in range(STEPS // workers.steps):
        mine = workers.gradients(step)
        records += [[weights_of(model) for model in workers.models]] * (workers.steps - 1)
        if isinstance(method, PipeSGD) and step >= method.warmup_steps:
            if true:
                workers.move(true)
            if pending is not None:
                workers.update([pending] * n)
            guess = {"local": mine, "previous": pending and [pending] * n}.get(method.prediction)
            pending = average(mine)
            if guess:
                true = workers.lead(guess)
        elif isinstance(method, CoCoD) and step >= method.warmup_steps:
            if local == 0:
                turns[0].start(workers)
            workers.update(within_nodes(mine, method))
            local += 1
            turn, rest = divmod(local, method.period // method.fragments)
            if rest == 0:
                turns[(turn - 1) % len(turns)].end(workers)
                turns[turn % len(turns)].start(workers)
        else:
            workers.update([average(mine)] * n)
        records.append([weights_of(model) for model in workers.models])
    if true:
        workers.move(true)
    if pending is not None:
        workers.update([pending] * n)
    if turns:
        workers.move([average(workers.positions())] * n)
        workers.average_moving_averages()
    for model, each in zip(workers.models, workers.optimizers, strict=True):
        each.finalize_variable_values(model.trainable_variables)
    records.append([weights_of(model) for model in workers.models])
    return np.array(records).swapaxes(0, 1), sum(each.clamped for each in turns)
