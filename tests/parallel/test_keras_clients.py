"""What Keras' guides show, by ``fit`` on two ranks: the weights of two workers in one process.

A client is a model with parts. In a step each worker computes gradients of each part by its own
data, and an optimizer of that part applies them. On ranks a distributed optimizer does so, in
``train_step``; in one process `equation.Equation` does, with plain optimizers of Keras.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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


def gradients_of(model: Any, data: Any) -> Gradients:
    x, y = data
    with tf.GradientTape() as tape:
        loss = keras.ops.mean(keras.losses.mean_squared_error(y, model(x, training=True)))
    return list(tape.gradient(loss, model.trainable_variables))


# Transfer learning: keras.io/guides/transfer_learning


def tuned_model() -> Any:
    """Return a base, as if it had been trained, and a new head."""
    base = keras.Sequential(
        [keras.Input((FEATURES,)), *(keras.layers.Dense(5, "tanh") for _ in range(2))]
    )
    base.trainable = False
    return keras.Sequential([keras.Input((FEATURES,)), base, keras.layers.Dense(2)])


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
        return list(tape.gradient(loss, self.trainable_variables))

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
        return list(tape.gradient(loss, self.discriminator.trainable_weights))

    def g_gradients(self, data: Any) -> Gradients:
        noise, misleading = self.noise(), np.zeros((BATCH, 1))
        with tf.GradientTape() as tape:
            loss = self.loss_fn(misleading, self.discriminator(self.generator(noise)))
        self.g_loss_metric.update_state(loss)
        return list(tape.gradient(loss, self.generator.trainable_weights))

    def train_step(self, data: Any) -> dict[str, Any]:
        self.d_optimizer.apply(self.d_gradients(data), self.discriminator.trainable_weights)
        self.g_optimizer.apply(self.g_gradients(data), self.generator.trainable_weights)
        return {each.name: each.result() for each in self.metrics}


class Client(NamedTuple):
    """A script of a guide.

    Args:
        make: Makes a rank's model.
        optimizers: Of the calls of ``fit``. Before the second one, the model's base is unfrozen.
        parts: By a model, the models that are trained, each with what computes its gradients.
        loss: More arguments of ``compile``.
    """

    make: Callable[[int], Any]
    optimizers: Sequence[Callable[[], Any]]
    parts: Callable[[Any], list[tuple[Any, Callable[[Any], Gradients]]]]
    loss: tuple[str, ...] = ()


CLIENTS = {
    "fine-tuning": Client(
        lambda _: tuned_model(),
        [lambda: keras.optimizers.Adam(0.02), lambda: keras.optimizers.Adam(0.002)],
        lambda model: [(model, functools.partial(gradients_of, model))],
        ("mse",),
    ),
    "train_step": Client(
        lambda _: custom_model(),
        [lambda: keras.optimizers.SGD(0.1, momentum=0.9)],
        lambda model: [(model, model.gradients)],
    ),
    "GAN": Client(
        Gan,
        [lambda: keras.optimizers.Adam(0.01, beta_1=0.5)],
        lambda model: [
            (model.discriminator, model.d_gradients),
            (model.generator, model.g_gradients),
        ],
    ),
}


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


def seeded(seed: int, make: Callable[[int], Any], rank: int) -> Any:
    keras.utils.set_random_seed(seed)
    return make(rank)


@functools.cache
def expected(name: str, strategy: str | None) -> Weights:
    """Computed on all ranks, as Keras names variables after the number of models."""
    client = CLIENTS[name]
    models = [seeded(0, client.make, rank) for rank in range(2)]
    for mine, first in zip(models[1].weights, models[0].weights, strict=True):
        mine.assign(first)
    for number, optimizer in enumerate(client.optimizers):
        for model in models:
            if number:
                model.layers[0].trainable = True
            if name == "GAN":
                model.compile(None, None)
        parts = zip(*(client.parts(model) for model in models), strict=True)
        equations = [Equation(strategy, Workers(optimizer, part)) for part in parts]
        for batches in zip(shard(0), shard(1), strict=True):
            for equation in equations:
                equation.step(batches)
        for equation in equations:
            equation.synchronize()
    return weights_of(models[0])


def fitted(name: str, strategy: str) -> tuple[Any, list[bool]]:
    """Return a model, and after which batches of the last call of fit updates were due."""
    client = CLIENTS[name]
    late: list[bool] = []
    model = seeded(hvd.rank(), client.make, hvd.rank())
    for number, plain in enumerate(client.optimizers):
        if number:
            model.layers[0].trainable = True
        optimizers = []
        for part, _ in client.parts(model):
            chosen = forward(part) if strategy == FORWARD else strategy
            optimizers.append(hvd.DistributedOptimizer(plain(), strategy=chosen))
            if strategy.startswith("cocod"):  # else its slots become rank 0's after a local step
                optimizers[-1].build(part.trainable_variables)
        model.compile(*optimizers, *client.loss)
        late.clear()
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda *_, **__: late.append(bool(due))
            ),
        ]
        model.fit(shard(hvd.rank()), verbose=0, callbacks=callbacks)
    return model, late


IN_MAKE_TEST = {("train_step", "pipe-sgd"), ("GAN", "cocod:period=4")}
"""A cell of each model with a step of its own; the rest is nightly, as a trace takes seconds."""


def cells() -> Iterator[Any]:
    for cell in itertools.product(CLIENTS, STRATEGIES):
        marks = [] if cell in IN_MAKE_TEST else [pytest.mark.nightly]
        yield pytest.param(*cell, marks=marks)


@pytest.mark.parametrize(("client", "strategy"), [*cells()])
def test_fit_has_the_weights_of_one_process(client: str, strategy: str) -> None:
    model, late = fitted(client, strategy)
    assert any(late) == (strategy == FORWARD)
    first, other = gather(weights_of(model))
    np.testing.assert_array_equal(first, other)
    wanted = expected(client, "merged-gradient" if strategy in STRATEGIES[:2] else strategy)
    np.testing.assert_allclose(first, wanted, rtol=0, atol=1e-12)
    assert np.abs(expected(client, None) - wanted).max() > 1e-3
