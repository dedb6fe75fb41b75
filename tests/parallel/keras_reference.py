"""All workers of a strategy in one process: the equations of `keras_problem`, in NumPy.

Gradients and updates are written out here, averages in `equation`. ``test_keras_equations``
compares gradients and updates with plain Keras.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from equation import Equation, Matrix, mean
from keras_problem import OPTIMIZERS, STEPS, batch, make_model


def rounded(value: float) -> float:
    """A constant as Keras makes a tensor of it, of float32, before it casts that to float64."""
    return float(np.float32(value))


# Whose options the equations read. They are made here, on all ranks, as are the weights that all
# begin with (kernels and biases, in turn): the names of later ones count those before them.
RULES = {name: make() for name, make in OPTIMIZERS.items()}
TENSORS: list[Matrix] = [each.numpy() for each in make_model().trainable_variables]
COLUMNS = np.cumsum([each.size for each in TENSORS])[:-1]  # where the next tensor begins


class Workers:
    """n models with their optimizers."""

    def __init__(self, n: int, optimizer: str) -> None:
        self.rule, self.updates = RULES[optimizer], 0
        self.has_squares = isinstance(self.rule, keras.optimizers.Adam)
        self.passes = self.rule.gradient_accumulation_steps or 1
        self.average_every = self.rule.ema_overwrite_frequency if self.rule.use_ema else None
        self.sizes = [each.size for each in TENSORS]
        self.weights = np.tile(np.concatenate([each.ravel() for each in TENSORS]), (n, 1))
        self.momenta, self.squares, self.averages = np.zeros((3, *self.weights.shape))

    def gradients(self, step: int) -> Matrix:
        """Every worker's own, the mean over the passes that make one update."""
        passes = range(step * self.passes, (step + 1) * self.passes)
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
        rule, schedule = self.rule, self.rule._learning_rate
        rate = float(schedule(self.updates) if callable(schedule) else rule.learning_rate)
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        gradients = gradients * np.minimum(1, (rule.global_clipnorm or np.inf) / norms)
        self.weights = self.weights * (1 - rounded(rule.weight_decay or 0.0) * rate)
        self.updates += 1
        if not self.has_squares:
            self.momenta = rounded(rule.momentum) * self.momenta - rate * gradients
            self.weights = self.weights + self.momenta
        else:
            first, second = rule.beta_1, rule.beta_2
            self.momenta = self.momenta + (1 - first) * (gradients - self.momenta)
            self.squares = self.squares + (1 - second) * (gradients**2 - self.squares)
            p, q = (rounded(beta) ** self.updates for beta in (first, second))
            rate *= np.sqrt(1 - q) / (1 - p)
            self.weights = self.weights - rate * self.momenta / (
                np.sqrt(self.squares) + rule.epsilon
            )
        if self.average_every:
            old = 0.99 if self.updates > 1 else 0.0
            self.averages = old * self.averages + (1 - old) * self.weights
            if self.updates % self.average_every == 0:
                self.weights = self.averages

    def lead(self, guess: Matrix) -> Matrix:
        """Move the weights as an update with ``guess`` would; return where they were."""
        true, ahead = self.weights, copy.copy(self)
        ahead.update(guess)
        self.weights = ahead.weights
        return true


def trajectory(n: int, strategy: str, optimizer: str) -> npt.NDArray[Any]:
    """Every worker's weights after every update, and after the last drain: (n, records, size)."""
    return _trained(n, strategy, optimizer)[0]


def values_clamped(n: int, strategy: str, optimizer: str) -> int:
    """How often a value was kept from getting below zero."""
    return _trained(n, strategy, optimizer)[1]


@functools.cache
def _trained(n: int, strategy: str, optimizer: str) -> tuple[npt.NDArray[Any], int]:
    workers = Workers(n, optimizer)
    equation = Equation(strategy, workers)
    records: list[Matrix] = []
    for step in range(STEPS // workers.passes):
        records += [workers.weights] * (workers.passes - 1)
        equation.step(step)
        records.append(workers.weights)
    equation.synchronize()
    if equation.rounds:
        workers.averages = mean(workers.averages, None)
    records.append(workers.averages if workers.average_every else workers.weights)
    return np.array(records).swapaxes(0, 1), sum(each.clamped for each in equation.rounds)
