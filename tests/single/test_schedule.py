"""Schedules: the published tables, counts that do not divide, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_pipe.planning import schedule
from hvd_pipe.planning.schedule import (
    METHODS,
    AllReduce,
    Backward,
    Forward,
    Instruction,
    Recv,
    RecvActivation,
    RecvGradient,
    Schedule,
    Send,
    SendActivation,
    SendGradient,
    Update,
    Worker,
    program,
    warm_up,
)
from hvd_pipe.planning.simulate_pipeline import StageCost, simulate_pipeline

make = schedule.schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule of any method that is not too long."""
    method = draw(st.sampled_from(METHODS))
    k = draw(st.integers(0, 3))
    replicas = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda r: math.lcm(*r) <= 12)
    )
    if method in {"1f1b", "1f1b-vertical-sync"}:
        return make(method, replicas, draw(st.integers(1, 20)), 1, k)
    turn = math.lcm(*replicas)
    least = 1
    if method == "2bw":
        depth = max(width * (warm_up(s, replicas, k) + 1) for s, width in enumerate(replicas))
        least = -(-depth // turn)
    microbatches = turn * draw(st.integers(least, least + 2))
    return make(method, replicas, draw(st.integers(1, 4)), microbatches, k)


@pytest.mark.parametrize(
    ("replicas", "k", "warm"),
    [
        ([4], 0, [0]),
        ([1] * 4, 0, [3, 2, 1, 0]),
        ([15, 1], 0, [1, 0]),
        ([8, 4, 4], 0, [1, 1, 0]),
        ([1], 3, [0]),
        ([1] * 4, 1, [6, 4, 2, 0]),
        ([15, 1], 1, [1, 0]),
        ([2, 1], 2, [2, 0]),
        ([8, 4, 4], 3, [2, 2, 0]),
    ],
)
def test_each_boundary_adds_what_is_in_transit(
    replicas: list[int], k: int, warm: list[int]
) -> None:
    """Replicas share it: floor((N_s - 1 + k stages behind) / R_s), as PipeDream's runtime."""
    assert [warm_up(stage, replicas, k) for stage in range(len(replicas))] == warm
    if k == 0:
        assert warm[0] + 1 == math.ceil(sum(replicas) / replicas[0])  # NOAM


NEEDS: dict[type[Instruction], tuple[type[Instruction], ...]] = {
    Forward: (RecvActivation,),
    SendActivation: (Forward,),
    RecvGradient: (SendActivation,),
    Backward: (Forward, RecvGradient),
    SendGradient: (Backward,),
    RecvActivation: (),
}
"""What a worker has done with a microbatch before, where it has such instructions at all."""


def version_of(plan: Schedule, stage: int, unit: int) -> int:
    """The version that a method's equation names, 0 for what is negative."""
    replicas, k = plan.replicas, plan.in_transit
    if plan.method == "1f1b":
        return max(0, unit // replicas[stage] - warm_up(stage, replicas, k))
    if plan.method == "1f1b-vertical-sync":
        seen = max(0, unit // replicas[0] - warm_up(0, replicas, k)) * replicas[0]
        return seen // replicas[stage]
    return max(0, unit // plan.microbatches - (plan.method == "2bw"))


@given(schedules())
def test_each_program_does_everything_once_and_in_order(plan: Schedule) -> None:
    """With the weights of its equation, with the right peers, averaged round by round."""
    m, last = plan.microbatches, len(plan.replicas) - 1
    total = plan.minibatches * m
    for (stage, replica), steps in plan.programs.items():
        width = plan.replicas[stage]
        units = range(replica, total, width)
        kinds = {Forward, Backward}
        kinds |= {RecvActivation, SendGradient} if stage else set()
        kinds |= {SendActivation, RecvGradient} if stage < last else set()
        a_round = width if plan.method in METHODS[:2] else m
        done: set[tuple[type[Instruction], int]] = set()
        newest, gradients, averaged, in_flight, most = 0, set[int](), False, 0, 0
        bound = (
            m // width
            if plan.method == "gpipe"
            else 1 + warm_up(stage, plan.replicas, plan.in_transit)
        )
        for step in steps:
            if isinstance(step, AllReduce | Update):
                contents = range(newest * a_round, min((newest + 1) * a_round, total))
                assert gradients == set(contents) & set(units)
                assert step.version == newest + 1
                if isinstance(step, AllReduce):
                    assert step.contributors == min(width, len(contents))
                    assert width > 1
                    assert not averaged
                    averaged = True
                else:
                    assert averaged == (width > 1)
                    newest, gradients, averaged = newest + 1, set(), False
                continue
            unit = step.minibatch * m + step.microbatch
            assert unit in units
            assert type(step) in kinds
            assert (type(step), unit) not in done
            assert all((kind, unit) in done for kind in NEEDS[type(step)] if kind in kinds)
            done.add((type(step), unit))
            if isinstance(step, Forward | Backward):
                in_flight += 1 if isinstance(step, Forward) else -1
                assert in_flight <= bound
                most = max(most, in_flight)
                assert step.version == version_of(plan, stage, unit) <= newest
                if plan.method == "1f1b" and isinstance(step, Forward):
                    assert step.version == newest
                if isinstance(step, Backward):
                    gradients.add(unit)
            else:
                other = stage + (1 if isinstance(step, SendActivation | RecvGradient) else -1)
                assert step.peer == Worker(other, unit % plan.replicas[other])
        assert done == {(kind, unit) for kind in kinds for unit in units}
        assert newest == -(-total // a_round)
        until_flush = m if plan.method in {"gpipe", "1f1b-flush"} else total
        assert most == min(len(range(replica, until_flush, width)), bound)


@given(schedules())
def test_programs_run_together(plan: Schedule) -> None:
    """Messages arrive in the order in which they are asked for, and nobody waits for ever."""
    mail: dict[tuple[Worker, Worker, str], list[tuple[int, int]]] = {}
    for sends in (True, False):
        for worker, steps in plan.programs.items():
            for step in steps:
                if not isinstance(step, (Send if sends else Recv)):
                    continue
                what = type(step).__name__[4:]
                ends = (worker, step.peer) if sends else (step.peer, worker)
                named = (step.minibatch, step.microbatch)
                if sends:
                    mail.setdefault((*ends, what), []).append(named)
                else:
                    assert mail[(*ends, what)].pop(0) == named
    assert not any(mail.values())
    simulate_pipeline(
        plan, [StageCost(1.0, 2.0, 0.5, 10.0, 1.0)] * len(plan.replicas), latency=0.1
    )


def test_instructions_are_made_as_they_are_asked_for() -> None:
    for method in METHODS:
        microbatches = 1 if method in METHODS[:2] else 4
        steps = program(method, [2, 1], Worker(0, 1), 10**12, microbatches)
        assert len(list(islice(steps, 50))) == 50


Call = Callable[[], object]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: make("pipedream", [1], 1), ValueError, "method must be one of 1f1b, .*pipedream"),
        (lambda: make("1f1b", [], 1), ValueError, "got none"),
        (lambda: make("1f1b", [1, 0], 1), ValueError, "stage 1 must be at least 1, got 0"),
        (lambda: make("1f1b", [1.5], 1), TypeError, "must be an integer, got 1.5"),  # type: ignore[list-item]
        (lambda: make("1f1b", [1], 0), ValueError, "minibatches must be at least 1, got 0"),
        (lambda: make("1f1b", [1], True), TypeError, "minibatches must be an integer"),
        (lambda: make("1f1b", [1], 4, 2), ValueError, "no microbatches, got 2; 2bw"),
        (lambda: make("gpipe", [2, 3], 1, 7), ValueError, "multiple of 6.* got 7; try 6 or 12"),
        (lambda: make("gpipe", [2, 3], 1, 5), ValueError, "try 6$"),
        (lambda: make("2bw", [1, 1, 1], 1, 2), ValueError, "at least 3 .*got 2; 3 would do"),
        (lambda: make("2bw", [2, 1], 1, 2), ValueError, "at least 4 .*got 2; 4 would do"),
        (
            lambda: program("1f1b", [1], Worker(2, 0), 1),
            ValueError,
            "stage must be in 0..0, got 2",
        ),
        (lambda: program("1f1b", [2], Worker(0, 2), 1), ValueError, "must be in 0..1, got 2"),
    ],
)
def test_refuses(call: Call, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
