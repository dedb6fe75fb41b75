"""The Keras blocks of README and docs/ on a rank, each with the names that its page presumes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from cases import Raised, run_cases
from page_blocks import execute

import hvd_pipe.tensorflow.keras as hvd

Arrays = list[npt.NDArray[Any]]

STEPS = 3


def _model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


def _data() -> dict[str, npt.NDArray[Any]]:
    """Data that differ from rank to rank."""
    return {
        "x": np.full((6, 4), 1.0 + hvd.rank(), np.float32),
        "y": np.ones((6, 3), np.float32),
    }


def _trained(text: str, **names: Any) -> Arrays:
    """A block trains a model, and replicas are equal at its end."""
    model = _model()
    before = model.get_weights()
    execute(text, {"model": model, **names})
    assert not all(map(np.array_equal, before, model.get_weights()))
    return model.get_weights()


def _fit(text: str) -> Arrays:
    return _trained(text, keras=keras, hvd=hvd, loss="mse", **_data())


def _tape(text: str) -> Arrays:
    data, loss = _data(), keras.losses.MeanSquaredError()
    batches = [(data["x"], data["y"])] * STEPS
    return _trained(text, tf=tf, loss=loss, optimizer=keras.optimizers.SGD(0.01), batches=batches)


def _import(text: str) -> Arrays:
    """The changed line alone."""
    assert execute(text, {})["hvd"] is hvd
    return []


def _class_alone(text: str) -> Arrays:
    names = execute(text, {})
    assert names["hvd"].__name__ == "horovod.tensorflow"
    assert names["DistributedGradientTape"].__module__.startswith("hvd_pipe.tensorflow")
    model = _model()
    optimizer = names["DistributedOptimizer"](keras.optimizers.SGD(0.01), strategy="pipe-sgd")
    model.compile(optimizer, "mse")
    model.fit(**_data(), batch_size=2, verbose=0)
    return model.get_weights()


def _guide(text: str) -> Arrays:
    """A block of Keras' guides: what it trains is equal on all ranks at its end."""
    keras.utils.set_random_seed(1)
    base, head = (keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]) for _ in range(2))
    x = np.arange(128.0, dtype=np.float32).reshape(32, 4) / 128
    names = {
        "keras": keras,
        "hvd": hvd,
        "base": base,
        "model": (keras.Sequential if "loss" in text else Custom)([base, head]),
        "loss": "mse",
        "dataset": tf.data.Dataset.from_tensor_slices((x, x)),
        "discriminator": base,
        "generator": head,
        "GAN": Gan,
    }
    before = [*base.get_weights(), *head.get_weights()]
    names = execute(_SHARDS.format(text=text), names)
    after = [*base.get_weights(), *head.get_weights()]
    assert not any(map(np.array_equal, before[::2], after[::2]))
    return after


_SHARDS = """
data = dataset.shard(hvd.size(), hvd.rank()).batch(4)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
{text}
"""


def _shards(text: str) -> Arrays:
    """What each rank trains on, and its callbacks: rank 0 has two more."""
    x = np.arange(64.0).reshape(64, 1)
    names = {"keras": keras, "hvd": hvd, "dataset": tf.data.Dataset.from_tensor_slices(x)}
    names = execute(text, names)
    assert len(names["callbacks"]) == (4 if hvd.rank() == 0 else 2)
    rows = np.concatenate([each.numpy() for each in names["data"]])
    np.testing.assert_array_equal(rows, x[hvd.rank() :: hvd.size()])
    return []


class Custom(keras.Sequential):
    """Its loss is that of no `compile`."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean((self(x) - y) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class Gan(keras.Model):
    """Both models learn from the rank's images alone."""

    def __init__(self, discriminator: Any, generator: Any, seed_generator: Any) -> None:
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.seed_generator = seed_generator

    def compile(self, d_optimizer: Any, g_optimizer: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, data: Any) -> dict[str, Any]:
        images, _ = data
        noise = keras.random.normal((4, 4), seed=self.seed_generator)
        for optimizer, model in (
            (self.d_optimizer, self.discriminator),
            (self.g_optimizer, self.generator),
        ):
            with tf.GradientTape() as tape:
                fake = self.discriminator(self.generator(noise))
                loss = keras.ops.mean((fake - self.discriminator(images)) ** 2)
            variables = model.trainable_weights
            optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


BLOCKS: dict[str, Callable[[str], Arrays]] = {
    "README.md python 1": _fit,
    "docs/getting-started.md python 1": _import,
    "docs/keras.md python 1": _shards,
    "docs/keras.md python 2": _guide,
    "docs/keras.md python 3": _guide,
    "docs/keras.md python 4": _guide,
    "docs/keras.md python 5": _tape,
    "docs/migration.md python 1": _class_alone,
    "docs/overlap-forward.md python 2": _fit,
}


def run(texts: dict[str, str]) -> dict[str, Arrays | Raised]:
    """Run all blocks, whose texts are given by their names."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    return run_cases({name: partial(BLOCKS[name], text) for name, text in texts.items()})
