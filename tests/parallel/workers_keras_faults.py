"""A rank that trains with Keras until something happens to it, or leaves with averages in flight.

``python workers_keras_faults.py FOLDER STRATEGY [WRONG]``; the last word says what this rank
itself does wrong, ``exit`` that nothing does.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras_problem import OPTIMIZERS, batch, make_model
from publish import end_late_over_gloo, publish

import hvd_pipe.tensorflow.keras as hvd

DEADLINE_S = 240  # no rank outlives its test
EVERY = 10  # steps between two that are told
SOON = 30  # steps until the rank does something wrong
WRONG = 1  # the rank that does
BATCHES = 50
SLOW_S = 0.5  # by which each rank is later than the one before at its last step


class Steps(keras.callbacks.Callback):  # type: ignore[misc]
    """Tell the test of steps, and go wrong in one."""

    def __init__(self, folder: Path, wrong: str) -> None:
        super().__init__()
        self._folder, self._wrong, self._step = folder, wrong, 0

    def on_train_batch_end(self, number: int, logs: Any = None) -> None:
        if self._step % EVERY == 0:
            publish(self._folder / f"step.{hvd.rank()}", str(self._step))
        if self._step == SOON and hvd.rank() == WRONG:
            go_wrong(self._wrong)
        self._step += 1
        time.sleep(0.002)


def go_wrong(how: str) -> None:
    if how == "raise":
        raise ValueError("bad sample 17")


def train(folder: Path, strategy: str, wrong: str) -> None:
    model = compiled(strategy)
    pairs = [batch(hvd.rank(), number) for number in range(BATCHES)]
    x, y = (np.concatenate(each) for each in zip(*pairs, strict=True))
    size = len(x) // BATCHES
    model.fit(x, y, size, epochs=100_000, verbose=0, callbacks=[Steps(folder, wrong)])


def leave(folder: Path, strategies: str) -> None:
    """End right after a step, at another time on each rank, without a word to Horovod."""
    models = [compiled(each) for each in strategies.split("+")]
    for step in range(4):
        if step == 3:
            time.sleep(SLOW_S * hvd.rank())
        for model in models:
            model.train_on_batch(*batch(hvd.rank(), step))
        publish(folder / f"step.{hvd.rank()}", str(step))
    print(f"rank {hvd.rank()} leaves", flush=True)


def compiled(strategy: str) -> Any:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), strategy=strategy), "mse")
    return model


def main(folder: Path, strategy: str, wrong: str = "") -> None:
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    if wrong:
        end_late_over_gloo()
    hvd.init()
    publish(folder / f"pid.{hvd.rank()}", str(os.getpid()))
    if wrong == "exit":
        leave(folder, strategy)
    else:
        train(folder, strategy, wrong)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
