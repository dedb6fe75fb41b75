"""Simulated runs: equal to the closed forms where nothing is random, and right where it is."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import closed_forms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import ALL, codecs, comm_models, forward_overlaps, methods, profiles

from hvd_pipe.planning.cluster import Cluster, Network
from hvd_pipe.planning.comm import NONE, CodecCost, CommModel
from hvd_pipe.planning.messages import overlapped_messages
from hvd_pipe.planning.methods import Conventional, Method, WidePipeSGD
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.simulate import MAX_EVENTS, simulate
from hvd_pipe.planning.timing import step_time
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD
from hvd_pipe.timeline import Timeline

# Forward 2, gradients at 1 (10 bytes) and 4 (2 bytes) of backward, update 1: c = 7.
MODEL = ModelProfile(
    (LayerProfile("conv", 2, 3.0, 1.0), LayerProfile("fc", 10, 1.0, 1.0)), update_s=1.0
)
NET = CommModel.linear(0.5, 0.25)  # T(2) = 1, T(10) = 3, T(12) = 3.5


any_method = st.one_of(methods(), forward_overlaps())


def cluster(comm: CommModel, workers: int = 3, **rest: Any) -> Cluster:
    """Workers whose all-reduce takes exactly what a model says."""
    return Cluster(workers, Network(None, measured=comm, measured_workers=workers), **rest)


@given(methods(), profiles(), comm_models(), codecs(), st.integers(2, 5))
def test_without_jitter_it_is_the_closed_form(
    method: Method, profile: ModelProfile, comm: CommModel, codec: CodecCost, workers: int
) -> None:
    if isinstance(method, PipeSGD | WidePipeSGD):
        comm = replace(comm, blocking=False)
    expected = closed_forms.step(method, profile, comm, codec)
    found = simulate(profile, cluster(comm, workers), method, codec, iterations=40)
    assert found.step_s == pytest.approx(expected.total_s, rel=1e-9, abs=1e-12)
    assert found.comm_s == pytest.approx(expected.comm_s, rel=1e-9, abs=1e-12)
    assert found.exposed_s == pytest.approx(found.step_s - found.compute_s, rel=1e-9, abs=1e-9)
    assert (np.diff(found.iteration_ends) >= 0).all()


@pytest.mark.parametrize("iterations", [1, 2, 40, 41, 42])
def test_steps_that_come_in_bursts_are_counted_in_whole_bursts(iterations: int) -> None:
    """Width 3, nothing but delay: three steps at once, then all wait for the first average."""
    model = ModelProfile((LayerProfile("fc", 1, 0.0),))
    net = CommModel((0.0,), (0.0,), (0.0,), delay=0.25)
    found = simulate(model, cluster(net), WidePipeSGD(width=3), iterations=iterations)
    expected = 0.25 / 3 if iterations > 2 else 0.0  # the first two wait for nothing
    assert found.step_s == pytest.approx(expected)


@given(any_method, profiles(), comm_models(), st.floats(0.01, 0.5), st.integers(0, 9))
def test_stragglers_never_make_a_run_faster(
    method: Method, profile: ModelProfile, comm: CommModel, jitter: float, seed: int
) -> None:
    """The slowest of several is slower than their mean: of each step, and so of the run."""
    steady = cluster(comm)
    shaken = cluster(comm, jitter=jitter)
    found = simulate(profile, shaken, method, NONE, 40, seed)
    again = simulate(profile, shaken, method, NONE, 40, seed)
    assert found.step_s == again.step_s
    assert found.timeline == again.timeline
    assert found.step_s >= found.compute_s * (1 - 1e-9)
    assert simulate(profile, steady, method, iterations=40).compute_s == pytest.approx(
        step_time(method, profile, comm).compute_s
    )


@pytest.mark.parametrize(
    ("method", "at_least", "at_most"),
    [  # c = 7, m = 3.5; one of 64 workers is slower than the mean by about 2.4 deviations
        ("conventional", 1.5, 2.2),
        ("wfbp", 1.5, 2.2),
        ("pipe-sgd", 0.1, 0.8),
        ("wide-pipe-sgd:width=8", 0.0, 0.1),
        ("local-sgd:period=16", 0.2, 0.8),
        ("cocod:period=16", 0.0, 0.2),
    ],
)
def test_how_much_stragglers_cost(method: str, at_least: float, at_most: float) -> None:
    """To wait in every step costs the slowest one's; what waits later evens stragglers out."""
    steady = simulate(MODEL, cluster(NET, 64), method, iterations=320)
    shaken = simulate(MODEL, cluster(NET, 64, jitter=0.1), method, iterations=320)
    assert at_least <= shaken.step_s - steady.step_s <= at_most


