"""A worker of an elastic job, as users of Keras write it.

``python workers_keras_elastic.py WAY DIRECTORY``: a host comes before step `ADDED_AT`, and worker
1 is killed before step `KILLED_AT`. ``WAY`` is the strategy under ``fit``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras_problem import BATCH, loss_of, make_model, sample, weights_of
from publish import publish

import hvd_pipe.tensorflow.keras as hvd

EPOCH, EPOCHS = 6, 9
COMMIT_EVERY = 2
ADDED_AT, KILLED_AT = 9, 19
PATIENCE_S = 120.0
DEADLINE_S = 420.0
# Names of one host are hosts of their own to Horovod, and a host that fails is not used again.
HOSTS = "localhost:1\nLOCALHOST:1\n"
ADDED = HOSTS + "127.0.0.1:1\n"

Before = Callable[[int, Any], None]
"""What happens before a step: by its number, and the state."""


def happening(directory: Path, model: Any) -> Before:
    def is_first(event: str) -> bool:
        done = directory / event
        was_there = done.exists()
        done.touch()
        return not was_there

    def before(step: int, state: Any) -> None:
        if step == ADDED_AT and hvd.rank() == 0 and is_first("added"):
            publish(directory / "hosts", ADDED)
            deadline = time.monotonic() + PATIENCE_S
            while state._host_messages.empty() and time.monotonic() < deadline:
                time.sleep(0.05)
        if step == KILLED_AT and hvd.rank() == 1 and is_first("killed"):
            (directory / "loss").write_text(str(loss_now(model)))
            os.kill(os.getpid(), signal.SIGKILL)

    return before


def dataset(first: int) -> Any:
    """Batches of this rank, for ever."""
    pairs = [sample(hvd.rank(), step) for step in range(first, first + EPOCH * EPOCHS)]
    x, y = (np.concatenate(part) for part in zip(*pairs, strict=True))
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH, drop_remainder=True)


def fitted(model: Any, optimizer: Any, before: Before) -> Any:
    """Train by ``fit``; return the state."""
    model.compile(optimizer, "mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0, starts=[])

    class Happen(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, number: int, logs: Any = None) -> None:
            before(state.epoch * EPOCH + state.batch, state)

    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        Happen(),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=COMMIT_EVERY),
    ]

    @hvd.elastic.run
    def train(state: Any) -> None:
        step = state.epoch * EPOCH + state.batch
        state.starts = [*state.starts, (step, hvd.size())]
        model.fit(
            dataset(step),
            steps_per_epoch=EPOCH,
            epochs=EPOCHS - state.epoch,
            callbacks=callbacks,
            verbose=0,
        )

    train(state)
    return state


def loss_now(model: Any) -> float:
    """On data that no worker trains on."""
    parts = [sample(1000, step) for step in range(8)]
    return float(np.mean([float(loss_of(model, x, y)) for x, y in parts]))


def main(way: str, directory: Path) -> None:
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    hvd.init()
    model = make_model()
    plain = keras.optimizers.SGD(0.02, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(plain, strategy=way)
    state = fitted(model, optimizer, happening(directory, model))
    result = {
        "size": hvd.size(),
        "starts": state.starts,
        "loss": loss_now(model),
        "weights": weights_of(model).tolist(),
        "slots": [float(np.sum(each.numpy())) for each in optimizer.variables],
    }
    publish(directory / f"result.{hvd.rank()}", json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
