"""Clients of Keras' guides, each as a script has it, and the same for two workers in one process.

A client is made of turns. In a turn each worker computes gradients of some variables by its own
data, and an optimizer applies them. On ranks a distributed optimizer does so, in ``train_step``;
in one process an `Applied` carries out the strategy's equation with two plain optimizers of Keras.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

keras.config.set_floatx("float64")

BATCH, STEPS = 4, 7  # of a worker: CoCoD's rounds of four steps, and part of one
FEATURES, NOISE = 6, 3

Weights = npt.NDArray[np.float64]
Gradients = list[Any]


def dataset() -> tf.data.Dataset:
    """All data, which each rank takes a shard of."""
    generator = np.random.default_rng(3)
    x = generator.standard_normal((2 * BATCH * STEPS, FEATURES))
    return tf.data.Dataset.from_tensor_slices((x, np.sin(x[:, :2])))


def shard(rank: int) -> tf.data.Dataset:
    return dataset().shard(2, rank).batch(BATCH)


def weights_of(model: Any) -> Weights:
    return np.concatenate([each.numpy().ravel() for each in model.weights])


def dense(inputs: int, *units: int) -> Any:
    """Return dense layers."""
    layers = [keras.layers.Dense(each, "tanh") for each in units[:-1]]
    return keras.Sequential([keras.Input((inputs,)), *layers, keras.layers.Dense(units[-1])])


# Transfer learning: keras.io/guides/transfer_learning


def tuned_model() -> Any:
    """Return a base, as if it had been trained, and a new head."""
    base = keras.Sequential(
        [keras.Input((FEATURES,)), *(keras.layers.Dense(5, "tanh") for _ in range(2))]
    )
    base.trainable = False
    return keras.Sequential([keras.Input((FEATURES,)), base, keras.layers.Dense(2)])


def unfreeze(model: Any) -> None:
    model.layers[0].trainable = True


def gradients_of(model: Any, data: Any) -> Gradients:
    x, y = data
    with tf.GradientTape() as tape:
        loss = keras.ops.mean(keras.losses.mean_squared_error(y, model(x, training=True)))
    found: Gradients = tape.gradient(loss, model.trainable_variables)
    return found


# A train_step of one's own: keras.io/guides/custom_train_step_in_tensorflow


class Custom(keras.Model):  # type: ignore[misc]
    """Its loss has a part that ``compile`` does not know."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]

    def gradients(self, data: Any) -> Gradients:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = keras.ops.mean(keras.ops.abs(predicted - y) ** 1.5)
            loss += 0.1 * keras.ops.mean(predicted**2)
        self.loss_tracker.update_state(loss)
        found: Gradients = tape.gradient(loss, self.trainable_variables)
        return found

    def train_step(self, data: Any) -> dict[str, Any]:
        self.optimizer.apply(self.gradients(data), self.trainable_variables)
        return {each.name: each.result() for each in self.metrics}


def custom_model() -> Custom:
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(5, "tanh")(inputs)
    hidden = keras.layers.Dense(4, "tanh")(hidden)
    return Custom(inputs, keras.layers.Dense(2)(hidden))


# A GAN: keras.io/examples/generative/dcgan_overriding_train_step, of dense layers


