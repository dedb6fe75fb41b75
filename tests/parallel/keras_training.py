"""How tests train ``keras_problem``'s model under ``fit`` on ranks, and note what happens."""

from __future__ import annotations

import gc
import importlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from keras_problem import BATCH, STEPS, batch, loss_of, make_model, sample, weights_of
from on_ranks import gather

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime import check_mode
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.tensorflow.arguments import shapes_of
from hvd_pipe.tensorflow.graphs import raw
from hvd_pipe.tensorflow.measuring.ready_times import ReadyTimes
from hvd_pipe.tensorflow.strategies import replan
from hvd_pipe.tensorflow.strategies.replan import Replan

OVERFLOWING = 12  # steps of `overflow_on_one_rank`, one of which overflows


def in_memory(model: Any) -> Any:
    """Return the weights as they are stored: `weights_of`, but nobody is told of the look."""
    kept = [(vars(raw(each))["_handle"], raw(each).dtype) for each in model.trainable_variables]
    read = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype) for handle, dtype in kept]
    return np.concatenate([each.numpy().ravel() for each in read])


class Record(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the weights in memory after every batch, and calls ``then`` after batch ``at``."""

    def __init__(self, at: int = -1, then: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.weights: list[Any] = []
        self._at, self._then = at, then

    def on_train_batch_end(self, number: int, logs: Any = None) -> None:
        self.weights.append(in_memory(self.model))
        if len(self.weights) == self._at and self._then is not None:
            self._then()


def data(first: int = 0, last: int = STEPS) -> tuple[Any, Any]:
    """Return this rank's inputs and targets of these steps."""
    parts = [batch(hvd.rank(), step) for step in range(first, last)]
    x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    return x, y


def fit(model: Any, x: Any, y: Any, *callbacks: Any, **options: Any) -> Any:
    """Train in order and without output, after a broadcast from rank 0."""
    callbacks = (hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, callbacks=list(callbacks), **options)


INT8 = hvd.Int8(chunk=64, error_feedback=True)
METHODS: dict[str, dict[str, Any]] = {
    "merged-gradient": {"strategy": "merged-gradient"},
    "pipe-sgd, int8": {"strategy": "pipe-sgd", "compression": INT8},
    "pipe-sgd, local": {"strategy": "pipe-sgd:prediction=local"},
    "pipe-sgd, passes": {"strategy": "pipe-sgd", "backward_passes_per_step": 3},
    "cocod": {"strategy": "cocod:period=3"},
    "cocod, int8": {"strategy": "cocod:period=3", "compression": INT8},
    "cocod, outer": {"strategy": "cocod:period=4,fragments=2,outer=nesterov"},
}
"""Options of a `Trainer`."""


class Trainer:
    """A model, an optimizer, and a step of both, traced once.

    Args:
        make: Makes the model.
        tape: Whether a tape is distributed, in place of the optimizer.
        options: How to distribute.
    """

    def __init__(
        self, make: Callable[[], Any] = make_model, tape: bool = False, **options: Any
    ) -> None:
        self.model = make()
        plain = keras.optimizers.SGD(0.05, momentum=0.9)
        self.optimizer: Any = plain if tape else hvd.DistributedOptimizer(plain, **options)
        self.optimizer.build(self.model.trainable_variables)
        self.saver = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer)

        @tf.function  # type: ignore[untyped-decorator]
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as recorded:
                loss = loss_of(self.model, x, y)
            if tape:
                recorded = hvd_tf.DistributedGradientTape(recorded, **options)
            variables = self.model.trainable_variables
            gradients = recorded.gradient(loss, [each.value for each in variables])
            self.optimizer.apply(gradients, variables)

        self._step = step

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self._step(*map(tf.constant, sample(hvd.rank(), step)))

    def finish(self) -> Any:
        """Return the weights when nothing is pending any more."""
        if hasattr(self.optimizer, "synchronize"):
            self.optimizer.synchronize()
        return weights_of(self.model)

    @property
    def variables(self) -> list[Any]:
        return [*self.model.variables, *self.optimizer.variables]

    def all(self) -> dict[str, Any]:
        """Everything there is: weights, slots, counters and what is in flight."""
        arrays = {f"variable {i}": each.numpy() for i, each in enumerate(self.variables)}
        for number, state in self.optimizer._hvd_pipe.states().items():
            arrays |= {f"flight {number} {name}": array for name, array in state.items()}
        return arrays


