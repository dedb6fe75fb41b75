"""What a worker of the demo does, in Keras; `torch_examples/demo.py --keras` starts two of them.

All rows start from the same weights and see the same images in the same order.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import horovod.tensorflow as stock
import keras
import numpy as np
import tensorflow as tf
from demo_course import BATCH, LR, MOMENTUM, ROWS, WIDTHS, Job

import hvd_pipe.tensorflow.keras as hvd
from digits_data import Data, load


class StockSequential(keras.Sequential):
    """A model that trains by Horovod's tape, as its optimizer averages nothing under Keras 3."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with stock.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        variables = self.trainable_variables
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        self.optimizer.apply(gradients, variables)
        return {"loss": loss}


def net(classes: int, base: type[keras.Sequential]) -> keras.Sequential:
    """Return a convolutional net of 20 tensors and 3.0 MiB, for images that it enlarges."""
    keras.utils.set_random_seed(1)
    layers: list[Any] = [keras.layers.Input((8, 8, 1)), keras.layers.Resizing(24, 24)]
    for width in WIDTHS:
        layers.append(keras.layers.Conv2D(width, 3, padding="same", use_bias=False))
        layers += [keras.layers.BatchNormalization(momentum=0.7), keras.layers.ReLU()]
        if width in (64, 128):
            layers.append(keras.layers.MaxPool2D())
    return base([*layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(classes)])


class Row:
    """A model that one strategy trains."""

    def __init__(self, name: str, data: Data) -> None:
        self.name, self.data, strategy = name, data, ROWS.get(name)
        base = StockSequential if name == "stock Horovod" else keras.Sequential
        self.model = net(int(data.train_y.max()) + 1, base)
        optimizer = keras.optimizers.SGD(LR, momentum=MOMENTUM)
        if strategy:
            optimizer = hvd.DistributedOptimizer(optimizer, strategy=strategy)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(optimizer, loss)
        self.callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] if strategy else []
        self.first = self.model.get_weights()

    def fit(self, indices: np.ndarray) -> None:
        """Train on these images, in this order."""
        arrays = self.data.train_x[indices], self.data.train_y[indices]
        images = tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)
        # With it, `fit` ends when its thread next wakes: 2.6 or 5.2 seconds after it began.
        options = tf.data.Options()
        options.autotune.enabled = False
        self.model.fit(images.with_options(options), callbacks=self.callbacks, verbose=0)

    def settle(self, steps: int) -> None:
        """Train for some steps, then go back to the first weights."""
        self.fit(np.resize(np.arange(len(self.data.train_x)), steps * BATCH))
        self.model.set_weights(self.first)
        for variable in self.model.optimizer.variables:
            if "momentum" in variable.path:
                variable.assign(keras.ops.zeros_like(variable))

    def train(self, epoch: int, lr: float) -> None:
        """Train for an epoch; `fit` takes in what is in flight at its end."""
        self.model.optimizer.learning_rate = lr
        self.fit(indices_of(len(self.data.train_x), epoch))

    def accuracy(self) -> float:
        """Return the accuracy on the test images, of which each rank looks at its own."""
        parts = (self.data.test_x, self.data.test_y)
        x, y = (part[stock.rank() :: stock.size()] for part in parts)
        answers = self.model.predict(x, batch_size=len(x), verbose=0).argmax(1)
        return mean(float((answers == y).sum())) / mean(float(len(y)))


def indices_of(n: int, epoch: int) -> np.ndarray:
    """Return the images of an epoch that this rank sees; no image comes twice."""
    size = stock.size()
    steps = n // (BATCH * size)
    order = np.random.RandomState(epoch).permutation(n)[: steps * size * BATCH]
    return order.reshape(steps, size, BATCH)[:, stock.rank()].ravel()


def mean(value: float) -> float:
    """Return the mean over all ranks."""
    return float(stock.allreduce(tf.constant(value, tf.float64), name="mean"))


def computing_s(row: Row) -> float:
    """Return the seconds of a step that sends nothing, while the other worker computes, too."""
    indices, times = indices_of(len(row.data.train_x), 0), []
    for _ in range(3):  # the first one traces the step
        mean(0.0)
        begun = time.perf_counter()
        row.fit(indices)
        times.append((time.perf_counter() - begun) / (len(indices) / BATCH))
    return mean(min(times))


def main() -> None:
    # hvd_pipe switches this buffer off for the process; stock Horovod is to have its default.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(128 * 2**20))
    hvd.init()
    threads = max(1, len(os.sched_getaffinity(0)) // stock.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    data = load()
    alone = Row("alone", data)
    rows = [Row(name, data) for name in ROWS if name != "PyTorch DDP"]
    count = sum(int(np.prod(variable.shape)) for variable in alone.model.trainable_variables)
    job = Job(
        *(Path(sys.argv[1]), "limited" in sys.argv[2:], stock.rank() == 0),
        nbytes=4 * count,
        steps=len(data.train_x) // (BATCH * stock.size()),
        mean=mean,
        all_reduce=partial(stock.allreduce, tf.zeros(count), name="all"),
        computing_s=partial(computing_s, alone),
    )
    job.run(rows, dict)
    hvd.shutdown()


if __name__ == "__main__":
    main()
