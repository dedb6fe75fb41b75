"""Scripts of stock Horovod that take the optimizer or the tape from here, and nothing else."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import keras
import numpy as np
import tensorflow as tf
from cases import Raised, run_cases
from keras_problem import batch, loss_of, make_model, weights_of

from hvd_pipe.tensorflow import DistributedGradientTape, HvdPipeError
from hvd_pipe.tensorflow.keras import DistributedOptimizer

STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=3")
TAPES = ("merged-gradient", "pipe-sgd")
CALLBACKS: dict[str, Callable[[], Any]] = {
    "BroadcastGlobalVariablesCallback": lambda: (
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    ),
    "MetricAverageCallback": hvd_keras.callbacks.MetricAverageCallback,
    "LearningRateWarmupCallback": lambda: hvd_keras.callbacks.LearningRateWarmupCallback(0.1),
    "LearningRateScheduleCallback": lambda: hvd_keras.callbacks.LearningRateScheduleCallback(
        0.1, 0.5
    ),
}

Found = dict[str, Any]


class Trainer:
    """A model and a step of it, traced once; with an optimizer of ours, or with a tape."""

    def __init__(self, strategy: str, tape: bool = False) -> None:
        self.model = make_model()
        plain = keras.optimizers.SGD(0.05, momentum=0.9)
        self.optimizer: Any = plain if tape else DistributedOptimizer(plain, strategy=strategy)
        self.optimizer.build(self.model.trainable_variables)
        variables = self.model.trainable_variables

        @tf.function  # type: ignore[untyped-decorator]
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as taped:
                loss = loss_of(self.model, x, y)
            if tape:
                taped = DistributedGradientTape(taped, strategy=strategy)
            gradients = taped.gradient(loss, [each.value for each in variables])
            self.optimizer.apply(gradients, variables)

        self._step = step

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self._step(*map(tf.constant, batch(hvd.rank(), step)))

    def everything(self) -> list[tf.Variable]:
        return [each.value for each in (*self.model.variables, *self.optimizer.variables)]

    def finish(self) -> Any:
        if hasattr(self.optimizer, "synchronize"):
            self.optimizer.synchronize()
        return weights_of(self.model)


def resumed(strategy: str) -> Found:
    """Rank 0 alone has a state; all get it by Horovod's functions, and go on."""
    trainer = Trainer(strategy)
    if hvd.rank() == 0:
        for each in trainer.everything():
            each.assign(each + tf.cast(0.5, each.dtype) if each.dtype.is_floating else each + 3)
    else:
        for each in trainer.model.variables:
            each.assign(each - 1)
    epoch = hvd.broadcast_object(7 if hvd.rank() == 0 else None, root_rank=0)
    hvd.broadcast_variables(trainer.everything(), root_rank=0)
    started = [each.numpy() for each in trainer.everything()]
    trainer.train(epoch, epoch + 6)
    return {"epoch": epoch, "started": started, "weights": trainer.finish()}


def started_again(strategy: str, tape: bool) -> Found:
    """The script ends and starts Horovod, by Horovod's functions, between two steps."""
    found: Found = {}
    for way in ("whole", "again"):
        trainer = Trainer(strategy, tape)
        trainer.train(0, 7)
        if way == "again":
            hvd.shutdown()
            hvd.init()
        trainer.train(7, 12)
        found[way] = trainer.finish()
    return found


def made_anew() -> Any:
    """An optimizer is made, Horovod ends and starts, and another one is made."""
    Trainer("merged-gradient").train(0, 2)
    hvd.shutdown()
    hvd.init()
    trainer = Trainer("pipe-sgd")
    trainer.train(0, 4)
    return trainer.finish()


def joined() -> Any:
    """Rank 1 has two batches more than rank 0, which joins."""
    trainer = Trainer("merged-gradient")
    trainer.train(0, 5 + 2 * hvd.rank())
    last = int(hvd.join())
    hvd.broadcast_variables(trainer.everything(), root_rank=last)
    return last, trainer.finish()


