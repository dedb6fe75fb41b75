"""An elastic job, as users of Keras write it, and states within one process.

``python workers_keras_elastic.py DIRECTORY`` is a worker of a job; see `Scenario`.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import horovod.tensorflow as stock
import keras
import numpy as np
import tensorflow as tf
from cases import Raised, run_cases
from horovod.common.elastic import ObjectState
from keras_problem import BATCH, batch, loss_of, make_model, weights_of
from publish import publish

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd

EPOCH = 6
EPOCHS = 9
COMMIT_EVERY = 2
PATIENCE_S = 120.0
DEADLINE_S = 420.0
TAPE = "tape"
SWAPPED = "swapped"


@dataclass(frozen=True)
class Scenario:
    """What happens in a job.

    Args:
        way: The strategy under ``fit``; with `TAPE` before it, that of a tape's loop; with
            `SWAPPED`, that of a script of stock Horovod's with another optimizer.
        added_at: The step before which a host comes.
        killed_at: The step before which worker 1 is killed.
        hosts, later: What the discovery script says at first, and from ``added_at`` on.
    """

    way: str
    added_at: int
    killed_at: int
    hosts: str
    later: str

    def write(self, directory: Path) -> None:
        """Write what the job needs to start."""
        (directory / "scenario.json").write_text(json.dumps(asdict(self)))
        (directory / "hosts").write_text(self.hosts)

    @classmethod
    def read(cls, directory: Path) -> Scenario:
        return cls(**json.loads((directory / "scenario.json").read_text()))


class Events:
    """Lets happen what a scenario says, once in the job."""

    def __init__(self, scenario: Scenario, directory: Path, loss: Callable[[], float]) -> None:
        self._scenario, self._directory, self._loss = scenario, directory, loss

    def before(self, step: int, state: Any) -> None:
        """Before a step of all workers."""
        if step == self._scenario.added_at and hvd.rank() == 0 and self._first("added"):
            publish(self._directory / "hosts", self._scenario.later)
            deadline = time.monotonic() + PATIENCE_S
            while state._host_messages.empty() and time.monotonic() < deadline:
                time.sleep(0.05)
        if step == self._scenario.killed_at and hvd.rank() == 1 and self._first("killed"):
            (self._directory / "loss").write_text(str(self._loss()))
            os.kill(os.getpid(), signal.SIGKILL)

    def _first(self, what: str) -> bool:
        done = self._directory / what
        if done.exists():
            return False
        done.touch()
        return True


def sample(rank: int, step: int) -> tuple[Any, Any]:
    """A batch whose targets can be learnt."""
    x, _ = batch(rank, step)
    return x, np.stack([x[:, 0], np.tanh(x[:, 1] - x[:, 2]), 0.5 * x[:, 3]], axis=1)


def dataset(first: int) -> Any:
    """Batches of this rank, for ever."""
    pairs = [sample(hvd.rank(), step) for step in range(first, first + EPOCH * EPOCHS)]
    x, y = (np.concatenate(part) for part in zip(*pairs, strict=True))
    return tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(BATCH, drop_remainder=True)


def fitted(scenario: Scenario, directory: Path) -> tuple[Any, Any, Any]:
    """Train by ``fit``; return the model, its optimizer and the state."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.02, momentum=0.5), strategy=scenario.way
    )
    model.compile(optimizer, "mse")
    events = Events(scenario, directory, lambda: loss_now(model))
    state = hvd.elastic.KerasState(model, batch=0, epoch=0, starts=[])

    class Happen(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, number: int, logs: Any = None) -> None:
            events.before(state.epoch * EPOCH + state.batch, state)

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
    return model, optimizer, state