def test_jitter_is_a_lognormal_of_mean_one() -> None:
    run = simulate(MODEL, cluster(NET, 2000, jitter=0.3), Conventional(), iterations=50)
    assert run.compute_s == pytest.approx(7.0, rel=0.01)


@pytest.mark.parametrize("method", [*ALL, MergedGradient(overlap="forward")])
def test_the_slowest_worker_sets_the_pace(method: Method) -> None:
    """Every method needs all workers: one of half the speed halves it where compute counts."""
    free = CommModel.linear(0.0, 0.0)
    run = simulate(MODEL, cluster(free, speeds=(1.0, 0.5, 2.0)), method)
    assert run.step_s == pytest.approx(14.0, abs=1e-3)  # Horovod may wait for a tick
    assert run.compute_s == pytest.approx(7 * (1 + 2 + 0.5) / 3)
    assert run.exposed_s == pytest.approx(run.step_s - run.compute_s)


def test_batches_in_proportion_to_speed_keep_workers_in_step() -> None:
    """CoCoD's weights are the batches: with them, all take 7 * 3 / (1 + 0.5 + 1.5) = 7 s."""
    free = CommModel.linear(0.0, 0.0)
    unequal = cluster(free, speeds=(1.0, 0.5, 1.5))
    assert simulate(MODEL, unequal, CoCoD(weights=(2, 1, 3))).step_s == pytest.approx(7.0)
    with pytest.raises(ValueError, match=r"2 weights, 3 workers"):
        simulate(MODEL, unequal, CoCoD(weights=(2, 1)))


def test_a_bottleneck_that_has_not_reached_the_workers_yet_counts() -> None:
    """m = 7.07 against c = 7: workers feel it after a hundred steps, while messages queue up."""
    slow = CommModel.linear(0.0, 7.07 / 12)
    run = simulate(MODEL, cluster(slow), WidePipeSGD(5), iterations=20)
    assert run.iteration_ends[-1] == pytest.approx(140.0)
    assert run.step_s == pytest.approx(7.07)


def lanes(timeline: Timeline, worker: int) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for event in timeline.events:
        if event.worker == worker and event.category != "ready":
            found.setdefault(event.lane, []).append(
                (event.start_s, event.start_s + event.duration_s)
            )
    return found


@given(any_method, profiles(), comm_models(), st.sampled_from([0.0, 0.2]))
def test_the_timeline_is_one_that_can_happen(
    method: Method, profile: ModelProfile, comm: CommModel, jitter: float
) -> None:
    """A worker does one thing at a time, the link too, and nothing leaves before all have it."""
    run = simulate(
        profile, cluster(comm, jitter=jitter), method, iterations=8, trace_workers=(2, 0, 1)
    )
    assert {event.worker for event in run.timeline.events} <= {0, 1, 2}
    for worker in range(3):
        for spans in lanes(run.timeline, worker).values():
            for (_, end), (start, _) in pairwise(sorted(spans)):
                assert start >= end - 1e-9
    ready: dict[tuple[str, object], float] = {}
    for event in run.timeline.events:
        if event.category == "ready":
            key = event.name, event.args["step"]
            ready[key] = max(ready.get(key, 0.0), event.start_s)
    for event in run.timeline.events:
        if event.category == "allreduce":
            key = event.name.partition("-")[0], event.args["step"]  # "bucket 2-0" is a piece
            # Horovod's loop takes what comes a billionth of a cycle late.
            assert event.start_s >= ready.get(key, 0.0) - 1e-8


