"""The training problem that Keras ranks and their serial reference share; float64.

Everything is a function of the rank and the step, so a run on n ranks and a simulation of n
workers in one process see the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

STEPS = 24
BATCH = 8

Weights = npt.NDArray[np.float64]

keras.config.set_floatx("float64")


def make_model() -> Any:
    """Six tensors, of 24 to 240 bytes."""
    keras.utils.set_random_seed(7)
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(5, "tanh"),
            layers.Dense(4, "tanh"),
            layers.Dense(3),
        ]
    )


def batch(rank: int, step: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Inputs and targets; no two workers and no two steps see the same ones."""
    generator = np.random.default_rng([rank, step])
    return generator.standard_normal((BATCH, 6)), generator.standard_normal((BATCH, 3))


def sample(rank: int, step: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """A batch whose targets can be learnt."""
    x, _ = batch(rank, step)
    return x, np.stack([x[:, 0], np.tanh(x[:, 1] - x[:, 2]), 0.5 * x[:, 3]], axis=1)


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean(tf.square(model(x, training=True) - y))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "forgetful": lambda: keras.optimizers.Adam(0.01, beta_2=0.3, epsilon=1e-3),
    "clipped": lambda: keras.optimizers.SGD(0.1, momentum=0.5, global_clipnorm=0.3),
    "scheduled": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.PiecewiseConstantDecay([4, 11], [0.1, 0.05, 0.02])
    ),
    "averaged": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=4),
    "accumulating": lambda: keras.optimizers.SGD(0.1, momentum=0.5, gradient_accumulation_steps=3),
}


def weights_of(model: Any) -> Weights:
    """All variables in one vector, copied."""
    return np.concatenate([each.numpy().ravel() for each in model.trainable_variables])


def trained(mode: str, optimizer: Any, rank: int) -> Weights:
    """Train on a rank's batches; return the weights after each, and after the last drain.

    Args:
        mode: ``"fit"``, or a loop of steps that are a ``"function"`` or ``"eager"``.
        optimizer: Plain, or distributed.
        rank: Whose batches.
    """
    model = make_model()
    records: list[Weights] = []

    def note(*_: Any, **__: Any) -> None:
        records.append(weights_of(model))

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    batches = [batch(rank, number) for number in range(STEPS)]
    if mode == "fit":
        x, y = (np.array(parts) for parts in zip(*batches, strict=True))
        model.compile(optimizer=optimizer, loss="mse")
        noting = keras.callbacks.LambdaCallback(on_train_batch_end=note)
        data = tf.data.Dataset.from_tensor_slices((x, y))
        model.fit(data, shuffle=False, verbose=0, callbacks=[noting])
    else:
        take = tf.function(step) if mode == "function" else step
        for x, y in batches:
            take(tf.constant(x), tf.constant(y))
            note()
        optimizer.synchronize()
    return np.array([*records, weights_of(model)])
