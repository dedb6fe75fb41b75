"""Two ranks train a small Keras model under two strategies and in a pipeline: it learns.

horovodrun -np 2 --gloo python smoke_tensorflow.py
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.tensorflow import pipedream

STEPS, EPOCHS, BATCH = 30, 3, 16


def network() -> keras.Model:
    keras.utils.set_random_seed(1)
    images = keras.Input((6, 6, 1))
    x = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(images)
    x = keras.layers.Flatten()(keras.layers.BatchNormalization()(x))
    x = keras.layers.Dense(32, activation="relu")(x)
    return keras.Model(images, keras.layers.Dense(3)(x))


def data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images whose class is the third of the rows that is bright."""
    generator = np.random.default_rng(rank)
    y = generator.integers(3, size=STEPS * BATCH)
    x = generator.random((len(y), 6, 6, 1), dtype=np.float32)
    for image, third in zip(x, y, strict=True):
        image[2 * third : 2 * third + 2] += 1.0
    return x, y


def train(strategy: str) -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), strategy=strategy)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = data(hvd.rank())
    history = model.fit(
        *(x, y, BATCH, EPOCHS),
        verbose=0,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
    )
    losses = history.history["loss"]
    weights = tf.concat([tf.reshape(each, [1, -1]) for each in model.trainable_variables], 1)
    everyone = np.asarray(hvd.allgather(weights, name=f"weights {strategy}"))
    assert (everyone[0] == everyone[1]).all(), f"{strategy}: the replicas differ"
    assert losses[-1] < 0.7 * losses[0], f"{strategy}: loss {losses[0]:.3f} to {losses[-1]:.3f}"
    told(f"{strategy}: loss {losses[0]:.3f} to {losses[-1]:.3f}, equal replicas")


def pipeline() -> None:
    engine = pipedream.PipeDream(
        network(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        lambda: keras.optimizers.SGD(0.05),
        plan="straight",
    )
    batches = tf.data.Dataset.from_tensor_slices(data(0)).batch(BATCH)
    losses = [engine.train_epoch(batches).loss for _ in range(EPOCHS)]
    assert losses[-1] < 0.7 * losses[0], f"pipedream: loss {losses[0]:.3f} to {losses[-1]:.3f}"
    told(f"pipedream: loss {losses[0]:.3f} to {losses[-1]:.3f}")


def told(text: str) -> None:
    if hvd.rank() == 0:
        print(f"smoke: {text}", flush=True)


if __name__ == "__main__":
    pipedream.init()
    assert hvd.size() == 2, hvd.size()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    for each in ("merged-gradient", "pipe-sgd"):
        train(each)
    pipeline()
