"""Timelines of running Keras jobs: what is in them, and that nothing is traced unless asked for.

A note is taken when one of TensorFlow's threads is free, so on a busy machine a moment may be
late. What is tested here does not depend on how late.

Models are `keras_problem`'s: 3, 12, 4, 20, 5 and 30 float64 numbers, in the order of messages.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from functools import partial
from itertools import pairwise
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_problem import BATCH, batch, loss_of, make_model
from keras_training import data, forward
from on_ranks import gather, on_ranks, place

import hvd_pipe.tensorflow as hvd_tf
import hvd_pipe.tensorflow.keras as hvd
from hvd_pipe.runtime.bucket_planner import SKIP_STEPS
from hvd_pipe.runtime.timeline.recorder import DIRECTORY, MEGABYTES, OFF, TraceRecorder
from hvd_pipe.tensorflow import tape
from hvd_pipe.tensorflow.measuring import timeline as recording
from hvd_pipe.timeline import Event, Timeline

N = 2
# A round of CoCoD that is waited for takes a thread, and what it waits for needs another.
two = on_ranks(N, init=hvd.init, env={"TF_NUM_INTEROP_THREADS": "4"})

STEPS = 12
PASSES = 3
PERIOD = 3
WARMUP = 2
MODEL_BYTES = 592
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


def begin(**environment: str) -> None:
    """Be as a new process with this environment; what was written is on the disk."""
    if isinstance(recording.active, TraceRecorder):
        recording.active.file.close()
    recording.active = OFF
    tape._kept.clear()
    for name in (DIRECTORY, MEGABYTES):
        os.environ.pop(name, None)
    os.environ.update(environment)


def fit(strategy: str, wrap: Any = None, compile: Any = None, **options: Any) -> None:
    model, is_forward = make_model(), strategy == "forward"
    plain = keras.optimizers.SGD(0.05, momentum=0.9, **options)
    chosen = forward(model) if is_forward else strategy
    optimizer = hvd.DistributedOptimizer(plain, strategy=chosen, **(wrap or {}))
    model.compile(optimizer, "mse", **(compile or {}))
    callbacks = [hvd.callbacks.PlanningCallback()] if is_forward else []
    kept: dict[str, Any] = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(*data(0, STEPS), callbacks=callbacks, **kept)


def embedding() -> None:
    table = keras.Variable(np.ones((12, 2)))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))

    @tf.function(autograph=False)
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

    run = step if eager else tf.function(step, autograph=False)
    for number in range(STEPS):
        x, y = batch(hvd.rank(), number)
        run(tf.constant(x), tf.constant(y))
    hvd_tf.drain_gradients(model.trainable_variables)


FITS = [f"fit {strategy}" for strategy in BUCKETS]
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
    "forward": partial(fit, "forward"),
    "tape merged-gradient": partial(with_tape, "merged-gradient", False),
    "tape pipe-sgd": partial(with_tape, "pipe-sgd", False),
    "eager tape": partial(with_tape, "merged-gradient", True),
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


def messages(timeline: Timeline) -> list[Counter[tuple[str, int]]]:
    """Names and bytes of the messages of each step."""
    found: list[Counter[tuple[str, int]]] = [Counter() for _ in range(STEPS)]
    for each in events(timeline, "allreduce"):
        found[each.args["step"]][each.name, each.args["bytes"]] += 1  # type: ignore[index,call-overload]
    return found


def buckets(sizes: list[int]) -> Counter[tuple[str, int]]:
    return Counter({(f"gradients.{i}", nbytes): 1 for i, nbytes in enumerate(sizes)})


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
@pytest.mark.parametrize("case", CASES)
def test_a_worker_does_one_thing_after_another(case: str) -> None:
    timeline = of(case)
    assert set(timeline.lanes(hvd.rank())) == {"compute", "network"}
    spans = [
        e
        for category in ("forward", "backward", "wait", "update")
        for e in events(timeline, category)
    ]
    assert all(e.lane == "compute" for e in spans)
    for before, after in pairwise(sorted(spans, key=lambda e: (e.start_s, e.end_s))):
        assert before.end_s <= after.start_s + 1e-8, (before, after)
    # In each step in this order, each at most once.
    order = ("forward", "backward", "wait", "update")
    for step in range(STEPS):
        mine = sorted((e for e in spans if e.args["step"] == step), key=lambda e: e.start_s)
        if not case.startswith("fit cocod") and case != "accumulating":
            places = [order.index(e.category) for e in mine]
            assert places == sorted(set(places)), (step, mine)


@two
@pytest.mark.parametrize("case", [*FITS, "several steps", "int8"])
def test_every_step_has_its_passes_and_messages(case: str) -> None:
    timeline = of(case)
    strategy = case.removeprefix("fit ") if case in FITS else "pipe-sgd"
    # int8: for each of 2 ranks, two chunks of 256 values with a scale of 4 bytes would be too
    # many for 74 values: one chunk.
    sizes = [N * (256 + 4)] if case == "int8" else BUCKETS[strategy]
    piped = strategy.startswith("pipe-sgd")
    for category in ("forward", "backward"):
        steps = [e.args["step"] for e in events(timeline, category)]
        assert steps == list(range(STEPS)), category
    # The first pipelined step has nothing to apply; what `fit` drains is not shown.
    idle = {WARMUP if "warmup" in strategy else 0} if piped else set()
    updates = [e.args["step"] for e in events(timeline, "update")]
    assert updates == [step for step in range(STEPS) if step not in idle]
    wanted = [buckets(sizes)] * STEPS
    if piped:  # the last gradients travel when `fit` ends
        wanted[-1] = wanted[-1] + wanted[-1]
    assert messages(timeline) == wanted
    ready = Counter(e.name for e in events(timeline, "ready"))
    assert ready == {f"gradients.{i}": STEPS for i in range(len(sizes))}


@two
@pytest.mark.parametrize("strategy", ["merged-gradient", "merged-gradient:plan=wfbp"])
def test_buckets_leave_when_they_are_ready(strategy: str) -> None:
    timeline = of(f"fit {strategy}")
    sent = {(e.name, e.args["step"]): e for e in events(timeline, "allreduce")}
    ready = {(e.name, e.args["step"]): e for e in events(timeline, "ready")}
    assert sent.keys() == ready.keys()
    for key, message in sent.items():
        assert ready[key].start_s <= message.start_s
    for update in events(timeline, "update"):
        mine = [e for e in sent.values() if e.args["step"] == update.args["step"]]
        assert update.start_s >= max(e.end_s for e in mine) - 1e-8


# nightly: on a very busy machine, all messages may be late
@pytest.mark.nightly
@two
@pytest.mark.parametrize("case", ["fit pipe-sgd", "fit pipe-sgd:bucket_bytes=200"])
def test_pipe_sgd_sends_before_its_gradients_are_ready(case: str) -> None:
    timeline = of(case)
    sent = {(e.name, e.args["step"]): e for e in reversed(events(timeline, "allreduce"))}
    before = [sent[e.name, e.args["step"]].start_s < e.start_s for e in events(timeline, "ready")]
    assert sum(before) > 0


@two
def test_cocod_has_a_round_a_period() -> None:
    timeline = of(f"fit {COCOD}")
    sent = Counter((e.name, e.args["bytes"]) for e in events(timeline, "allreduce"))
    # Rounds begin before the first step and after each period; at the end of `fit` all models
    # are averaged as they are.
    rounds = 1 + STEPS // PERIOD
    assert sent == {
        ("models.round.0", MODEL_BYTES): rounds,
        ("models.whole.0", MODEL_BYTES): 1,
    }
    assert len(events(timeline, "ready")) == rounds
    waits = [e.args["step"] for e in events(timeline, "wait")]
    assert waits == list(range(PERIOD - 1, STEPS, PERIOD))
    for category in ("forward", "backward", "update"):
        assert len(events(timeline, category)) == STEPS


@two
def test_cocod_sends_one_fragment_after_another() -> None:
    timeline = of(f"fit {TURNS}")
    sent = events(timeline, "allreduce")
    turns = [1 + STEPS // PERIOD] + [STEPS // PERIOD] * (PERIOD - 1)
    assert Counter(e.name for e in sent) == {
        **{f"models.{i}.round.0": count for i, count in enumerate(turns)},
        **{f"models.{i}.whole.0": 1 for i in range(PERIOD)},
    }
    first = {e.name: e.args["bytes"] for e in sent if ".round." in e.name}
    assert sum(first.values()) == MODEL_BYTES  # type: ignore[arg-type]
    waits = [e.args["step"] for e in events(timeline, "wait")]
    assert waits == list(range(STEPS))


@two
def test_cocod_averages_gradients_while_it_warms_up() -> None:
    timeline = of(f"fit {WARM_COCOD}")
    of_step = messages(timeline)
    warm = Counter({("warmup.0", MODEL_BYTES): 1})
    assert [warm <= found for found in of_step] == [s < WARMUP for s in range(STEPS)]
    assert len(events(timeline, "update")) == STEPS


@two
def test_accumulated_passes_are_shown_and_updated_once() -> None:
    timeline = of("accumulating")
    assert len(events(timeline, "forward")) == STEPS
    assert len(events(timeline, "backward")) == STEPS
    assert len(events(timeline, "allreduce")) == STEPS // PASSES
    updates = [e.args["step"] for e in events(timeline, "update")]
    assert updates == list(range(STEPS // PASSES))


@two
def test_sparse_gradients_are_messages() -> None:
    row = 2 * 8 + 8  # two numbers and an index
    wanted = [Counter({("sparse.0", 2 * row): 1})] * STEPS
    assert messages(of("sparse")) == wanted


@two
def test_messages_behind_the_next_forward_pass_are_shown_in_its_step() -> None:
    """Those that `fit` finishes at its end as well; see `keras_training.forward_plan`."""
    sent = [{name for name, _ in found} for found in messages(of("forward"))]
    early, late = {f"gradients.{i}" for i in range(4)}, {"late.4", "late.5"}
    assert sent[:SKIP_STEPS] == [{f"gradients.{i}" for i in range(3)}] * SKIP_STEPS
    assert sent[SKIP_STEPS:] == [early, *[early | late] * (STEPS - SKIP_STEPS - 1)]
    ready = {e.name for e in events(of("forward"), "ready")}
    assert not ready & late
    last = [e for e in events(of("forward"), "allreduce") if e.name in late][-2:]
    first = [e for e in events(of("forward"), "backward") if e.args["step"] == STEPS - 1]
    assert all(e.start_s > first[0].end_s for e in last)


@two
@pytest.mark.parametrize("case", ["tape merged-gradient", "tape pipe-sgd", "eager tape"])
def test_a_tape_shows_all_but_the_update(case: str) -> None:
    timeline = of(case)
    wanted = [buckets([MODEL_BYTES])] * STEPS
    if case == "tape pipe-sgd":
        wanted[-1] = wanted[-1] + wanted[-1]
    assert messages(timeline) == wanted
    forwards = 0 if case == "eager tape" else STEPS
    assert len(events(timeline, "forward")) == forwards
    assert len(events(timeline, "backward")) == STEPS
    assert len(events(timeline, "update")) == 0


@two
def test_an_optimizer_that_runs_eagerly_shows_its_messages_and_updates() -> None:
    timeline = of("eagerly")
    assert len(events(timeline, "allreduce")) == STEPS + 1
    assert len(events(timeline, "update")) == STEPS - 1
    assert not events(timeline, "forward")


@two
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd", WARM_COCOD])
def test_without_the_variable_a_graph_has_no_notes(strategy: str) -> None:
    notes = ("PyFunc", "PyFuncStateless")
    assert sum(operations(strategy)[kind] for kind in notes) == 0
    begin(HVD_PIPE_TIMELINE=str(place()[0] / "graph"))
    traced = operations(strategy)
    begin()
    # begin, first and last gradient, end; and 2 or 3 of the message
    message = 3 if strategy == "pipe-sgd" else 2
    assert sum(traced[kind] for kind in notes) == 4 + message


@two
def test_a_variable_on_one_rank_alone_is_refused_on_all() -> None:
    begin(**({DIRECTORY: str(place()[0] / "alone")} if hvd.rank() == 0 else {}))
    with pytest.raises(
        hvd.RanksDisagreeError,
        match="ranks disagree on HVD_PIPE_TIMELINE: rank 0 has set",
    ):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    begin()
