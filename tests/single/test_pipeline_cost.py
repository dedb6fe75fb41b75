"""Memory, period and traffic of a pipeline: against its instructions counted one by one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_pipe.planning import pipeline_plans as module
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.partition import partition
from hvd_pipe.planning.pipeline_plans import fewest_microbatches, held, pipeline_cost
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.schedule import (
    MODES,
    AllReduce,
    Backward,
    Forward,
    Instruction,
    SendActivation,
    SendGradient,
    Update,
    schedule,
)

DATA = Path(__file__).parent.parent / "data"
MODE_NAMES = tuple(MODES)
PLANS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def model(stages: int, **kwargs: float) -> ModelProfile:
    """Layers unlike each other, as many as there are stages."""
    layers = tuple(
        LayerProfile(f"l{at}", 1000 * (at + 1), 0.5 + at, 0.25, 64 * (stages - at))
        for at in range(stages)
    )
    return ModelProfile(layers, **kwargs)  # type: ignore[arg-type]


def even(stages: int) -> ModelProfile:
    return ModelProfile(tuple(LayerProfile(f"l{at}", 0, 2.0, 1.0) for at in range(stages)))


def cluster(workers: int, bandwidth: float = 1e9) -> Cluster:
    return Cluster(workers, Network(Link.of(bandwidth, latency=0.0)))


def counted(steps: tuple[Instruction, ...]) -> tuple[int, int]:
    """Versions and microbatches at most, by looking ahead anew at each instruction."""
    versions = units = 0
    newest = 0
    for at, step in enumerate(steps):
        if isinstance(step, Update):
            newest = step.version
        rest = (x for x in steps[at + 1 :] if isinstance(x, Forward | Backward))
        needed = {x.version for x in rest if x.version <= newest} | {newest}
        versions = max(versions, len(needed))
        done = steps[: at + 1]
        forward = sum(isinstance(x, Forward) for x in done)
        units = max(units, forward - sum(isinstance(x, Backward) for x in done))
    return versions, units


@given(st.sampled_from(MODE_NAMES), PLANS, st.integers(0, 2))
def test_what_a_worker_holds(mode: str, replicas: list[int], more: int) -> None:
    fewest = fewest_microbatches(mode, replicas)
    microbatches = fewest + more * math.lcm(*replicas) if MODES[mode].coalesces else 1
    plan = schedule(MODES[mode].method, replicas, 6, microbatches)
    for steps in plan.programs.values():
        found = held(steps)
        assert (found.versions, found.in_flight) == counted(steps)


@given(st.sampled_from(MODE_NAMES), PLANS)
def test_a_longer_run_holds_no_more(mode: str, replicas: list[int]) -> None:
    profile, workers = model(len(replicas)), sum(replicas)
    plan = partition(profile, [(workers, 1e9)], replicas=replicas)
    cost = pipeline_cost(plan, profile, cluster(workers), mode=mode)
    if MODES[mode].coalesces:
        longer = schedule(MODES[mode].method, replicas, 16, cost.microbatches)
    else:
        longer = schedule(MODES[mode].method, replicas, 12 * math.lcm(*replicas) * workers)
    assert cost.held == module.held_by_stage(longer)


@pytest.mark.parametrize(
    ("mode", "versions", "in_flight", "staleness"),
    [  # four stages of one worker
        ("stash", (4, 3, 2, 1), (4, 3, 2, 1), (3, 2, 1, 0)),
        ("vertical-sync", (4, 4, 4, 4), (4, 3, 2, 1), (3, 3, 3, 3)),
        ("2bw", (2, 2, 2, 2), (4, 3, 2, 1), (1, 1, 1, 1)),
        ("flush", (1, 1, 1, 1), (4, 3, 2, 1), (0, 0, 0, 0)),
        ("gpipe", (1, 1, 1, 1), (8, 8, 8, 8), (0, 0, 0, 0)),
    ],
)
def test_the_modes_of_four_stages(
    mode: str, versions: tuple[int, ...], in_flight: tuple[int, ...], staleness: tuple[int, ...]
) -> None:
    profile = model(4)
    plan = partition(profile, [(4, 1e9)], replicas=(1, 1, 1, 1))
    m = 8 if MODES[mode].coalesces else 1
    cost = pipeline_cost(plan, profile, cluster(4), mode=mode, microbatches=m)
    assert tuple(one.versions for one in cost.held) == versions
    assert tuple(one.in_flight for one in cost.held) == in_flight
    assert tuple(one.staleness for one in cost.held) == staleness
    for stage, memory, v, k in zip(
        plan.stages, cost.memory_bytes, versions, in_flight, strict=True
    ):
        [layer] = (layer for layer in profile.layers if layer.name == stage.layers[0])
        kept = layer.activation_bytes + stage.activation_in_bytes
        assert memory == math.ceil(stage.parameter_bytes * (v + 2) + kept * k / m)


@given(PLANS)
def test_stash_needs_what_the_partition_says(replicas: list[int]) -> None:
    profile, workers = model(len(replicas)), sum(replicas)
    plan = partition(profile, [(workers, 1e9)], replicas=replicas)
    cost = pipeline_cost(plan, profile, cluster(workers))
    assert cost.memory_bytes == tuple(stage.memory_bytes for stage in plan.stages)
    assert tuple(one.in_flight for one in cost.held) == plan.in_flight
    assert tuple(one.staleness + 1 for one in cost.held) == plan.in_flight


@given(st.sampled_from(MODE_NAMES), PLANS)
def test_bytes_are_those_of_the_messages(mode: str, replicas: list[int]) -> None:
    profile, workers = model(len(replicas)), sum(replicas)
    plan = partition(profile, [(workers, 1e9)], replicas=replicas)
    cost = pipeline_cost(plan, profile, cluster(workers), mode=mode)
    minibatches = 4 * math.lcm(*replicas)
    run = schedule(MODES[mode].method, replicas, minibatches, cost.microbatches)
    for worker, steps in run.programs.items():
        stage = plan.stages[worker.stage]
        sent = 0.0
        for step in steps:
            if isinstance(step, SendActivation):
                sent += stage.activation_out_bytes / cost.microbatches
            elif isinstance(step, SendGradient):
                sent += stage.activation_in_bytes / cost.microbatches
            elif isinstance(step, AllReduce):
                sent += 2 * (stage.replicas - 1) / stage.replicas * stage.parameter_bytes
        assert sent / minibatches == pytest.approx(cost.sent_bytes[worker.stage], rel=1e-12)
    total = math.fsum(r * x for r, x in zip(cost.replicas, cost.sent_bytes, strict=True))
    assert cost.wire_bytes == pytest.approx(total)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("mode", MODE_NAMES)
def test_the_period_of_equal_stages(mode: str, stages: int) -> None:
    """Free messages: 3 s a stage; a flush waits for n - 1 more microbatches."""
    profile = even(stages)
    plan = partition(profile, [(stages, 1e9)], straight=True)
    m = 8 if MODES[mode].coalesces else 1
    cost = pipeline_cost(plan, profile, cluster(stages), mode=mode, microbatches=m)
    units = m + stages - 1 if MODES[mode].synchronous else m
    assert cost.period_s == pytest.approx(units * 3.0 / m)
    assert cost.utilisation == pytest.approx(m / units)


def test_what_is_kept_is_what_the_profile_says() -> None:
    """``saved_bytes`` are what a pass keeps; outputs are still what is sent."""
    layers = tuple(LayerProfile(f"l{at}", 8, 1.0, 1.0, 64, saved_bytes=1000) for at in range(2))
    profile = ModelProfile(layers)
    plan = partition(profile, [(2, 1e9)], straight=True)
    cost = pipeline_cost(plan, profile, cluster(2))
    assert cost.activation_bytes == (2 * 1000, 1000 + 64)
    assert cost.memory_bytes == tuple(stage.memory_bytes for stage in plan.stages)
    assert cost.sent_bytes == (64, 64)
    more, larger = module.coalesced(profile, plan, 3)
    thrice = pipeline_cost(larger, more, cluster(2), mode="flush", microbatches=3)
    assert thrice.activation_bytes == (2 * 1000, 1000 + 64)


def test_recompute_keeps_inputs_alone() -> None:
    profile = model(3)
    plan = partition(profile, [(3, 1e9)], straight=True)
    plain, again = (
        pipeline_cost(plan, profile, cluster(3), recompute=recompute)
        for recompute in (False, True)
    )
    outputs = [layer.activation_bytes for layer in profile.layers]
    kept = [one.in_flight for one in plain.held]
    assert [a - b for a, b in zip(plain.memory_bytes, again.memory_bytes, strict=True)] == [
        size * (k - 1) for size, k in zip(outputs, kept, strict=True)
    ]
    assert again.period_s > plain.period_s


def test_updates_of_replicas_are_not_shared() -> None:
    """Each of two replicas makes every update: one a round of two minibatches, or one each."""
    profile = ModelProfile((LayerProfile("l", 8, 1.0, 1.0),), update_s=0.5)
    plan = partition(profile, [(2, 1e9)], replicas=(2,))
    wide = cluster(2, 1e15)
    assert pipeline_cost(plan, profile, wide).compute_s == 1.25
    assert pipeline_cost(plan, profile, wide).period_s == pytest.approx(1.25)
    flush = pipeline_cost(plan, profile, wide, mode="flush", microbatches=4)
    assert flush.compute_s == 1.5
    assert flush.period_s == pytest.approx(1.5)


def test_vgg_sends_a_tenth() -> None:
    """The papers' 85 to 95% less than data parallelism."""
    profile = ModelProfile.read(DATA / "vgg16.graph.txt")
    plan = partition(profile, [(16, 1.25e9)])
    cost = pipeline_cost(plan, profile, cluster(16, 1.25e9))
    assert plan.config == "15-1"
    assert 0.85 < cost.saved() < 0.95


def test_arguments_that_cannot_be() -> None:
    profile = model(2)
    plan = partition(profile, [(2, 1e9)], straight=True)
    for kwargs, message in (
        ({"mode": "stashed"}, "mode must be one of"),
        ({"mode": "2bw", "microbatches": 1}, "must be at least 2"),
        ({"mode": "stash", "microbatches": 2}, "has no microbatches"),
        ({"optimizer_bytes_per_parameter_byte": -1.0}, "at least 0"),
        ({"optimizer_bytes_per_parameter_byte": math.nan}, "finite"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline_cost(plan, profile, cluster(2), **kwargs)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the cluster has 1"):
        pipeline_cost(plan, profile, cluster(1))
    with pytest.raises(ValueError, match="of another model"):
        pipeline_cost(plan, even(1), cluster(2))
