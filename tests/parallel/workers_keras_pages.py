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


def _fit(text: str) -> Arrays:
    """The script's own `fit`: it trains, and replicas are equal at its end."""
    model = _model()
    before = model.get_weights()
    names = {"keras": keras, "hvd": hvd, "model": model, "loss": "mse", **_data()}
    execute(text, names)
    assert not all(map(np.array_equal, before, model.get_weights()))
    return model.get_weights()


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


def _tape(text: str) -> Arrays:
    """A loop with a tape: it trains, and replicas are equal at its end."""
    model, data = _model(), _data()
    before = model.get_weights()
    names = {
        "tf": tf,
        "model": model,
        "loss": keras.losses.MeanSquaredError(),
        "optimizer": keras.optimizers.SGD(0.01),
        "batches": [(data["x"], data["y"])] * STEPS,
    }
    execute(text, names)
    assert not all(map(np.array_equal, before, model.get_weights()))
    return model.get_weights()


BLOCKS: dict[str, Callable[[str], Arrays]] = {
    "README.md python 1": _fit,
    "docs/getting-started.md python 1": _import,
    "docs/keras.md python 1": _tape,
    "docs/class-alone.md python 1": _class_alone,
    "docs/overlap-forward.md python 2": _fit,
}


def run(texts: dict[str, str]) -> dict[str, Arrays | Raised]:
    """Run all blocks, whose texts are given by their names."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    return run_cases({name: partial(BLOCKS[name], text) for name, text in texts.items()})
