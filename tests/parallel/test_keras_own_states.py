"""Keras: what all ranks take from rank 0 is of all ranks, and what is of one rank is dropped."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from on_ranks import on_ranks

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


@two
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd"])
def test_residuals_are_dropped_on_all_ranks(strategy: str) -> None:
    _, optimizer, state = trained(strategy, INT8)
    assert any(array.any() for array in lost(optimizer).values())
    state.sync()
    after = lost(optimizer)
    assert len(after) == 2
    assert not any(array.any() for array in after.values())
