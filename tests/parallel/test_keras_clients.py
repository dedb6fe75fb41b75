"""Keras' guide to GANs by ``fit`` on two ranks: the weights of two workers in one process.

A step computes gradients of each part of the model, and an optimizer of that part applies them. On
ranks distributed optimizers do so, in ``train_step``; in one process `equation.Equation` does,
with plain optimizers of Keras. Other steps of one's own are in `test_keras_forward`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from equation import Equation
from keras_training import forward
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.tensorflow.pending import due

pytestmark = on_ranks(2, init=hvd.init)

FORWARD = "forward"
"""Of `keras_training.forward`'s plan: nothing is tried, so that steps are traced once."""
STRATEGIES = ("merged-gradient:bucket_bytes=200", FORWARD, "pipe-sgd", "cocod:period=4")

BATCH, STEPS = 4, 7  # of a worker: CoCoD's rounds of four steps, and part of one
FEATURES, NOISE = 6, 3

Weights = npt.NDArray[np.float64]
Gradients = list[Any]


def shard(rank: int) -> tf.data.Dataset:
    """A worker's part of all data."""
    x = np.random.default_rng(3).standard_normal((2 * BATCH * STEPS, FEATURES))
    dataset = tf.data.Dataset.from_tensor_slices((x, np.sin(x[:, :2])))
    return dataset.shard(2, rank).batch(BATCH)


def weights_of(model: Any) -> Weights:
    return np.concatenate([each.numpy().ravel() for each in model.weights])


def dense(inputs: int, *units: int) -> Any:
    """Return dense layers."""
    layers = [keras.layers.Dense(each, "tanh") for each in units[:-1]]
    return keras.Sequential([keras.Input((inputs,)), *layers, keras.layers.Dense(units[-1])])


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
        return list(tape.gradient(loss, self.discriminator.trainable_weights))

    def g_gradients(self, data: Any) -> Gradients:
        noise, misleading = self.noise(), np.zeros((BATCH, 1))
        with tf.GradientTape() as tape:
            loss = self.loss_fn(misleading, self.discriminator(self.generator(noise)))
        self.g_loss_metric.update_state(loss)
        return list(tape.gradient(loss, self.generator.trainable_weights))

    def parts(self) -> list[tuple[Any, Callable[[Any], Gradients]]]:
        """The models that are trained, each with what computes its gradients."""
        return [(self.discriminator, self.d_gradients), (self.generator, self.g_gradients)]

    def train_step(self, data: Any) -> dict[str, Any]:
        self.d_optimizer.apply(self.d_gradients(data), self.discriminator.trainable_weights)
        self.g_optimizer.apply(self.g_gradients(data), self.generator.trainable_weights)
        return {each.name: each.result() for each in self.metrics}


class Workers:
    """One part of each worker's model with its plain optimizer, for an `Equation`."""

    def __init__(
        self, optimizer: Callable[[], Any], parts: Sequence[tuple[Any, Callable[[Any], Gradients]]]
    ) -> None:
        self._optimizers = [optimizer() for _ in parts]
        self._variables = [model.trainable_variables for model, _ in parts]
        self._gradients = [compute for _, compute in parts]
        self.sizes = [each.numpy().size for each in self._variables[0]]

    def gradients(self, batches: Any) -> Weights:
        both = [compute(each) for compute, each in zip(self._gradients, batches, strict=True)]
        return np.array([np.concatenate([np.ravel(each) for each in own]) for own in both])

    def update(self, gradients: Weights) -> None:
        for optimizer, row, own in zip(self._optimizers, gradients, self._variables, strict=True):
            optimizer.apply(self._split(row), own)

    @property
    def weights(self) -> Weights:
        return np.array(
            [np.concatenate([each.numpy().ravel() for each in own]) for own in self._variables]
        )

    @weights.setter
    def weights(self, rows: Weights) -> None:
        for row, own in zip(rows, self._variables, strict=True):
            for variable, value in zip(own, self._split(row), strict=True):
                variable.assign(value)

    def _split(self, row: Weights) -> list[Any]:
        values = np.split(row, np.cumsum(self.sizes)[:-1])
        pairs = zip(values, self._variables[0], strict=True)
        return [tf.constant(value.reshape(each.shape)) for value, each in pairs]


def plain() -> Any:
    return keras.optimizers.Adam(0.01, beta_1=0.5)


def seeded(seed: int, rank: int) -> Gan:
    keras.utils.set_random_seed(seed)
    return Gan(rank)


@functools.cache
def expected(strategy: str | None) -> Weights:
    """Computed on all ranks, as Keras names variables after the number of models."""
    models = [seeded(0, rank) for rank in range(2)]
    for mine, first in zip(models[1].weights, models[0].weights, strict=True):
        mine.assign(first)
    for model in models:
        model.compile(None, None)
    parts = zip(*(model.parts() for model in models), strict=True)
    equations = [Equation(strategy, Workers(plain, part)) for part in parts]
    for batches in zip(shard(0), shard(1), strict=True):
        for equation in equations:
            equation.step(batches)
    for equation in equations:
        equation.synchronize()
    return weights_of(models[0])


def fitted(strategy: str) -> tuple[Gan, list[bool]]:
    """Return a model, and after which batches updates were due."""
    late: list[bool] = []
    model = seeded(hvd.rank(), hvd.rank())
    optimizers = []
    for part, _ in model.parts():
        chosen = forward(part) if strategy == FORWARD else strategy
        optimizers.append(hvd.DistributedOptimizer(plain(), strategy=chosen))
        if strategy.startswith("cocod"):  # else its slots become rank 0's after a local step
            optimizers[-1].build(part.trainable_variables)
    model.compile(*optimizers)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: late.append(bool(due))),
    ]
    model.fit(shard(hvd.rank()), verbose=0, callbacks=callbacks)
    return model, late


# nightly but for one, as a trace takes seconds
@pytest.mark.parametrize(
    "strategy",
    [*(pytest.param(name, marks=pytest.mark.nightly) for name in STRATEGIES[:3]), STRATEGIES[3]],
)
def test_fit_has_the_weights_of_one_process(strategy: str) -> None:
    model, late = fitted(strategy)
    assert any(late) == (strategy == FORWARD)
    first, other = gather(weights_of(model))
    np.testing.assert_array_equal(first, other)
    wanted = expected("merged-gradient" if strategy in STRATEGIES[:2] else strategy)
    np.testing.assert_allclose(first, wanted, rtol=0, atol=1e-12)
    assert np.abs(expected(None) - wanted).max() > 1e-3
