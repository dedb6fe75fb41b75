"""A model for Keras that needs no trace: weights, their gradients in a formula, an optimizer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

import hvd_pipe.tensorflow.keras as hvd

keras.config.set_floatx("float64")


class Small:
    """Six weights of 16 to 56 bytes; ranks have other gradients."""

    def __init__(self, **options: Any) -> None:
        self.weights = [keras.Variable(np.ones(2 + i), name=f"w{i}") for i in range(6)]
        plain = keras.optimizers.SGD(0.05, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(plain, **options)
        self.optimizer.build(self.weights)
        self.saver = tf.train.Checkpoint(weights=self.weights, optimizer=self.optimizer)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            own = float((1 + hvd.rank()) * (1 + step))
            gradients = [each * (i + 1.0) + own for i, each in enumerate(self.weights)]
            self.optimizer.apply(gradients, self.weights)

    def values(self) -> npt.NDArray[np.float64]:
        """Return all weights in one vector."""
        return np.concatenate([each.numpy() for each in self.weights])
