"""What Keras' guides show, by ``fit`` on two ranks: the weights of two workers in one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras_clients import (
    Gan,
    Weights,
    custom_alone,
    custom_model,
    fine_tuning_alone,
    gan_adam,
    gan_alone,
    seeded,
    sgd,
    shard,
    tuned_model,
    unfreeze,
    weights_of,
)
from keras_training import forward
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.tensorflow.pending import due

pytestmark = on_ranks(2, init=hvd.init)

FORWARD = "forward"
"""Of `keras_training.forward`'s plan: nothing is tried, so that steps are traced once."""
STRATEGIES = ("merged-gradient:bucket_bytes=200", FORWARD, "pipe-sgd", "cocod:period=4")


class Late(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes after which batches updates are due."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[bool] = []

    def on_train_batch_end(self, number: int, logs: Any = None) -> None:
        self.batches.append(bool(due))


def distributed(plain: Any, model: Any, strategy: str) -> Any:
    chosen = forward(model) if strategy == FORWARD else strategy
    return hvd.DistributedOptimizer(plain, strategy=chosen)


def fit(model: Any) -> Late:
    late = Late()
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        late,
    ]
    model.fit(shard(hvd.rank()), verbose=0, callbacks=callbacks)
    return late


def fine_tuning(strategy: str) -> tuple[Any, Late]:
    model = seeded(hvd.rank(), tuned_model)
    model.compile(distributed(keras.optimizers.Adam(0.02), model, strategy), "mse")
    fit(model)
    unfreeze(model)
    model.compile(distributed(keras.optimizers.Adam(0.002), model, strategy), "mse")
    return model, fit(model)


def custom(strategy: str) -> tuple[Any, Late]:
    model = seeded(hvd.rank(), custom_model)
    model.compile(distributed(sgd(), model, strategy))
    if strategy.startswith("cocod"):  # else its slots become rank 0's after the first local step
        model.optimizer.build(model.trainable_variables)
    return model, fit(model)


def gan(strategy: str) -> tuple[Any, Late]:
    model = seeded(hvd.rank(), lambda: Gan(hvd.rank()))
    model.compile(
        distributed(gan_adam(), model.discriminator, strategy),
        distributed(gan_adam(), model.generator, strategy),
    )
    if strategy.startswith("cocod"):
        model.d_optimizer.build(model.discriminator.trainable_weights)
        model.g_optimizer.build(model.generator.trainable_weights)
    return model, fit(model)


CLIENTS: dict[str, tuple[Callable[[str], tuple[Any, Late]], Callable[[str], Weights]]] = {
    "fine-tuning": (fine_tuning, fine_tuning_alone),
    "train_step": (custom, custom_alone),
    "GAN": (gan, gan_alone),
}
IN_MAKE_TEST = {("train_step", "pipe-sgd"), ("GAN", STRATEGIES[0])}
"""A cell of each model with a step of its own; the rest is nightly, as a trace takes seconds."""


@functools.cache
def expected(client: str, strategy: str) -> Weights:
    """Computed on all ranks, as Keras names variables after the number of models."""
    return CLIENTS[client][1](strategy)


def cells() -> Iterator[Any]:
    for cell in itertools.product(CLIENTS, STRATEGIES):
        marks = [] if cell in IN_MAKE_TEST else [pytest.mark.nightly]
        yield pytest.param(*cell, marks=marks)


@pytest.mark.parametrize(("client", "strategy"), [*cells()])
def test_fit_has_the_weights_of_one_process(client: str, strategy: str) -> None:
    model, late = CLIENTS[client][0](strategy)
    assert any(late.batches) == (strategy == FORWARD)
    first, other = gather(weights_of(model))
    np.testing.assert_array_equal(first, other)
    wanted = expected(client, "merged-gradient" if strategy in STRATEGIES[:2] else strategy)
    np.testing.assert_allclose(first, wanted, rtol=0, atol=1e-12)
    assert np.abs(expected(client, "alone") - wanted).max() > 1e-3