def join_refused() -> str:
    """Of a rank that has left, CoCoD would average a model of zeros."""
    trainer = Trainer("cocod:period=3")
    trainer.train(0, 2)
    try:
        hvd.join()
    except HvdPipeError as error:
        trainer.finish()
        return str(error)
    return "nothing"


def copied() -> Any:
    """An optimizer of another's class and configuration; rank r's gradient is r."""
    first = DistributedOptimizer(keras.optimizers.SGD(1.0), strategy="merged-gradient")
    second = type(first).from_config(first.get_config())
    weight = tf.Variable([0.0])
    second.apply_gradients([(tf.constant([float(hvd.rank())]), weight)])
    return weight.numpy()


def fitted(make: Callable[[], Any]) -> str:
    trainer = Trainer("merged-gradient")
    trainer.model.compile(trainer.optimizer, "mse")
    x, y = batch(hvd.rank(), 0)
    return said_by(lambda: trainer.model.fit(x, y, verbose=0, callbacks=[make()]))


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except TypeError as error:
        return str(error)
    return "nothing"


def of_keras_2() -> Found:
    """What Horovod's functions cannot do under Keras 3, and what is said where they are called."""
    trainer = Trainer("merged-gradient")
    trainer.model.compile(trainer.optimizer, "mse")
    states = {
        "variables": trainer.optimizer.variables,
        "TensorFlowKerasState": lambda: hvd.elastic.TensorFlowKerasState(trainer.model),
        "KerasState": lambda: hvd_keras.elastic.KerasState(trainer.model),
    }
    return {
        **{name: said_by(call) for name, call in states.items()},
        **{name: fitted(make) for name, make in CALLBACKS.items()},
    }


def elastic_callbacks() -> Found:
    """Those of Horovod's that work."""

    class State:
        batch = epoch = commits = 0

        def commit(self) -> None:
            self.commits += 1

    state, trainer = State(), Trainer("pipe-sgd")
    trainer.model.compile(trainer.optimizer, "mse")
    callbacks = [
        hvd_keras.elastic.UpdateEpochStateCallback(state),
        hvd_keras.elastic.CommitStateCallback(state, batches_per_commit=2),
    ]
    x, y = (np.tile(part, (4, 1)) for part in batch(hvd.rank(), 0))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        counts = hvd_keras.elastic.UpdateBatchStateCallback(state)
        fit = functools.partial(trainer.model.fit, x, y, batch_size=8, epochs=2, verbose=0)
        fit(callbacks=[*callbacks, counts])
    return {
        "epoch": state.epoch,
        "commits": state.commits,
        "weights": weights_of(trainer.model),
        "warned": "; ".join(str(each.message) for each in warned),
    }


def tensorflow_state() -> Found:
    """Horovod's TensorFlowState of plain variables: saved, restored and synchronised."""
    trainer = Trainer("pipe-sgd")
    trainer.train(0, 4)
    state = hvd.elastic.TensorFlowState(trainer.everything(), step=4)
    state.save()
    saved = weights_of(trainer.model)
    trainer.train(4, 7)
    state.step = 7
    state.restore()
    state.sync()
    return {"saved": saved, "restored": weights_of(trainer.model), "step": state.step}


def observations() -> dict[str, Any | Raised]:
    importlib.import_module("mpi4py.MPI")  # it finalises MPI, so that Horovod does not
    hvd.init()
    cases: dict[str, Any] = {
        **{f"resumed {each}": functools.partial(resumed, each) for each in STRATEGIES},
        **{f"again {each}": functools.partial(started_again, each, False) for each in STRATEGIES},
        **{f"again tape {each}": functools.partial(started_again, each, True) for each in TAPES},
        "anew": made_anew,
        "join": joined,
        "join refused": join_refused,
        "copy": copied,
        "Keras 2": of_keras_2,
        "elastic callbacks": elastic_callbacks,
        "TensorFlowState": tensorflow_state,
    }
    return run_cases(cases)