def taped(scenario: Scenario, directory: Path) -> tuple[Any, Any, Any]:
    """Train by a loop of one's own around one ``tf.function``; return the same."""
    strategy = scenario.way.removeprefix(TAPE).strip()
    model, optimizer = make_model(), keras.optimizers.SGD(0.02, momentum=0.5)
    optimizer.build(model.trainable_variables)
    events = Events(scenario, directory, lambda: loss_now(model))
    shared = [*model.variables, *optimizer.variables]
    state = hvd_tf.elastic.TensorFlowState(shared, step=0, starts=[])
    variables = [each.value for each in model.trainable_variables]

    @tf.function  # type: ignore[untyped-decorator]
    def one_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = hvd_tf.DistributedGradientTape(tape, strategy=strategy)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @hvd_tf.elastic.run
    def train(state: Any) -> None:
        state.starts = [*state.starts, (state.step, hvd.size())]
        while state.step < EPOCH * EPOCHS:
            events.before(state.step, state)
            one_step(*map(tf.constant, sample(hvd.rank(), state.step)))
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                state.commit()
        last = hvd_tf.drain_gradients(variables)
        if last is not None:
            optimizer.apply_gradients(zip(last, model.trainable_variables, strict=True))

    train(state)
    return model, optimizer, state


class PlainState(ObjectState):  # type: ignore[misc]
    """As scripts have to write it with stock Horovod, whose Keras states fail under Keras 3."""

    def __init__(self, variables: list[tf.Variable], **kwargs: Any) -> None:
        self.variables = variables
        self._keep()
        super().__init__(bcast_object=stock.broadcast_object, get_rank=stock.rank, **kwargs)

    def _keep(self) -> None:
        self._values = [each.numpy() for each in self.variables]

    def save(self) -> None:
        self._keep()
        super().save()

    def restore(self) -> None:
        for each, value in zip(self.variables, self._values, strict=True):
            each.assign(value)
        super().restore()

    def sync(self) -> None:
        stock.broadcast_variables(self.variables, root_rank=0)
        self._keep()
        super().sync()


def swapped(scenario: Scenario, directory: Path) -> tuple[Any, Any, Any]:
    """Train by stock Horovod's functions alone, but for the optimizer; return the same."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.02, momentum=0.5),
        strategy=scenario.way.removeprefix(SWAPPED).strip(),
    )
    optimizer.build(model.trainable_variables)
    events = Events(scenario, directory, lambda: loss_now(model))
    shared = [each.value for each in (*model.variables, *optimizer.variables)]
    state = PlainState(shared, step=0, starts=[])

    @tf.function  # type: ignore[untyped-decorator]
    def one_step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        gradients = tape.gradient(loss, [each.value for each in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)

    @stock.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        state.starts = [*state.starts, (state.step, stock.size())]
        while state.step < EPOCH * EPOCHS:
            events.before(state.step, state)
            one_step(*map(tf.constant, sample(stock.rank(), state.step)))
            state.step += 1
            if state.step % COMMIT_EVERY == 0:
                state.commit()
        optimizer.synchronize()

    train(state)
    return model, optimizer, state


def loss_now(model: Any) -> float:
    """On data that no worker trains on."""
    parts = [sample(1000, step) for step in range(8)]
    return float(np.mean([float(loss_of(model, x, y)) for x, y in parts]))


def main(directory: Path) -> None:
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    scenario = Scenario.read(directory)
    way = taped if scenario.way.startswith(TAPE) else fitted
    if scenario.way.startswith(SWAPPED):
        way = swapped
        stock.init()
    else:
        hvd.init()
    model, optimizer, state = way(scenario, directory)
    result = {
        "size": hvd.size(),
        "starts": state.starts,
        "loss": loss_now(model),
        "weights": weights_of(model).tolist(),
        "slots": [float(np.sum(each.numpy())) for each in optimizer.variables],
    }
    publish(directory / f"result.{hvd.rank()}", json.dumps(result))


# Within one process.

Found = dict[str, Any]

METHODS: dict[str, dict[str, Any]] = {
    "merged-gradient": {"strategy": "merged-gradient"},
    "pipe-sgd, int8": {
        "strategy": "pipe-sgd",
        "compression": hvd.Int8(chunk=64, error_feedback=True),
    },
    "pipe-sgd, local": {"strategy": "pipe-sgd:prediction=local"},
    "pipe-sgd, passes": {"strategy": "pipe-sgd", "backward_passes_per_step": 3},
    "cocod": {"strategy": "cocod:period=3"},
    "cocod, int8": {
        "strategy": "cocod:period=3",
        "compression": hvd.Int8(chunk=64, error_feedback=True),
    },
    "cocod, outer": {"strategy": "cocod:period=4,fragments=2,outer=nesterov"},
}


class Trainer:
    """A model, its optimizer, and a step of both, traced once for all workers."""

    def __init__(self, **options: Any) -> None:
        self.model = make_model()
        self.optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9), **options
        )

        @tf.function  # type: ignore[untyped-decorator]
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(self.model, x, y)
            variables = self.model.trainable_variables
            gradients = tape.gradient(loss, [each.value for each in variables])
            self.optimizer.apply(gradients, variables)

        self._step = step

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self._step(*map(tf.constant, sample(hvd.rank(), step)))

    def all(self) -> Found:
        """Everything there is: weights, slots, counters and what is in flight."""
        found: Found = {
            f"variable {i}": each.numpy()
            for i, each in enumerate([*self.model.variables, *self.optimizer.variables])
        }
        for number, state in self.optimizer._hvd_pipe.states().items():
            found |= {f"flight {number} {name}": array for name, array in state.items()}
        return found


def committed(name: str) -> Found:
    """Commit, go on, go back, go on once more; then take rank 0's."""
    trainer = Trainer(**METHODS[name])
    state = hvd.elastic.KerasState(trainer.model, trainer.optimizer, step=0)
    trainer.train(0, 7)
    state.step = 7
    state.commit()
    found: Found = {"committed": trainer.all()}
    trainer.train(7, 12)
    state.step = 12
    found["gone on"] = trainer.all()
    state.restore()
    found["restored"], found["step"] = trainer.all(), state.step
    trainer.train(7, 12)
    found["gone on again"] = trainer.all()
    for each in trainer.model.variables:
        each.assign(each + hvd.rank())
    state.save()
    state.sync()
    found["synced"] = trainer.all()
    trainer.train(12, 15)
    trainer.optimizer.synchronize()
    found["ended"] = trainer.all()
    return found


