"""What the ranks of `test_keras_timeline` do: jobs that write timelines, each into its own folder.

Models are `keras_problem`'s: 3, 12, 4, 20, 5 and 30 float64 numbers, in the order of messages.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import Raised, run_cases
from keras_problem import BATCH, batch, loss_of, make_model
from workers_keras_forward import forward

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.runtime.timeline.recorder import DIRECTORY, MEGABYTES, OFF, TraceRecorder
from hvd_pipe.tensorflow import tape
from hvd_pipe.tensorflow.measuring import timeline

STEPS = 12
PASSES = 3
PERIOD = 3
WARMUP = 2

BUCKETS = {  # of bytes
    "merged-gradient": [592],
    "merged-gradient:plan=wfbp": [24, 96, 32, 160, 40, 240],
    "pipe-sgd": [592],
    "pipe-sgd:bucket_bytes=200": [152, 200, 240],
    f"pipe-sgd:warmup_steps={WARMUP}": [592],
    "pipe-sgd:prediction=local": [592],
}
COCOD = f"cocod:period={PERIOD}"
WARM_COCOD = f"cocod:period={PERIOD},warmup_steps={WARMUP}"
TURNS = f"cocod:period={PERIOD},fragments={PERIOD}"


def _begin(**environment: str) -> None:
    """Be as a new process with this environment; what was written is on the disk."""
    if isinstance(timeline.active, TraceRecorder):
        timeline.active.file.close()
    timeline.active = OFF
    tape._kept.clear()
    for name in (DIRECTORY, MEGABYTES):
        os.environ.pop(name, None)
    os.environ.update(environment)


def _data(rank: int) -> tuple[Any, Any]:
    parts = [batch(rank, step) for step in range(STEPS)]
    x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    return x, y


def fit(strategy: str, wrap: Any = None, compile: Any = None, **options: Any) -> None:
    model = make_model()
    plain = keras.optimizers.SGD(0.05, momentum=0.9, **options)
    optimizer = hvd.DistributedOptimizer(plain, strategy=strategy, **(wrap or {}))
    model.compile(optimizer, "mse", **(compile or {}))
    x, y = _data(hvd.rank())
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


def behind_the_next_forward() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), strategy=forward(model))
    model.compile(optimizer, "mse")
    x, y = _data(hvd.rank())
    callbacks = [hvd.callbacks.PlanningCallback()]
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)


def embedding() -> None:
    table = keras.Variable(np.ones((12, 2)))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))

    @tf.function
    def step(rows: Any) -> None:
        with tf.GradientTape() as recorded:
            loss = tf.reduce_sum(tf.gather(table.value, rows) ** 2)
        optimizer.apply(recorded.gradient(loss, [table.value]), [table])

    for number in range(STEPS):
        step(tf.constant([hvd.rank(), number % 12], tf.int64))


def with_tape(strategy: str, eager: bool) -> None:
    model = make_model()
    optimizer = keras.optimizers.SGD(0.05)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as recorded:
            loss = loss_of(model, x, y)
        recorded = hvd_tf.DistributedGradientTape(recorded, strategy=strategy)
        gradients = recorded.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    run = step if eager else tf.function(step)
    for number in range(STEPS):
        x, y = batch(hvd.rank(), number)
        run(tf.constant(x), tf.constant(y))
    hvd_tf.drain_gradients(model.trainable_variables)


CASES: dict[str, Any] = {
    **{
        f"fit {strategy}": partial(fit, strategy)
        for strategy in (*BUCKETS, COCOD, WARM_COCOD, TURNS)
    },
    "several steps": partial(fit, "pipe-sgd", None, {"steps_per_execution": 4}),
    "eagerly": partial(fit, "pipe-sgd", None, {"run_eagerly": True}),
    "accumulating": partial(fit, "merged-gradient", gradient_accumulation_steps=PASSES),
    "int8": partial(fit, "pipe-sgd", {"compression": hvd.Compression.int8}),
    "sparse": embedding,
    "forward": behind_the_next_forward,
    "tape merged-gradient": partial(with_tape, "merged-gradient", False),
    "tape pipe-sgd": partial(with_tape, "pipe-sgd", False),
    "eager tape": partial(with_tape, "merged-gradient", True),
}


def operations(strategy: str) -> Counter[str]:
    """The kinds of all operations of a step's graph, and of the functions that it calls."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), strategy=strategy)

    @tf.function
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as recorded:
            loss = loss_of(model, x, y)
        variables = model.trainable_variables
        optimizer.apply(recorded.gradient(loss, variables), variables)

    graph = step.get_concrete_function(*map(tf.constant, batch(0, 0))).graph.as_graph_def()
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    return Counter(node.op for node in nodes)


def one_rank_alone(directory: Path) -> None:
    _begin(**({DIRECTORY: str(directory / "alone")} if hvd.rank() == 0 else {}))
    hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))


def observations(directory: Path) -> dict[str, Any | Raised]:
    hvd.init()
    cases: dict[str, Any] = {}

    def run(name: str) -> Any:
        _begin(HVD_PIPE_TIMELINE=str(directory / name))
        return CASES[name]()

    def graph(strategy: str, traced: bool) -> Counter[str]:
        _begin(**({DIRECTORY: str(directory / "graph")} if traced else {}))
        return operations(strategy)

    for name in CASES:
        cases[name] = partial(run, name)
    for strategy in ("merged-gradient", "pipe-sgd", WARM_COCOD):
        for traced in (False, True):
            cases[f"graph {strategy} {traced}"] = partial(graph, strategy, traced)
    cases["one rank alone"] = partial(one_rank_alone, directory)
    found = run_cases(cases)
    _begin()
    return found
