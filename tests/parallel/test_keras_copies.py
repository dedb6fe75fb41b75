"""Keras: what is made of a distributed optimizer's configuration or file is distributed as it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from on_ranks import on_ranks

import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.tensorflow.keras.optimizer import DistributedMixin

two = on_ranks(2, init=hvd.init)

OF_WHAT: dict[str, dict[str, Any]] = {
    "pipe-sgd": {"strategy": "pipe-sgd:warmup_steps=2"},
    "cocod": {"strategy": "cocod:period=3"},
    "codec": {"compression": hvd.Int8(chunk=8, error_feedback=True)},
    "sum": {"op": hvd.Sum},
    "predivided": {"gradient_predivide_factor": 2.0},
    "passes": {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
    "dense": {"sparse_as_dense": True},
    "groups": {"groups": 2},
    "local gradients": {"scale_local_gradients": False},
}


def assert_alike(one: Any, other: Any) -> None:
    assert isinstance(one, DistributedMixin)
    assert isinstance(other, DistributedMixin)
    assert one._hvd_pipe.arguments == other._hvd_pipe.arguments
    assert one._hvd_pipe.method == other._hvd_pipe.method


@two
@pytest.mark.parametrize("case", OF_WHAT)
def test_an_optimizer_of_a_configuration(case: str) -> None:
    """A class stands for one way to distribute: those of other arguments are other classes."""
    plain = keras.optimizers.SGD(0.1)
    other = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), strategy="merged-gradient")
    optimizer = hvd.DistributedOptimizer(plain, **OF_WHAT[case])
    assert_alike(type(optimizer).from_config(optimizer.get_config()), optimizer)
    assert_alike(type(other).from_config(other.get_config()), other)


@two
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "in a LossScaleOptimizer"])
@pytest.mark.parametrize("case", ["pipe-sgd", "codec", "passes"])
def test_an_optimizer_of_a_file(case: str, scaled: bool, tmp_path: Path) -> None:
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = inner = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **OF_WHAT[case])
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(inner)
    model.compile(optimizer, "mse")
    model.save(tmp_path / "model.keras")
    found = hvd.load_model(tmp_path / "model.keras", **OF_WHAT[case]).optimizer
    assert_alike(found.inner_optimizer if scaled else found, inner)


@two
def test_it_averages_as_its_original() -> None:
    first = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), strategy="pipe-sgd")
    weights = []
    for optimizer in (first, type(first).from_config(first.get_config())):
        weights.append(keras.Variable(np.zeros(2), name="weight"))
        for number in range(3):
            gradient = tf.ones(2, weights[-1].dtype) * float((1 + hvd.rank()) * 10**number)
            optimizer.apply([gradient], [weights[-1]])
    for weight in weights:
        np.testing.assert_allclose(weight.numpy(), -1.5 - 15.0, rtol=1e-6)
