"""Timelines of running Keras jobs: what is in them, and that nothing is traced unless asked for.

A note is taken when one of TensorFlow's threads is free, so on a busy machine a moment may be
late. What is tested here does not depend on how late.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import workers_keras_timeline as jobs
from cases import Raised, of_case
from ranks import once, run_ranks
from workers_keras_timeline import (
    BUCKETS,
    CASES,
    COCOD,
    PASSES,
    PERIOD,
    STEPS,
    TURNS,
    WARM_COCOD,
    WARMUP,
)

from hvd_pipe.runtime.bucket_planner import SKIP_STEPS
from hvd_pipe.timeline import Event, Timeline

N = 2
MODEL_BYTES = 592
# A round of CoCoD that is waited for takes a thread, and what it waits for needs another.
THREADS = {"TF_NUM_INTEROP_THREADS": "4"}
FITS = [f"fit {strategy}" for strategy in BUCKETS]


@once
def job() -> tuple[list[dict[str, Any]], dict[str, Timeline]]:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        found = run_ranks(N, jobs.observations, directory, env=THREADS, timeout=280)
        timelines = {
            case: Timeline.load(directory / case) for case in CASES if (directory / case).is_dir()
        }
        return found, timelines


def of(case: str) -> Timeline:
    found, timelines = job()
    of_case(found, case)
    assert timelines[case].workers == tuple(range(N))
    return timelines[case]


def events(timeline: Timeline, category: str, worker: int) -> list[Event]:
    found = [e for e in timeline.events if (e.category, e.worker) == (category, worker)]
    return sorted(found, key=lambda event: event.start_s)


def messages(timeline: Timeline, worker: int) -> list[Counter[tuple[str, int]]]:
    """Names and bytes of the messages of each step."""
    found: list[Counter[tuple[str, int]]] = [Counter() for _ in range(STEPS)]
    for each in events(timeline, "allreduce", worker):
        found[each.args["step"]][each.name, each.args["bytes"]] += 1  # type: ignore[index,call-overload]
    return found


def buckets(sizes: list[int]) -> Counter[tuple[str, int]]:
    return Counter({(f"gradients.{i}", nbytes): 1 for i, nbytes in enumerate(sizes)})


@pytest.mark.parametrize("case", CASES)
def test_a_worker_does_one_thing_after_another(case: str) -> None:
    timeline = of(case)
    for worker in range(N):
        assert set(timeline.lanes(worker)) == {"compute", "network"}
        spans = [
            e
            for category in ("forward", "backward", "wait", "update")
            for e in events(timeline, category, worker)
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


@pytest.mark.parametrize("case", [*FITS, "several steps", "int8"])
def test_every_step_has_its_passes_and_messages(case: str) -> None:
    timeline = of(case)
    strategy = case.removeprefix("fit ") if case in FITS else "pipe-sgd"
    # int8: for each of 2 ranks, two chunks of 256 values with a scale of 4 bytes would be too
    # many for 74 values: one chunk.
    sizes = [N * (256 + 4)] if case == "int8" else BUCKETS[strategy]
    piped = strategy.startswith("pipe-sgd")
    for worker in range(N):
        for category in ("forward", "backward"):
            steps = [e.args["step"] for e in events(timeline, category, worker)]
            assert steps == list(range(STEPS)), category
        # The first pipelined step has nothing to apply; what `fit` drains is not shown.
        idle = {WARMUP if "warmup" in strategy else 0} if piped else set()
        updates = [e.args["step"] for e in events(timeline, "update", worker)]
        assert updates == [step for step in range(STEPS) if step not in idle]
        wanted = [buckets(sizes)] * STEPS
        if piped:  # the last gradients travel when `fit` ends
            wanted[-1] = wanted[-1] + wanted[-1]
        assert messages(timeline, worker) == wanted
        ready = Counter(e.name for e in events(timeline, "ready", worker))
        assert ready == {f"gradients.{i}": STEPS for i in range(len(sizes))}


@pytest.mark.parametrize("strategy", ["merged-gradient", "merged-gradient:plan=wfbp"])
def test_buckets_leave_when_they_are_ready(strategy: str) -> None:
    timeline = of(f"fit {strategy}")
    for worker in range(N):
        sent = {(e.name, e.args["step"]): e for e in events(timeline, "allreduce", worker)}
        ready = {(e.name, e.args["step"]): e for e in events(timeline, "ready", worker)}
        assert sent.keys() == ready.keys()
        for key, message in sent.items():
            assert ready[key].start_s <= message.start_s
        for update in events(timeline, "update", worker):
            mine = [e for e in sent.values() if e.args["step"] == update.args["step"]]
            assert update.start_s >= max(e.end_s for e in mine) - 1e-8


@pytest.mark.parametrize("case", ["fit pipe-sgd", "fit pipe-sgd:bucket_bytes=200"])
def test_pipe_sgd_sends_before_its_gradients_are_ready(case: str) -> None:
    timeline = of(case)
    for worker in range(N):
        sent = {
            (e.name, e.args["step"]): e for e in reversed(events(timeline, "allreduce", worker))
        }
        before = [
            sent[e.name, e.args["step"]].start_s < e.start_s
            for e in events(timeline, "ready", worker)
        ]
        assert sum(before) > 0  # of all of them, unless the machine is very busy


def test_cocod_has_a_round_a_period() -> None:
    timeline = of(f"fit {COCOD}")
    for worker in range(N):
        sent = Counter((e.name, e.args["bytes"]) for e in events(timeline, "allreduce", worker))
        # Rounds begin before the first step and after each period; at the end of `fit` all models
        # are averaged as they are.
        rounds = 1 + STEPS // PERIOD
        assert sent == {
            ("models.round.0", MODEL_BYTES): rounds,
            ("models.whole.0", MODEL_BYTES): 1,
        }
        assert len(events(timeline, "ready", worker)) == rounds
        waits = [e.args["step"] for e in events(timeline, "wait", worker)]
        assert waits == list(range(PERIOD - 1, STEPS, PERIOD))
        for category in ("forward", "backward", "update"):
            assert len(events(timeline, category, worker)) == STEPS


def test_cocod_sends_one_fragment_after_another() -> None:
    timeline = of(f"fit {TURNS}")
    for worker in range(N):
        sent = events(timeline, "allreduce", worker)
        turns = [1 + STEPS // PERIOD] + [STEPS // PERIOD] * (PERIOD - 1)
        assert Counter(e.name for e in sent) == {
            **{f"models.{i}.round.0": count for i, count in enumerate(turns)},
            **{f"models.{i}.whole.0": 1 for i in range(PERIOD)},
        }
        first = {e.name: e.args["bytes"] for e in sent if ".round." in e.name}
        assert sum(first.values()) == MODEL_BYTES  # type: ignore[arg-type]
        waits = [e.args["step"] for e in events(timeline, "wait", worker)]
        assert waits == list(range(STEPS))


def test_cocod_averages_gradients_while_it_warms_up() -> None:
    timeline = of(f"fit {WARM_COCOD}")
    for worker in range(N):
        of_step = messages(timeline, worker)
        warm = Counter({("warmup.0", MODEL_BYTES): 1})
        assert [warm <= found for found in of_step] == [s < WARMUP for s in range(STEPS)]
        assert len(events(timeline, "update", worker)) == STEPS


def test_accumulated_passes_are_shown_and_updated_once() -> None:
    timeline = of("accumulating")
    for worker in range(N):
        assert len(events(timeline, "forward", worker)) == STEPS
        assert len(events(timeline, "backward", worker)) == STEPS
        assert len(events(timeline, "allreduce", worker)) == STEPS // PASSES
        updates = [e.args["step"] for e in events(timeline, "update", worker)]
        assert updates == list(range(STEPS // PASSES))


def test_sparse_gradients_are_messages() -> None:
    for worker in range(N):
        row = 2 * 8 + 8  # two numbers and an index
        wanted = [Counter({("sparse.0", 2 * row): 1})] * STEPS
        assert messages(of("sparse"), worker) == wanted


def test_messages_behind_the_next_forward_pass_are_shown_in_its_step() -> None:
    """Those that `fit` finishes at its end as well; see `workers_keras_forward.plan_of`."""
    for worker in range(N):
        sent = [{name for name, _ in found} for found in messages(of("forward"), worker)]
        early, late = {f"gradients.{i}" for i in range(4)}, {"late.4", "late.5"}
        assert sent[:SKIP_STEPS] == [{f"gradients.{i}" for i in range(3)}] * SKIP_STEPS
        assert sent[SKIP_STEPS:] == [early | late] * (STEPS - SKIP_STEPS)
        ready = {e.name for e in events(of("forward"), "ready", worker)}
        assert not ready & late
        last = [e for e in events(of("forward"), "allreduce", worker) if e.name in late][-2:]
        first = [
            e for e in events(of("forward"), "backward", worker) if e.args["step"] == STEPS - 1
        ]
        assert all(e.start_s > first[0].end_s for e in last)


@pytest.mark.parametrize("case", ["tape merged-gradient", "tape pipe-sgd", "eager tape"])
def test_a_tape_shows_all_but_the_update(case: str) -> None:
    timeline = of(case)
    for worker in range(N):
        wanted = [buckets([MODEL_BYTES])] * STEPS
        if case == "tape pipe-sgd":
            wanted[-1] = wanted[-1] + wanted[-1]
        assert messages(timeline, worker) == wanted
        forwards = 0 if case == "eager tape" else STEPS
        assert len(events(timeline, "forward", worker)) == forwards
        assert len(events(timeline, "backward", worker)) == STEPS
        assert len(events(timeline, "update", worker)) == 0


def test_an_optimizer_that_runs_eagerly_shows_its_messages_and_updates() -> None:
    timeline = of("eagerly")
    for worker in range(N):
        assert len(events(timeline, "allreduce", worker)) == STEPS + 1
        assert len(events(timeline, "update", worker)) == STEPS - 1
        assert not events(timeline, "forward", worker)


@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd", WARM_COCOD])
def test_without_the_variable_a_graph_has_no_notes(strategy: str) -> None:
    found, _ = job()
    for without, traced in zip(
        *(of_case(found, f"graph {strategy} {kind}") for kind in (False, True)), strict=True
    ):
        notes = ("PyFunc", "PyFuncStateless")
        assert sum(without[kind] for kind in notes) == 0
        # begin, first and last gradient, end; and 2 or 3 of the message
        message = 3 if strategy == "pipe-sgd" else 2
        assert sum(traced[kind] for kind in notes) == 4 + message


def test_a_variable_on_one_rank_alone_is_refused_on_all() -> None:
    found, _ = job()
    for result in found:
        raised = result["one rank alone"]
        assert isinstance(raised, Raised)
        assert "ranks disagree on HVD_PIPE_TIMELINE: rank 0 has set" in raised.traceback