def test_the_timeline_of_a_step() -> None:
    run = simulate(MODEL, cluster(NET), "wfbp", iterations=1)
    found = [(e.name, e.category, e.lane, e.start_s, e.duration_s) for e in run.timeline.events]
    assert sorted(found, key=lambda event: (event[2], event[3], event[4])) == [
        ("forward 0", "forward", "compute", 0.0, 2.0),
        ("backward 0", "backward", "compute", 2.0, 4.0),
        ("bucket 0", "ready", "compute", 3.0, 0.0),
        ("bucket 1", "ready", "compute", 6.0, 0.0),
        ("wait for the average", "wait", "compute", 6.0, 1.0),
        ("update 0", "update", "compute", 7.0, 1.0),
        ("bucket 0", "allreduce", "network", 3.0, 3.0),
        ("bucket 1", "allreduce", "network", 6.0, 1.0),
    ]
    assert run.timeline.title == "wfbp, 3 workers"


@given(forward_overlaps(), profiles(), comm_models(), st.data())
def test_every_worker_waits_at_its_gates(
    method: MergedGradient, profile: ModelProfile, comm: CommModel, data: st.DataObject
) -> None:
    """Against clocks that go on from moment to moment, one a worker."""
    speeds = tuple(data.draw(st.lists(st.sampled_from([0.5, 0.8, 1.0]), min_size=2, max_size=4)))
    if not profile.gradient_order():
        return
    work, sent = overlapped_messages(method, profile, comm)
    gates = sorted((each.needed_s, i) for i, each in enumerate(sent))
    clocks, done, link, ends = [0.0 for _ in speeds], [0.0 for _ in sent], 0.0, []
    for _ in range(6):
        for worker, speed in enumerate(speeds):
            at = 0.0  # of its own work
            for needed, i in gates:
                clocks[worker] = max(clocks[worker] + (needed - at) / speed, done[i])
                at = needed
            clocks[worker] += (work.forward_s - at) / speed
        for i, each in enumerate(sent):
            made = max(c + each.ready_s / s for c, s in zip(clocks, speeds, strict=True))
            link = done[i] = max(link, made) + each.seconds
        clocks = [c + work.backward_s / s for c, s in zip(clocks, speeds, strict=True)]
        ends.append(max(clocks))
    workers = len(speeds)
    run = simulate(profile, cluster(comm, workers, speeds=speeds), method, iterations=6)
    assert run.iteration_ends == pytest.approx(ends, rel=1e-9, abs=1e-12)
    alike = simulate(profile, cluster(comm, workers), method, iterations=6)
    assert (run.iteration_ends >= alike.iteration_ends * (1 - 1e-9) - 1e-12).all()


def test_the_timeline_is_bounded() -> None:
    layers = tuple(LayerProfile(f"l{i}", 4, 0.01) for i in range(400))
    model = ModelProfile(layers)
    run = simulate(model, cluster(NET), "wfbp", iterations=100, trace_workers=(0, 1))
    assert len(run.timeline.events) <= MAX_EVENTS
    assert run.timeline.title == "wfbp, 3 workers: the first 12 of 100 steps"
    forward = "merged-gradient:overlap=forward,plan=wfbp"
    many = simulate(model, cluster(NET), forward, iterations=100, trace_workers=(0, 1))
    assert len(many.timeline.events) <= MAX_EVENTS
    assert many.timeline.title.endswith("3 workers: the first 8 of 100 steps")
    with pytest.raises(ValueError, match=r"ask for fewer trace_workers"):
        simulate(model, cluster(NET, 64), "wfbp", trace_workers=range(64))
    assert not simulate(model, cluster(NET), "wfbp", trace_workers=()).timeline.events


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"iterations": 0}, r"iterations must be an int of at least 1, got 0"),
        ({"method": "magic"}, r"unknown method"),
        ({"trace_workers": (3,)}, r"ranks from 0 to 2, got 3"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"profile": MODEL, "cluster": cluster(NET), "method": PipeSGD()}
    with pytest.raises(ValueError, match=message):
        simulate(**{**good, **arguments})
