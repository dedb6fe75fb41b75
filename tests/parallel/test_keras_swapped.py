"""``import horovod.tensorflow as hvd`` stays; only the optimizer, or the tape, is hvd_pipe's."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import pytest
import tensorflow as tf
from keras_problem import batch, weights_of
from keras_training import Trainer, assert_alike
from on_ranks import on_ranks

from hvd_pipe.tensorflow import HvdPipeError


def init() -> None:
    importlib.import_module("mpi4py.MPI")  # it finalises MPI, so that Horovod does not
    hvd.init()


two = on_ranks(2, init=init)

STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=3")
TAPES = ("merged-gradient", "pipe-sgd")


def variables_of(trainer: Trainer) -> list[tf.Variable]:
    return [each.value for each in trainer.variables]


@two
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rank_0s_state_reaches_all(strategy: str) -> None:
    """It alone has one; all get it by Horovod's functions, and go on."""
    trainer = Trainer(strategy=strategy)
    if hvd.rank() == 0:
        for each in variables_of(trainer):
            each.assign(each + tf.cast(0.5, each.dtype) if each.dtype.is_floating else each + 3)
    else:
        for each in trainer.model.variables:
            each.assign(each - 1)
    epoch = hvd.broadcast_object(7 if hvd.rank() == 0 else None, root_rank=0)
    hvd.broadcast_variables(variables_of(trainer), root_rank=0)
    assert epoch == 7
    assert_alike(np.concatenate([np.ravel(each) for each in variables_of(trainer)]))
    trainer.train(epoch, epoch + 6)
    assert_alike(trainer.finish())


@two
@pytest.mark.parametrize("strategy", [*STRATEGIES, *(f"tape {each}" for each in TAPES)])
def test_horovods_own_shutdown_and_init(strategy: str) -> None:
    """Nobody saw Horovod's own end: the old workers' message names, counts and graphs went on."""

    def trained(between: Callable[[], object]) -> Any:
        is_tape = strategy.startswith("tape ")
        trainer = Trainer(tape=is_tape, strategy=strategy.removeprefix("tape "))
        trainer.train(0, 7)
        between()
        trainer.train(7, 12)
        return trainer.finish()

    whole = trained(lambda: None)
    np.testing.assert_array_equal(trained(lambda: (hvd.shutdown(), hvd.init())), whole)


@two
def test_a_rank_does_not_join_under_cocod() -> None:
    """Horovod gave the others zeros for the model of the rank that had left: theirs was halved."""
    trainer = Trainer(strategy="cocod:period=3")
    trainer.train(0, 2)
    with pytest.raises(HvdPipeError, match="CoCoD would average these"):
        hvd.join()
    trainer.finish()


def compiled(strategy: str) -> Trainer:
    trainer = Trainer(strategy=strategy)
    trainer.model.compile(trainer.optimizer, "mse")
    return trainer


@two
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda trainer: trainer.optimizer.variables(), id="variables"),
        pytest.param(
            lambda trainer: hvd.elastic.TensorFlowKerasState(trainer.model),
            id="TensorFlowKerasState",
        ),
        pytest.param(lambda trainer: hvd_keras.elastic.KerasState(trainer.model), id="KerasState"),
    ],
)
def test_calls_of_keras_2_name_ours(call: Callable[[Trainer], Any]) -> None:
    """Horovod's Keras states ended in "'list' object is not callable"."""
    names = "hvd_pipe.tensorflow.keras.elastic", "hvd_pipe.tensorflow.elastic"
    with pytest.raises(TypeError) as raised:
        call(compiled("merged-gradient"))
    assert all(name in str(raised.value) for name in names)


CALLBACKS: dict[str, tuple[Any, ...]] = {
    "BroadcastGlobalVariablesCallback": (0,),
    "MetricAverageCallback": (),
    "LearningRateWarmupCallback": (0.1,),
    "LearningRateScheduleCallback": (0.1, 0.5),
}


@two
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_of_keras_2_name_ours(name: str) -> None:
    """They ended in "'Variable' object has no attribute 'ref'" and the like, after a batch."""
    model, (x, y) = compiled("merged-gradient").model, batch(hvd.rank(), 0)
    callback = getattr(hvd_keras.callbacks, name)(*CALLBACKS[name])
    ours = re.escape(f"pass hvd_pipe.tensorflow.keras.callbacks.{name}")
    with pytest.raises(TypeError, match=ours):
        model.fit(x, y, verbose=0, callbacks=[callback])


@two
def test_horovods_elastic_callbacks() -> None:
    """Those that work."""

    class State:
        batch = epoch = commits = 0

        def commit(self) -> None:
            self.commits += 1

    state, trainer = State(), compiled("pipe-sgd")
    callbacks = [
        hvd_keras.elastic.UpdateEpochStateCallback(state),
        hvd_keras.elastic.CommitStateCallback(state, batches_per_commit=2),
    ]
    x, y = (np.tile(part, (4, 1)) for part in batch(hvd.rank(), 0))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        callbacks.append(hvd_keras.elastic.UpdateBatchStateCallback(state))
        trainer.model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    assert state.epoch == 2
    assert state.commits == 2 * (4 // 2 + 1)
    assert_alike(weights_of(trainer.model))
    said = "; ".join(str(each.message) for each in warned)
    assert "pass hvd_pipe.tensorflow.keras.elastic.UpdateBatchStateCallback" in said


@two
def test_horovods_state_of_plain_variables() -> None:
    """Its TensorFlowState is saved, restored and synchronised."""
    trainer = Trainer(strategy="pipe-sgd")
    trainer.train(0, 4)
    state = hvd.elastic.TensorFlowState(variables_of(trainer), step=4)
    state.save()
    saved = weights_of(trainer.model)
    trainer.train(4, 7)
    state.step = 7
    state.restore()
    state.sync()
    np.testing.assert_array_equal(weights_of(trainer.model), saved)
    assert state.step == 4