def started_again(name: str) -> Found:
    """Horovod ends and starts in the middle, with the same workers."""
    found: Found = {}
    for way in ("whole", "again"):
        trainer = Trainer(**METHODS[name])
        trainer.train(0, 7)
        if way == "again":
            hvd.shutdown()
            hvd.init()
        trainer.train(7, 12)
        found[way] = trainer.all()
    return found


def wrong_states() -> Found:
    """What states say of what cannot be."""
    texts: Found = {}
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    for what, make in {
        "unbuilt": lambda: hvd.elastic.KerasState(unbuilt),
        "no optimizer": lambda: hvd.elastic.KerasState(make_model()),
        "no variables": hvd_tf.elastic.TensorFlowState,
    }.items():
        try:
            make()
        except ValueError as error:
            texts[what] = str(error)
    return texts


def interrupted_epoch() -> Found:
    """Of an epoch of six batches, four were done; somebody may end training meanwhile."""
    found: Found = {}

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    class Count(keras.callbacks.Callback):  # type: ignore[misc]
        batches: list[int]

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.batches = [*getattr(self, "batches", []), 0]

        def on_train_batch_end(self, number: int, logs: Any = None) -> None:
            self.batches[-1] += 1

    for what, first in (("alone", []), ("stopped before", [Stop()])):
        trainer, count = Trainer(strategy="merged-gradient"), Count()
        trainer.model.compile(trainer.optimizer, "mse")
        state = hvd.elastic.KerasState(trainer.model, batch=4, epoch=2)
        own = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
        ]
        trainer.model.fit(
            dataset(0), steps_per_epoch=6, epochs=3, callbacks=[count, *first, *own], verbose=0
        )
        found[what] = {"batches": count.batches, "epoch": state.epoch, "batch": state.batch}
    return found


CASES: dict[str, tuple[Any, ...]] = {
    **{f"committed {name}": (committed, name) for name in METHODS},
    **{f"again {name}": (started_again, name) for name in METHODS},
    "wrong": (wrong_states,),
    "interrupted": (interrupted_epoch,),
}


def observations() -> dict[str, Found | Raised]:
    importlib.import_module("mpi4py.MPI")  # it finalises MPI, so that Horovod does not
    hvd.init()
    return run_cases({name: lambda call=call: call[0](*call[1:]) for name, call in CASES.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