class Gan(keras.Model):  # type: ignore[misc]
    """Each rank draws noise of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.discriminator, self.generator = dense(FEATURES, 5, 1), dense(NOISE, 5, FEATURES)
        self.seed_generator = keras.random.SeedGenerator(1337 + rank)

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss_metric, self.g_loss_metric]

    def noise(self) -> Any:
        return keras.random.normal((BATCH, NOISE), seed=self.seed_generator)

    def d_gradients(self, data: Any) -> Gradients:
        images, _ = data
        combined = keras.ops.concatenate([self.generator(self.noise()), images])
        labels = np.repeat([[1.0], [0.0]], BATCH, axis=0)
        with tf.GradientTape() as tape:
            loss = self.loss_fn(labels, self.discriminator(combined))
        self.d_loss_metric.update_state(loss)
        found: Gradients = tape.gradient(loss, self.discriminator.trainable_weights)
        return found

    def g_gradients(self, data: Any) -> Gradients:
        noise, misleading = self.noise(), np.zeros((BATCH, 1))
        with tf.GradientTape() as tape:
            loss = self.loss_fn(misleading, self.discriminator(self.generator(noise)))
        self.g_loss_metric.update_state(loss)
        found: Gradients = tape.gradient(loss, self.generator.trainable_weights)
        return found

    def train_step(self, data: Any) -> dict[str, Any]:
        self.d_optimizer.apply(self.d_gradients(data), self.discriminator.trainable_weights)
        self.g_optimizer.apply(self.g_gradients(data), self.generator.trainable_weights)
        return {each.name: each.result() for each in self.metrics}


# In one process.


class Applied:
    """What one optimizer of each worker makes of the workers' gradients, by a strategy's equation.

    Args:
        strategy: Of those of ``test_keras_clients``; ``"alone"`` averages nothing.
        optimizers: A plain one a worker.
        variables: What each worker's optimizer trains.
        gradients: Computes a worker's gradients of a batch.
    """

    def __init__(
        self,
        strategy: str,
        optimizers: Sequence[Any],
        variables: Sequence[list[Any]],
        gradients: Sequence[Callable[[Any], Gradients]],
    ) -> None:
        self.name, _, options = strategy.partition(":")
        self._period = int(options.removeprefix("period=")) if self.name == "cocod" else 0
        self._optimizers, self._variables, self._gradients = optimizers, variables, gradients
        self._pending: Gradients | None = None
        self._start: list[Gradients] = []
        self._steps = 0

    def turn(self, batches: Sequence[Any]) -> None:
        own = [compute(each) for compute, each in zip(self._gradients, batches, strict=True)]
        if self.name == "merged-gradient":
            self._apply([mean(own)] * len(own))
        elif self.name == "pipe-sgd":
            due, self._pending = self._pending, mean(own)
            if due is not None:
                self._apply([due] * len(own))
        elif self.name == "cocod":
            if self._steps % self._period == 0:
                self._start = self._positions()
            self._apply(own)
            self._steps += 1
            if self._steps % self._period == 0:
                ends, average = self._positions(), mean(self._start)
                for variables, end, start in zip(self._variables, ends, self._start, strict=True):
                    for v, e, s, a in zip(variables, end, start, average, strict=True):
                        v.assign(a + (e - s))
        else:
            self._apply(own)

    def synchronize(self) -> None:
        if self._pending is not None:
            self._apply([self._pending] * len(self._optimizers))
            self._pending = None
        if self.name == "cocod":
            average, self._steps = mean(self._positions()), 0
            for variables in self._variables:
                for variable, value in zip(variables, average, strict=True):
                    variable.assign(value)

    def _positions(self) -> list[Gradients]:
        return [[each.numpy() for each in variables] for variables in self._variables]

    def _apply(self, gradients: Sequence[Gradients]) -> None:
        for optimizer, own, variables in zip(
            self._optimizers, gradients, self._variables, strict=True
        ):
            optimizer.apply(own, variables)


def mean(workers: Sequence[Gradients]) -> Gradients:
    return [sum(column) / len(workers) for column in zip(*workers, strict=True)]


def trained(turns: Sequence[Applied]) -> None:
    """What ``fit`` does, for both workers."""
    for batches in zip(shard(0), shard(1), strict=True):
        for each in turns:
            each.turn(batches)
    for each in turns:
        each.synchronize()


def two_of(make: Callable[[int], Any]) -> list[Any]:
    """Return the models of two workers, which begin alike."""
    models = [make(rank) for rank in range(2)]
    for mine, first in zip(models[1].weights, models[0].weights, strict=True):
        mine.assign(first)
    return models


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def fine_tuning_alone(strategy: str) -> Weights:
    models = two_of(lambda _: seeded(0, tuned_model))
    for make in (lambda: keras.optimizers.Adam(0.02), lambda: keras.optimizers.Adam(0.002)):
        gradients = [lambda data, model=each: gradients_of(model, data) for each in models]
        variables = [each.trainable_variables for each in models]
        trained([Applied(strategy, [make(), make()], variables, gradients)])
        for each in models:
            unfreeze(each)
    return weights_of(models[0])


def custom_alone(strategy: str) -> Weights:
    models = two_of(lambda _: seeded(0, custom_model))
    variables = [each.trainable_variables for each in models]
    trained([Applied(strategy, [sgd(), sgd()], variables, [each.gradients for each in models])])
    return weights_of(models[0])


def gan_alone(strategy: str) -> Weights:
    models = two_of(lambda rank: seeded(0, lambda: Gan(rank)))
    for each in models:
        each.compile(None, None)
    parts = [
        (
            [each.discriminator.trainable_weights for each in models],
            [m.d_gradients for m in models],
        ),
        ([each.generator.trainable_weights for each in models], [m.g_gradients for m in models]),
    ]
    trained([Applied(strategy, [gan_adam(), gan_adam()], *part) for part in parts])
    return weights_of(models[0])


def gan_adam() -> Any:
    return keras.optimizers.Adam(0.01, beta_1=0.5)


def seeded(seed: int, make: Callable[[], Any]) -> Any:
    keras.utils.set_random_seed(seed)
    return make()
