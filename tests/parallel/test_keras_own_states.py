"""Keras: what all ranks take from rank 0 is of all ranks, and what is of one rank is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_training import assert_alike
from on_ranks import gather, on_ranks

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.tensorflow import elastic
from hvd_pipe.tensorflow.messages.reduction import RESIDUAL

two = on_ranks(2, init=hvd.init)

INT8 = hvd.Int8(chunk=4, error_feedback=True)


def trained(strategy: str, compression: Any) -> tuple[Any, Any, Any]:
    """A weight after two steps, its optimizer, and the state that an elastic job has of them."""
    weight = keras.Variable(np.zeros(8), dtype="float32", name="weight")
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), strategy=strategy, compression=compression
    )
    optimizer.build([weight])
    for number in range(2):
        values = np.linspace(1.0, 2.0 + number, 8) * (1 + hvd.rank())
        optimizer.apply([tf.constant(values, tf.float32)], [weight])
    return weight, optimizer, hvd_tf.elastic.TensorFlowState([weight, *optimizer.variables])


def lost(optimizer: Any) -> dict[str, Any]:
    (session,) = optimizer._hvd_pipe
    state = session.engine.state()
    return {name: array for name, array in state.items() if name.startswith(RESIDUAL)}


@two
@pytest.mark.parametrize("hosts_change", [True, False], ids=["hosts change", "a worker fails"])
def test_the_gradient_in_flight_becomes_that_of_all_or_of_rank_0(hosts_change: bool) -> None:
    """Hosts that change wait for it; a worker that fails leaves each rank with its own."""
    weight, optimizer, state = trained("pipe-sgd", hvd.Compression.none)
    first, last = (np.linspace(1.0, end, 8) for end in (2.0, 3.0))
    if hosts_change:
        elastic._finish(state)
    state.sync()
    optimizer.synchronize()
    expected = -1.5 * first - (1.5 if hosts_change else 1.0) * last
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6)


CODECS = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "bf16": hvd.BF16(error_feedback=True),
    "int8": INT8,
}


@two
@pytest.mark.parametrize(
    "codec",
    # nightly: nothing is lost, or as with int8
    [
        "int8",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("none", "fp16", "bf16")),
    ],
)
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd", "cocod:period=2"])
def test_rank_0s_file_on_all_ranks(strategy: str, codec: str, tmp_path: Path) -> None:
    """Residuals of rank 0 were added on every rank to what it sent next."""
    weight, optimizer, _ = trained(strategy, CODECS[codec])
    path = gather(str(tmp_path / "rank 0's"))[0]
    if hvd.rank() == 0:
        tf.train.Checkpoint(weight=weight.value, optimizer=optimizer).write(path)
    gather("written")
    before = lost(optimizer)
    weight, optimizer, _ = trained(strategy, CODECS[codec])
    tf.train.Checkpoint(weight=weight.value, optimizer=optimizer).read(path)
    after = lost(optimizer)
    assert after.keys() == before.keys()
    assert bool(after) == (codec in {"bf16", "int8"})
    for name, array in after.items():
        np.testing.assert_array_equal(array, before[name] if hvd.rank() == 0 else 0.0)
    for number in range(4):
        values = np.linspace(1.0, 2.0 + number, 8) * (1 + hvd.rank())
        optimizer.apply([tf.constant(values, tf.float32)], [weight])
    optimizer.synchronize()
    assert_alike(weight.numpy())


@two
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd"])
def test_residuals_are_dropped_on_all_ranks(strategy: str) -> None:
    _, optimizer, state = trained(strategy, INT8)
    assert any(array.any() for array in lost(optimizer).values())
    state.sync()
    after = lost(optimizer)
    assert len(after) == 2
    assert not any(array.any() for array in after.values())