class Small:
    """Six weights of 16 to 56 bytes; ranks have other gradients."""

    def __init__(self, **options: Any) -> None:
        self.weights = [keras.Variable(np.ones(2 + i), name=f"w{i}") for i in range(6)]
        plain = keras.optimizers.SGD(0.05, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(plain, **options)
        self.optimizer.build(self.weights)
        self.saver = tf.train.Checkpoint(weights=self.weights, optimizer=self.optimizer)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            own = float((1 + hvd.rank()) * (1 + step))
            gradients = [each * (i + 1.0) + own for i, each in enumerate(self.weights)]
            self.optimizer.apply(gradients, self.weights)

    def values(self) -> Any:
        """Return all weights in one vector."""
        return np.concatenate([each.numpy() for each in self.weights])


def assert_same(actual: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert actual.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


def optimizer_of(model: Any) -> Any:
    """Return a model's optimizer, without the LossScaleOptimizer around it."""
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def forward_plan(model: Any) -> Plan:
    """A bucket a layer; the last layer's travels in three pieces, those of the middle in two."""
    variables = model.trainable_variables
    name_of = dict(zip(map(id, variables), shapes_of(variables).names, strict=True))
    layers = [
        tuple(name_of[id(each)] for each in layer.trainable_variables) for layer in model.layers
    ]
    buckets = tuple(layer for layer in reversed(layers) if layer)
    middle = tuple(range(1, len(buckets) - 1))
    return Plan(buckets, "given", order=(0, *middle, 0, len(buckets) - 1, *middle, 0))


def forward(model: Any) -> MergedGradient:
    """The strategy that leaves messages of `forward_plan` to the next forward pass."""
    return MergedGradient(plan=forward_plan(model), overlap="forward")


@contextmanager
def seen(
    seconds: Callable[[int], Any], waits: Sequence[float] = (6.0,) * 5
) -> Iterator[list[int]]:
    """Give what each rank sees of trials; the result takes the batches after which they end.

    Args:
        seconds: Of the five steps of a trial, by how many have ended before.
        waits: For messages, in these steps.
    """
    ends: list[int] = []
    recorded = Replan._recorded

    def seen(self: Any, engine: Any) -> Any:
        if engine.times is not None:
            engine.times.waits = list(waits)
            engine.times.step_s = (np.zeros(5) + seconds(len(ends))).tolist()
        ends.append(self._batches)
        return recorded(self, engine)

    def ready(times: ReadyTimes) -> list[float]:
        return [0.4 * (5 - index) for index in range(6)]

    with (
        mock.patch.object(Replan, "_recorded", seen),
        mock.patch.object(ReadyTimes, "seconds", ready),
    ):
        yield ends


def raced() -> AbstractContextManager[list[int]]:
    """Have the plan without the barrier, which is tried last, be fastest."""
    return seen(lambda ended: 13.0 - ended)


@contextmanager
def short_trials() -> Iterator[None]:
    """Two plans are tried, in three steps each."""
    with mock.patch.multiple(replan, PLANS=2, SETTLE_STEPS=1, TRIAL_STEPS=2):
        yield


@contextmanager
def checks(seed: int | None) -> Iterator[None]:
    """As if the job had been started with these delays, or with none and no checks."""
    before = check_mode.active
    check_mode.active = check_mode.OFF if seed is None else check_mode.Check(seed, hvd.rank())
    try:
        yield
    finally:
        check_mode.active = before


def assert_alike(array: Any) -> None:
    """All ranks have the same numbers, and these are finite."""
    first, *others = gather(np.asarray(array))
    assert np.isfinite(first).all()
    for other in others:
        np.testing.assert_array_equal(other, first)


def small_model() -> Any:
    """One layer for `data`, of 18 and 3 weights: its step is traced in little time."""
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3)])


def embedding_model() -> Any:
    """For `embedding_data`: rows of its first layer have sparse gradients."""
    keras.utils.set_random_seed(5)
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((2,), dtype="int32"),
            layers.Embedding(12, 3),
            layers.Flatten(),
            layers.Dense(3),
            layers.Dense(1),
        ]
    )


def embedding_data() -> tuple[Any, Any]:
    numbers = np.random.default_rng(hvd.rank()).integers(0, 12, (STEPS * BATCH, 2))
    return numbers, numbers.sum(axis=1, keepdims=True) / 12.0


def overflow_on_one_rank(strategy: str) -> Any:
    """Train under mixed_float16, where Keras puts a LossScaleOptimizer around ours."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = small_model()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), strategy=strategy)
        model.compile(optimizer, "mse")
    finally:
        keras.config.set_dtype_policy("float64")
    x, y = data(0, OVERFLOWING)
    if hvd.rank() == hvd.size() - 1:
        x[5 * BATCH] = 1e30  # beyond float16
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return model


def left_of(dropped: Sequence[weakref.ref[Any]]) -> int:
    """Collect until all is gone, for some seconds at most; return how many are left.

    A thread may just have sent what the last step left.
    """
    deadline = time.monotonic() + 10.0
    while any(each() is not None for each in dropped) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return sum(each() is not None for each in dropped)


def init_nodes() -> None:
    """Initialise Horovod with ranks on emulated nodes of two, as launchers say it."""
    importlib.import_module("mpi4py.MPI")  # it finalises MPI, so that Horovod can start again
    hvd.init(process_sets="dynamic")
    os.environ["HOROVOD_HOSTNAME"] = f"node{hvd.rank() // 2}"
