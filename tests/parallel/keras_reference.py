"""All workers of a strategy in one process: the equations, with plain Keras optimizers.

None of hvd_pipe's code: gradients are averaged with numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras_problem import OPTIMIZERS, STEPS, batch, loss_of, make_model, weights_of

from hvd_pipe.strategy import CoCoD, PipeSGD, parse

Vectors = list[npt.NDArray[np.float64]]


class Workers:
    """n models with their optimizers."""

    def __init__(self, n: int, optimizer: str) -> None:
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

    def positions(self) -> list[Vectors]:
        return [[v.numpy() for v in model.trainable_variables] for model in self.models]

    def move(self, positions: list[Vectors]) -> None:
        for model, values in zip(self.models, positions, strict=True):
            for variable, value in zip(model.trainable_variables, values, strict=True):
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


def mean(vectors: list[Vectors]) -> Vectors:
    return [np.mean(column, axis=0) for column in zip(*vectors, strict=True)]


def trajectory(n: int, strategy: str, optimizer: str) -> npt.NDArray[Any]:
    """Every worker's weights after every update, and after the last drain: (n, records, size)."""
    method = parse(strategy)
    workers = Workers(n, optimizer)
    records: list[list[Any]] = []
    pending: Vectors | None = None
    started: list[Vectors] = []
    true: list[Vectors] = []
    local = 0
    for step in range(STEPS // workers.steps):
        mine = workers.gradients(step)
        records += [[weights_of(model) for model in workers.models]] * (workers.steps - 1)
        if isinstance(method, PipeSGD) and step >= method.warmup_steps:
            if true:
                workers.move(true)
            if pending is not None:
                workers.update([pending] * n)
            guess = {"local": mine, "previous": pending and [pending] * n}.get(method.prediction)
            pending = mean(mine)
            if guess:
                true = workers.lead(guess)
        elif isinstance(method, CoCoD) and step >= method.warmup_steps:
            if not started:
                started = workers.positions()
            workers.update(mine)
            local += 1
            if local % method.period == 0:
                ends, average = workers.positions(), mean(started)
                workers.move(
                    [
                        [m + (x - s) for m, x, s in zip(average, end, start, strict=True)]
                        for end, start in zip(ends, started, strict=True)
                    ]
                )
                started = workers.positions()
        else:
            workers.update([mean(mine)] * n)
        records.append([weights_of(model) for model in workers.models])
    if true:
        workers.move(true)
    if pending is not None:
        workers.update([pending] * n)
    if isinstance(method, CoCoD):
        workers.move([mean(workers.positions())] * n)
        workers.average_moving_averages()
    for model, each in zip(workers.models, workers.optimizers, strict=True):
        each.finalize_variable_values(model.trainable_variables)
    records.append([weights_of(model) for model in workers.models])
    return np.array(records).swapaxes(0, 1)
