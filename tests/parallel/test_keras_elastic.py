"""Elastic Keras: a worker comes, another is killed, training goes on; and states by themselves."""

from __future__ import annotations

import importlib
import json
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import ranks
import workers_keras_elastic as job
from keras_problem import make_model
from keras_training import METHODS, Trainer, assert_same
from on_ranks import gather, on_ranks
from ranks import once

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd

TIMEOUT = 400.0
# A new worker must have started within it, and a survivor may wait for one.
GLOO_TIMEOUT = 120

# Under merged-gradient, worker 1 would die while plans are tried.
WAYS = ["pipe-sgd", "cocod:period=4"]
STARTS = [(0, 2), (10, 3)]
COMMITS = [18]
LOCAL_COMMITS = [18, 20]  # a worker on its own under CoCoD may commit before it hears of the end


class Outcome(NamedTuple):
    """What the workers that were left have written, and what the launcher has printed."""

    results: list[dict[str, Any]]
    loss_before: float
    said: str


@once
def outcome(way: str) -> Outcome:
    """Run a job as users run elastic jobs."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        directory = Path(folder)
        (directory / "hosts").write_text(job.HOSTS)
        script = directory / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {directory}/hosts\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        command = [
            *(*ranks.HOROVODRUN, "-np", "2"),
            *("--min-np", "2", "--max-np", "3", "--network-interface", "lo"),
            *("--host-discovery-script", str(script), sys.executable),
            *(str(Path(job.__file__)), way, folder),
        ]
        env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT)}
        code = ranks._run(command, directory, env, TIMEOUT)
        said = (directory / "log.launcher").read_text(errors="replace")
        results = [json.loads(file.read_text()) for file in sorted(directory.glob("result.*"))]
        assert code == 0, f"{way}: exit status {code} within {TIMEOUT:g} s\n{said[-8000:]}"
        assert results, f"{way}: nobody has finished\n{said[-8000:]}"
        return Outcome(results, float((directory / "loss").read_text()), said)


# nightly: jobs whose workers come and go take a minute, and wait for times that Gloo is given.
@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_training_starts_again_where_it_should(way: str) -> None:
    """After a host has come at the same step, after a failure at the last commit.

    The others' graphs still spoke of two workers.
    """
    (first, second), loss_before, said = outcome(way)
    *starts, last = [tuple(start) for start in first["starts"]]
    assert starts == STARTS
    assert last in [(step, 2) for step in (LOCAL_COMMITS if "cocod" in way else COMMITS)]
    assert first["size"] == second["size"] == 2
    assert "back to the last commit" in said
    assert first["weights"] == second["weights"]
    assert first["starts"] == second["starts"]
    if "cocod" not in way:  # its workers keep momenta of their own
        assert first["slots"] == second["slots"]
    assert first["loss"] < loss_before


def init() -> None:
    importlib.import_module("mpi4py.MPI")  # it finalises MPI, so that Horovod does not
    hvd.init()


two = on_ranks(2, init=init)


@two
@pytest.mark.parametrize("name", METHODS)
def test_a_commit_comes_back_bit_for_bit(name: str) -> None:
    """Weights, slots and what is in flight; and what is computed from them.

    Also where Horovod ends and starts again meanwhile, with the same workers: graphs are traced
    anew. Then ranks go on from the first; what codecs have left over is dropped, as it is of one
    rank.
    """
    trainer = Trainer(**METHODS[name])
    state = hvd.elastic.KerasState(trainer.model, trainer.optimizer, step=0)
    trainer.train(0, 7)
    state.step = 7
    state.commit()
    committed = trainer.all()
    trainer.train(7, 12)
    state.step = 12
    gone_on = trainer.all()
    state.restore()
    assert_same(trainer.all(), committed)
    assert state.step == 7
    gather("restored")
    hvd.shutdown()
    hvd.init()
    trainer.train(7, 12)
    assert_same(trainer.all(), gone_on)
    for each in trainer.model.variables:
        each.assign(each + hvd.rank())
    state.save()
    state.sync()
    mine, (first, second) = trainer.all(), gather(trainer.all())
    assert_same(second, first)
    for key, array in mine.items():
        if "lost." in key:
            assert not np.any(array)
        elif hvd.rank() == 0:
            np.testing.assert_array_equal(array, gone_on[key], key)
    trainer.train(12, 15)
    np.testing.assert_array_equal(*gather(trainer.finish()))


@two
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)])), "model.build"),
        (lambda: hvd.elastic.KerasState(make_model()), "compile the model"),
        (hvd_tf.elastic.TensorFlowState, "pass variables="),
    ],
)
def test_states_say_what_they_need(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@two
@pytest.mark.parametrize(
    ("is_stopped", "batches", "epoch"), [(False, [2, 6, 6], 5), (True, [2], 3)]
)
def test_an_interrupted_epoch_has_the_batches_that_were_left(
    is_stopped: bool, batches: list[int], epoch: int
) -> None:
    """Of an epoch of six batches, four were done; somebody may end training meanwhile."""
    seen: list[int] = []

    class Count(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append(0)

        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            seen[-1] += 1

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = is_stopped

    trainer = Trainer(strategy="merged-gradient")
    trainer.model.compile(trainer.optimizer, "mse")
    state = hvd.elastic.KerasState(trainer.model, batch=4, epoch=2)
    callbacks = [
        Count(),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]
    options: dict[str, Any] = {"steps_per_epoch": 6, "epochs": 3, "verbose": 0}
    trainer.model.fit(job.dataset(0), callbacks=callbacks, **options)
    assert (seen, state.epoch, state.batch) == (batches, epoch, 0)
