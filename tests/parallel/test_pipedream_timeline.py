"""Timelines of pipelines: each pass once, in the order that data takes, on one clock."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import workers_pipedream_timeline
from cases import of_case
from ranks import run_ranks
from workers_pipedream_timeline import CASES, MINIBATCHES, PLAIN_STEPS, WORKERS

from hvd_pipe.timeline import Event, Timeline

Stages = dict[int, int]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    directory = tmp_path_factory.mktemp("timelines")
    return directory, run_ranks(WORKERS, workers_pipedream_timeline.written, directory)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, job: tuple[Path, list]) -> tuple[str, Timeline, Stages]:
    """A case's name, its timeline, and the stage of each worker."""
    directory, ranks = job
    found = of_case(ranks, request.param)
    return (
        request.param,
        Timeline.load(directory / request.param),
        {rank: stage for rank, (stage, _) in enumerate(found)},
    )


def passes(timeline: Timeline, category: str) -> dict[tuple[int, str], Event]:
    """Return events by worker and microbatch; fails where there are two of one."""
    some = [e for e in timeline.events if e.category == category]
    found = {(e.worker, e.name.removeprefix(f"{category} ")): e for e in some}
    assert len(found) == len(some)
    return found


def units(name: str) -> set[str]:
    """Return the names of all microbatches of a case."""
    _, _, microbatches = CASES[name]
    if microbatches is None:
        return {str(at) for at in range(MINIBATCHES)}
    return {f"{at}.{piece}" for at in range(MINIBATCHES) for piece in range(microbatches)}


def test_each_stage_has_each_pass_once(case: tuple[str, Timeline, Stages]) -> None:
    name, timeline, stages = case
    for category in ("forward", "backward"):
        count = Counter((stages[worker], unit) for worker, unit in passes(timeline, category))
        expected = {(stage, unit) for stage in stages.values() for unit in units(name)}
        assert count == dict.fromkeys(expected, 1)


def test_passes_follow_the_data(case: tuple[str, Timeline, Stages]) -> None:
    _, timeline, stages = case
    forward = {(stages[w], unit): e for (w, unit), e in passes(timeline, "forward").items()}
    backward = {(stages[w], unit): e for (w, unit), e in passes(timeline, "backward").items()}
    last = max(stages.values())
    for (stage, unit), event in forward.items():
        assert event.end_s <= backward[stage, unit].start_s
        assert event.worker == backward[stage, unit].worker
        if stage < last:
            assert event.end_s <= forward[stage + 1, unit].start_s
            assert backward[stage + 1, unit].end_s <= backward[stage, unit].start_s


def test_a_worker_does_one_thing_after_another(case: tuple[str, Timeline, Stages]) -> None:
    _, timeline, stages = case
    for worker in stages:
        mine = [e for e in timeline.events if e.worker == worker and e.lane == "compute"]
        assert {e.category for e in mine} - {"ready"} == {"forward", "backward", "update", "wait"}
        busy = sorted((e for e in mine if e.category != "ready"), key=lambda e: e.start_s)
        for before, after in pairwise(busy):
            assert after.start_s >= before.end_s - 1e-8, (before, after)


def test_waits_end_as_passes_begin(case: tuple[str, Timeline, Stages]) -> None:
    _, timeline, stages = case
    for worker in stages:
        mine = [e for e in timeline.events if e.worker == worker and e.lane == "compute"]
        order = sorted((e for e in mine if e.category != "ready"), key=lambda e: e.start_s)
        for wait, next_one in pairwise(order):
            if wait.category == "wait":
                kind, number = wait.name.rsplit(" ", 1)
                category = {"activation": "forward", "gradient": "backward"}.get(kind, "update")
                assert next_one.name == f"{category} {number}"


def test_messages_are_in_the_network_s_lane(case: tuple[str, Timeline, Stages]) -> None:
    name, timeline, stages = case
    last, count = max(stages.values()), len(units(name))
    network = [e for e in timeline.events if e.lane == "network"]
    assert {e.category for e in network} <= {"send", "allreduce"}
    sends = Counter(
        (stages[e.worker], e.name.split(" ")[0]) for e in network if e.category == "send"
    )
    expected = {(stage, "activation"): count for stage in range(last)}
    assert sends == expected | {(stage + 1, "gradient"): count for stage in range(last)}
    replicated = {stage for stage, width in Counter(stages.values()).items() if width > 1}
    assert {stages[e.worker] for e in network if e.category == "allreduce"} == replicated


def test_steps_count_updates(case: tuple[str, Timeline, Stages], job: tuple[Path, list]) -> None:
    name, timeline, stages = case
    found = of_case(job[1], name)
    for worker, stage in stages.items():
        updates = [e for e in timeline.events if (e.category, e.worker) == ("update", worker)]
        width = list(stages.values()).count(stage)
        each = 1 if CASES[name][2] else width  # minibatches an update takes
        assert len(updates) == -(-MINIBATCHES // each) == found[worker][1]
        order = sorted(updates, key=lambda e: e.start_s)
        assert [e.args["step"] for e in order] == list(range(len(order)))


def test_an_evaluation_has_forward_passes_only(job: tuple[Path, list]) -> None:
    directory, ranks = job
    of_case(ranks, "evaluation")
    timeline = Timeline.load(directory / "evaluation")
    assert {e.category for e in timeline.events} == {"forward", "wait", "send"}
    assert len(passes(timeline, "forward")) == 2 * MINIBATCHES


def test_other_models_are_traced_as_ever(job: tuple[Path, list]) -> None:
    directory, ranks = job
    of_case(ranks, "beside")
    timeline = Timeline.load(directory / "beside")
    count = Counter((e.worker, e.name) for e in timeline.events)
    for worker in range(WORKERS):
        for name in ("forward", "backward", "update"):
            assert count[worker, name] == PLAIN_STEPS


def test_a_directory_that_one_rank_cannot_write_is_refused_on_all(job: tuple[Path, list]) -> None:
    errors = of_case(job[1], "refused")
    assert "cannot be written" in errors[1]
    assert all("rank 1" in errors[rank] for rank in (0, 2))
