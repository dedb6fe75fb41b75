"""Simulated pipelines: against closed forms, and against longest paths found without a clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_pipe.planning import simulate_pipeline
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.schedule import (
    METHODS,
    Backward,
    Forward,
    Schedule,
    Update,
    Worker,
    schedule,
)
from hvd_pipe.planning.simulate_pipeline import (
    StageCost,
    simulate_partition,
)
from hvd_pipe.planning.stages import Partition, Stage

simulate = simulate_pipeline.simulate_pipeline

seconds = st.floats(0.01, 3.0)
costs = st.builds(StageCost, seconds, seconds, st.floats(0.0, 0.5))


def exact(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-9, abs=1e-9)


def longest_path(plan: Schedule, stages: list[StageCost]) -> dict[tuple[Worker, int], float]:
    """When each computation ends if messages and all-reduces are free, from what it depends on."""
    where: dict[tuple[object, ...], tuple[Worker, int]] = {}
    for worker, program in plan.programs.items():
        for index, step in enumerate(program):
            if isinstance(step, Forward | Backward):
                key = (type(step), worker.stage, step.minibatch, step.microbatch)
                where[key] = (worker, index)
            elif isinstance(step, Update):
                where[Update, worker, step.version, 0] = (worker, index)
    ends: dict[tuple[Worker, int], float] = {}

    def end(worker: Worker, index: int) -> float:
        if index < 0:
            return 0.0
        if (worker, index) in ends:
            return ends[worker, index]
        step, cost = plan.programs[worker][index], stages[worker.stage]
        start, took = end(worker, index - 1), 0.0
        if isinstance(step, Forward):
            took = cost.forward_s
            if worker.stage > 0:
                before = where[Forward, worker.stage - 1, step.minibatch, step.microbatch]
                start = max(start, end(*before))
        elif isinstance(step, Backward):
            took = cost.backward_s
            if worker.stage < len(stages) - 1:
                after = where[Backward, worker.stage + 1, step.minibatch, step.microbatch]
                start = max(start, end(*after))
        elif isinstance(step, Update):
            took = cost.update_s
            for replica in range(plan.replicas[worker.stage]):
                other, at = where[Update, Worker(worker.stage, replica), step.version, 0]
                while not isinstance(plan.programs[other][at], Backward) and at > 0:
                    at -= 1  # to its backward pass, or to what it did before where it has none
                start = max(start, end(other, at))
        ends[worker, index] = start + took
        return start + took

    for worker, program in plan.programs.items():
        for index in range(len(program)):
            end(worker, index)
    return ends


@given(
    st.sampled_from(METHODS),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(1, 12),
    st.data(),
)
def test_every_computation_ends_when_its_longest_path_does(
    method: str, replicas: list[int], minibatches: int, data: st.DataObject
) -> None:
    stages = data.draw(st.lists(costs, min_size=len(replicas), max_size=len(replicas)))
    one = method in {"1f1b", "1f1b-vertical-sync"}
    turn = math.lcm(*replicas)
    microbatches = 1 if one else turn * -(-2 * sum(replicas) // turn)
    plan = schedule(method, replicas, minibatches if one else min(minibatches, 3), microbatches)
    run = simulate(plan, stages)
    ends = longest_path(plan, stages)
    assert run.total_s == exact(max(ends.values()))
    for rank, (worker, program) in enumerate(plan.programs.items()):
        computed = [
            ends[worker, index]
            for index, step in enumerate(program)
            if isinstance(step, Forward | Backward)
        ]
        simulated = [
            event.end_s
            for event in run.timeline.events
            if event.worker == rank and event.category in {"forward", "backward"}
        ]
        assert simulated == exact(computed)


@pytest.mark.parametrize("method", ["gpipe", "1f1b-flush"])
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 9])
def test_flushed_pipelines_of_equal_stages(method: str, stages: int, microbatches: int) -> None:
    plan = schedule(method, [1] * stages, 3, microbatches)
    slots = microbatches + stages - 1
    run = simulate(plan, [StageCost(0.3, 0.7)] * stages)
    assert run.total_s == exact(3 * slots)
    assert run.period_s == exact(slots)
    assert list(run.utilisation.values()) == exact([microbatches / slots] * stages)
    run = simulate(plan, [StageCost(0.3, 0.7, 0.25)] * stages)
    assert run.period_s == exact(slots + 0.25)
    run = simulate(plan, [StageCost(0.3, 0.7)] * stages, recompute=True)
    assert run.total_s == exact(3 * slots * 1.3)


def slowest(stages: Sequence[StageCost], replicas: Sequence[int]) -> tuple[float, bool]:
    """Seconds a minibatch of the slowest stage, and whether it soon sets the pace.

    A stage that is nearly as slow sets it until the queue in front of the slowest one is full.
    """
    *others, pace = sorted(
        (cost.forward_s + cost.backward_s + cost.update_s) / width
        for cost, width in zip(stages, replicas, strict=True)
    )
    return pace, not others or others[-1] < 0.9 * pace or others[-1] == pace


SHAPES = [[1], [1, 1, 1], [1] * 5, [2], [3, 3], [2, 2, 2], [2, 1], [4, 2], [15, 1]]


@given(st.sampled_from(SHAPES), st.data())
def test_the_slowest_stage_sets_the_pace_of_1f1b(replicas: list[int], data: st.DataObject) -> None:
    """Replicas share the minibatches of their stage."""
    stages = data.draw(st.lists(costs, min_size=len(replicas), max_size=len(replicas)))
    run = simulate(schedule("1f1b", replicas, 160), stages)
    pace, settled = slowest(stages, replicas)
    assert run.period_s <= pace * (1 + 1e-9)
    if settled:
        assert run.period_s == exact(pace)


@pytest.mark.parametrize(("allreduce_s", "step_s"), [(0.0, 3.5), (1.5, 3.5), (2.75, 4.25)])
def test_an_all_reduce_hides_behind_its_backward_pass(allreduce_s: float, step_s: float) -> None:
    # forward 1, backward 2 or the all-reduce if longer, update 0.5
    cost = StageCost(1.0, 2.0, 0.5, allreduce_s=allreduce_s)
    run = simulate(schedule("1f1b", [4], 40), [cost])
    assert run.total_s == exact(10 * step_s)
    assert run.period_s == exact(step_s / 4)
    # Three minibatches of the last round: the fourth replica brings zeros, and is as late.
    run = simulate(schedule("1f1b", [4], 39), [cost])
    assert run.total_s == exact(10 * step_s)
    assert run.utilisation[Worker(0, 3)] == pytest.approx((10 * 3.5 - 3.0) / (10 * step_s))


@pytest.mark.parametrize("method", METHODS)
def test_a_lane_does_one_thing_at_a_time(method: str) -> None:
    plan = schedule(method, [2, 3, 1], 12, 1 if method in METHODS[:2] else 12)
    stages = [
        StageCost(1.0, 2.0, 0.1, activation_bytes=100, allreduce_s=1.0),
        StageCost(1.5, 2.5, 0.1, activation_bytes=300, allreduce_s=3.0),
        StageCost(0.5, 0.9, 0.1),
    ]
    run = simulate(plan, stages, bandwidth=1e3, latency=0.01, jitter=0.3, seed=5)
    timeline = run.timeline
    for rank, worker in enumerate(plan.programs):
        for lane in timeline.lanes(rank):
            events = [e for e in timeline.events if e.worker == rank and e.lane == lane]
            events.sort(key=lambda event: event.start_s)
            for one, next_one in pairwise(events):
                assert one.end_s <= next_one.start_s + 1e-9
        busy = timeline.busy_s(rank, "compute")
        assert run.utilisation[worker] == pytest.approx(busy / run.total_s)
    sent = [event for event in timeline.events if event.category == "send"]
    assert len(sent) == 2 * (len(plan.replicas) - 1) * plan.minibatches * plan.microbatches
    assert len(sent) == sum(event.category == "recv" for event in timeline.events)


def test_jitter_has_a_seed_and_a_mean_of_one() -> None:
    plan, cost = schedule("1f1b", [1], 2000), StageCost(1.0, 2.0)
    one = simulate(plan, [cost], jitter=0.5, seed=1)
    assert one == simulate(plan, [cost], jitter=0.5, seed=1)
    assert one.total_s != simulate(plan, [cost], jitter=0.5, seed=2).total_s
    durations = np.array([e.duration_s for e in one.timeline.events if e.category == "forward"])
    assert durations.mean() == pytest.approx(1.0, abs=0.05)
    assert durations.std() == pytest.approx(0.5, abs=0.05)
    # Stragglers cost more than their mean where workers wait for each other.
    calm = simulate(schedule("1f1b", [1] * 4, 200), [cost] * 4)
    rough = simulate(schedule("1f1b", [1] * 4, 200), [cost] * 4, jitter=0.5)
    assert rough.period_s > 1.05 * calm.period_s


MODEL = ModelProfile(
    tuple(
        LayerProfile(f"layer{i}", 1000 * (i + 1), 0.02, 0.01, activation_bytes=4000 - 500 * i)
        for i in range(6)
    ),
    update_s=0.0,
)


def hand_made(*parts: tuple[tuple[int, ...], int]) -> Partition:
    """Stages of these layers of the model, on so many workers each."""
    stages = tuple(
        Stage(
            tuple(f"layer{i}" for i in layers),
            replicas,
            0.03 * len(layers),
            sum(1000 * (i + 1) for i in layers),
            0,
            0 if layers[-1] == 5 else 4000 - 500 * layers[-1],
            0,
            0.0,
        )
        for layers, replicas in parts
    )
    workers = sum(replicas for _, replicas in parts)
    return Partition(stages, workers, 0.0, 0.0, 0.0, "paper", (1,) * len(parts))


def test_costs_of_a_partition() -> None:
    # Five layers, 15 kB, on three workers, which fill two machines of two in part; then one layer.
    plan = hand_made(((0, 1, 2, 3, 4), 3), ((5,), 1))
    network = Network(Link(0.0, 1e-5), per_node=2, inside=Link(0.0, 1e-6))
    cluster = Cluster(4, network)
    run = simulate_partition(plan, MODEL, cluster, minibatches=96)
    spans: dict[str, float] = {}
    for event in run.timeline.events:
        spans.setdefault(event.name.split()[0], event.duration_s)
    assert spans["forward"] == pytest.approx(0.05)
    assert spans["backward"] == pytest.approx(0.02)  # the last stage's comes first
    assert spans["activation"] == pytest.approx(0.02)
    assert spans["all-reduce"] == pytest.approx(float(network.comm(4)(15_000)))
    slower = simulate_partition(
        plan, MODEL, Cluster(4, network, speeds=(1.0, 1.0, 0.25, 1.0)), minibatches=96
    )
    assert slower.period_s > 1.5 * run.period_s
    rough = simulate_partition(plan, MODEL, Cluster(4, network, jitter=0.3), minibatches=96)
    assert rough.total_s != pytest.approx(run.total_s)


def test_each_pair_of_workers_has_its_own_link() -> None:
    # Ranks 0 and 1 are on one machine, and 2 and 3 on the other: the 2nd of 3 messages is slow.
    plan = hand_made(((0,), 1), ((1,), 1), ((2, 3, 4), 1), ((5,), 1))
    network = Network(Link(0.5, 1e-5), per_node=2, inside=Link(0.001, 1e-6))
    run = simulate_partition(plan, MODEL, Cluster(4, network), minibatches=8)
    took: dict[tuple[int, str], set[float]] = {}
    for event in run.timeline.events:
        if event.category == "send":
            kind = event.name.split()[0]
            took.setdefault((event.worker, kind), set()).add(round(event.duration_s, 9))
    assert took == {
        (0, "activation"): {0.005},
        (1, "activation"): {0.535},
        (2, "activation"): {0.003},
        (1, "gradient"): {0.005},
        (2, "gradient"): {0.535},
        (3, "gradient"): {0.003},
    }


@pytest.mark.parametrize(("first", "workers"), [(0, 2), (1, 4), (2, 2)])
def test_replicas_on_two_machines_average_between_them(first: int, workers: int) -> None:
    parts = [((layer,), 1) for layer in range(first)]
    plan = hand_made(*parts, ((first,), 2), (tuple(range(first + 1, 6)), 1))
    network = Network(Link(0.0, 1e-5), per_node=2, inside=Link(0.0, 1e-6))
    run = simulate_partition(plan, MODEL, Cluster(6, network), minibatches=12)
    [took] = {e.duration_s for e in run.timeline.events if e.category == "allreduce"}
    assert took == float(network.comm(workers)(1000 * (first + 1)))


Call = Callable[[], object]
PLAN = schedule("1f1b", [1, 1], 3)
COST = StageCost(1.0, 2.0)
TWO = Cluster(2, Network(Link(0.0, 0.0)))
OTHER = ModelProfile((LayerProfile("other", 4, 1.0),))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: StageCost(-1.0, 1.0), "forward_s must be finite and at least 0, got -1.0"),
        (lambda: StageCost(1.0, math.nan), "backward_s must be finite"),
        (lambda: simulate(PLAN, [COST]), "the schedule has 2, got 1"),
        (lambda: simulate(PLAN, [COST] * 2, bandwidth=0.0), "bandwidth must be above 0"),
        (lambda: simulate(PLAN, [COST] * 2, latency=-1.0), "latency must be finite"),
        (lambda: simulate(PLAN, [COST] * 2, per_node=0), "per_node must be at least 1, got 0"),
        (lambda: simulate(PLAN, [COST] * 2, jitter=math.inf), "jitter must be finite"),
        (lambda: simulate(PLAN, [COST] * 2, speeds=[1.0]), "speeds must be 2 positive numbers"),
        (lambda: simulate(PLAN, [COST] * 2, speeds=[1.0, 0.0]), "speeds must be 2 positive"),
        (lambda: simulate_partition(hand_made(((5,), 4)), MODEL, TWO), "but the cluster has 2"),
        (lambda: simulate_partition(hand_made(((0,), 1)), OTHER, TWO), "has no layers"),
    ],
)
def test_refuses(call: Call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_a_schedule_that_does_not_run_is_refused() -> None:
    first = Worker(0, 0)
    programs = {**PLAN.programs, first: PLAN.programs[first][:1]}
    plan = Schedule(PLAN.method, PLAN.replicas, PLAN.minibatches, PLAN.microbatches, programs)
    with pytest.raises(ValueError, match="stage 1 replica 0 waits for ever at instruction 0"):
        simulate(plan, [COST] * 2)
