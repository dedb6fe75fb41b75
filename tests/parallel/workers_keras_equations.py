"""What the ranks of `test_keras_equations` do."""

from __future__ import annotations

import functools
import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import Raised, run_cases
from keras_problem import BATCH, OPTIMIZERS, STEPS, Weights, batch, loss_of, make_model, weights_of

import hvd_pipe.tensorflow.keras as hvd

RANKS_A_NODE = 2

Case = tuple[str, str, str]  # how it is trained, a strategy, an optimizer


def trajectories(cases: list[Case]) -> dict[Case, Weights | Raised]:
    nodes = any("within=node" in strategy for _, strategy, _ in cases)
    hvd.init(process_sets="dynamic" if nodes else None)
    os.environ["HOROVOD_HOSTNAME"] = f"node{hvd.rank() // RANKS_A_NODE}"
    return run_cases({case: functools.partial(run, *case) for case in cases})


def run(mode: str, strategy: str, name: str) -> Weights:
    """Every record of this rank: after every batch, and after the last drain."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](), strategy=strategy)
    records = {"fit": _fit, "function": _loop, "eager": _loop}[mode](model, optimizer, mode)
    return np.array([*records, weights_of(model)])


def _fit(model: Any, optimizer: Any, mode: str) -> list[Weights]:
    records: list[Weights] = []

    class Record(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            records.append(weights_of(model))

    data = [batch(hvd.rank(), step) for step in range(STEPS)]
    x, y = (np.concatenate(parts) for parts in zip(*data, strict=True))
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[Record()])
    return records


def _loop(model: Any, optimizer: Any, mode: str) -> list[Weights]:
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    taken = tf.function(step) if mode == "function" else step
    records = []
    for number in range(STEPS):
        x, y = batch(hvd.rank(), number)
        taken(tf.constant(x), tf.constant(y))
        records.append(weights_of(model))
    optimizer.synchronize()
    return records
