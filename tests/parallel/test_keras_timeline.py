"""Timelines of running Keras jobs: eager steps, CoCoD's rounds, and no notes in any graph."""

from __future__ import annotations

import functools
import os
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras_problem import BATCH, batch, loss_of, make_model
from keras_training import data
from on_ranks import gather, on_ranks, place

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.runtime.timeline import DIRECTORY, MEGABYTES, OFF
from hvd_pipe.tensorflow import tape
from hvd_pipe.tensorflow.measuring import timeline as recording
from hvd_pipe.timeline import Event, Timeline

N = 2
# A round of CoCoD that is waited for takes a thread, and what it waits for needs another.
two = on_ranks(N, init=hvd.init, env={"TF_NUM_INTEROP_THREADS": "4"})

STEPS = 12
PERIOD = 3
MODEL_BYTES = 592  # float64: 3, 12, 4, 20, 5 and 30 numbers, in the order of messages
COCOD = f"cocod:period={PERIOD}"
EAGER = {"run_eagerly": True}


def begin(**environment: str) -> None:
    """Be as a new process with this environment; what was written is on the disk."""
    recording.active.close()
    recording.active = OFF
    tape._kept.clear()
    for name in (DIRECTORY, MEGABYTES):
        os.environ.pop(name, None)
    os.environ.update(environment)


def fit(strategy: str, compile: Any = None, **options: Any) -> None:
    model = make_model()
    plain = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(
        hvd.DistributedOptimizer(plain, strategy=strategy, **options), "mse", **(compile or {})
    )
    model.fit(*data(0, STEPS), batch_size=BATCH, shuffle=False, verbose=0)


def with_tape(strategy: str) -> None:
    model = make_model()
    optimizer = keras.optimizers.SGD(0.05)
    for number in range(STEPS):
        x, y = batch(hvd.rank(), number)
        with tf.GradientTape() as recorded:
            loss = loss_of(model, tf.constant(x), tf.constant(y))
        recorded = hvd_tf.DistributedGradientTape(recorded, strategy=strategy)
        gradients = recorded.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)


CASES: dict[str, Any] = {
    COCOD: partial(fit, COCOD),
    "merged-gradient": partial(fit, "merged-gradient", EAGER),
    "pipe-sgd": partial(fit, "pipe-sgd", EAGER),
    "int8": partial(fit, "merged-gradient", EAGER, compression=hvd.Compression.int8),
    "tape": partial(with_tape, "merged-gradient"),
}


@functools.cache
def of(case: str) -> Timeline:
    """Run a case; return what all ranks have written."""
    directory = place()[0] / case
    begin(HVD_PIPE_TIMELINE=str(directory))
    CASES[case]()
    begin()
    gather(None)  # what the others write is on the disk as well
    timeline = Timeline.load(directory)
    assert timeline.workers == tuple(range(N))
    return timeline


def events(timeline: Timeline, category: str) -> list[Event]:
    """This rank's."""
    found = [e for e in timeline.events if (e.category, e.worker) == (category, hvd.rank())]
    return sorted(found, key=lambda event: event.start_s)


def operations(strategy: str) -> Counter[str]:
    """The kinds of all operations of a step's graph, and of the functions that it calls."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), strategy=strategy)

    @tf.function(autograph=False)
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as recorded:
            loss = loss_of(model, x, y)
        variables = model.trainable_variables
        optimizer.apply(recorded.gradient(loss, variables), variables)

    graph = step.get_concrete_function(*map(tf.constant, batch(0, 0))).graph.as_graph_def()
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    return Counter(node.op for node in nodes)


@two
@pytest.mark.parametrize("case", ["merged-gradient", "pipe-sgd", "int8", "tape"])
def test_an_eager_step_shows_its_messages_and_its_update(case: str) -> None:
    timeline = of(case)
    # The first pipelined step has nothing to apply; `fit` waits for the last message at its end.
    sent = [e.args["step"] for e in events(timeline, "allreduce")]
    assert sent == [*range(STEPS), *([STEPS] if case == "pipe-sgd" else [])]
    updates = [e.args["step"] for e in events(timeline, "update")]
    wanted = {"pipe-sgd": [*range(1, STEPS)], "tape": []}
    assert updates == wanted.get(case, [*range(STEPS)])
    assert len(events(timeline, "backward")) == (STEPS if case == "tape" else 0)
    # int8: for each of 2 ranks, one chunk of 256 values and their scale of 4 bytes.
    nbytes = N * (256 + 4) if case == "int8" else MODEL_BYTES
    found = Counter((e.name, e.args["bytes"]) for e in events(timeline, "allreduce"))
    assert found == {("gradients.0", nbytes): len(sent)}
    spans = [e for what in ("backward", "wait", "update") for e in events(timeline, what)]
    for before, after in pairwise(sorted(spans, key=lambda e: (e.start_s, e.end_s))):
        assert before.end_s <= after.start_s + 1e-8, (before, after)


@two
def test_cocod_has_a_round_a_period() -> None:
    timeline = of(COCOD)
    sent = Counter((e.name, e.args["bytes"]) for e in events(timeline, "allreduce"))
    # Rounds begin before the first step and after each period; at the end of `fit` all models
    # are averaged as they are.
    rounds = 1 + STEPS // PERIOD
    assert sent == {
        ("models.round.0", MODEL_BYTES): rounds,
        ("models.whole.0", MODEL_BYTES): 1,
    }
    assert len(events(timeline, "ready")) == rounds


@two
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd", COCOD])
def test_a_graph_has_no_notes(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = operations(strategy)
    begin(HVD_PIPE_TIMELINE=str(place()[0] / "graph"))
    recording._has_warned = False
    assert operations(strategy) == plain
    begin()
    told = [line for line in caplog.messages if "HOROVOD_TIMELINE shows its messages" in line]
    assert len(told) == (hvd.rank() == 0)


@two
def test_a_variable_on_one_rank_alone_is_refused_on_all() -> None:
    begin(**({DIRECTORY: str(place()[0] / "alone")} if hvd.rank() == 0 else {}))
    with pytest.raises(
        hvd.RanksDisagreeError,
        match="ranks disagree on HVD_PIPE_TIMELINE: rank 0 has set",
    ):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    begin()
