"""The validator: every schedule passes, and every schedule that was broken on purpose does not."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import schedule_rules as module
from hypothesis import given
from hypothesis import strategies as st
from schedule_rules import ScheduleError, validate

from hvd_pipe.planning.instructions import (
    AllReduce,
    Backward,
    Forward,
    Instruction,
    RecvActivation,
    RecvGradient,
    Schedule,
    SendActivation,
    SendGradient,
    Update,
    Worker,
)
from hvd_pipe.planning.schedule import METHODS, schedule, warm_up

Messages = SendActivation | SendGradient | RecvActivation | RecvGradient
Program = list[Instruction]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule of any method that is not too long."""
    method = draw(st.sampled_from(METHODS))
    k = draw(st.integers(0, 3))
    replicas = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda r: math.lcm(*r) <= 12)
    )
    if method in {"1f1b", "1f1b-vertical-sync"}:
        return schedule(method, replicas, draw(st.integers(1, 20)), 1, k)
    turn, least = math.lcm(*replicas), 1
    if method == "2bw":
        depth = max(width * (warm_up(s, replicas, k) + 1) for s, width in enumerate(replicas))
        least = -(-depth // turn)
    microbatches = turn * draw(st.integers(least, least + 2))
    return schedule(method, replicas, draw(st.integers(1, 4)), microbatches, k)


def edited(plan: Schedule, worker: Worker, edit: Callable[[Program], object]) -> Schedule:
    """The schedule with one worker's program changed in place."""
    program = list(plan.programs[worker])
    edit(program)
    return replace(plan, programs={**plan.programs, worker: tuple(program)})


def put(index: int, step: Instruction) -> Callable[[Program], None]:
    def edit(program: Program) -> None:
        program[index] = step

    return edit


def swap(i: int, j: int) -> Callable[[Program], None]:
    def edit(program: Program) -> None:
        program[i], program[j] = program[j], program[i]

    return edit


def test_doctests() -> None:
    result = doctest.testmod(module)
    assert result.failed == 0
    assert result.attempted > 0


@given(schedules())
def test_every_schedule_runs(plan: Schedule) -> None:
    report = validate(plan)
    for worker, most in report.in_flight.items():
        flushed = plan.method in {"gpipe", "1f1b-flush"}
        units = plan.microbatches * (1 if flushed else plan.minibatches)
        share = len(range(worker.replica, units, plan.replicas[worker.stage]))
        warm = warm_up(worker.stage, plan.replicas, plan.in_transit)
        assert most == (share if plan.method == "gpipe" else min(share, warm + 1))
    if plan.method in {"gpipe", "1f1b-flush"}:
        assert set(report.versions.values()) == {1}
        assert set(report.staleness) == {0}
    if plan.method == "2bw":
        assert max(report.versions.values()) <= 2
        assert set(report.staleness) == ({1} if plan.minibatches > 1 else {0})
    if plan.method == "gpipe":
        assert report.rendezvous_deadlock is None


def test_sends_that_wait_for_their_receive_stop_1f1b() -> None:
    # Stage 0 sends activation 1 while stage 1 sends gradient 0: each waits for the other.
    report = validate(schedule("1f1b", [1, 1], 4))
    assert report.rendezvous_deadlock == (
        "stage 0 replica 0 waits at 3 (SendActivation) for stage 1 replica 0\n"
        "stage 1 replica 0 waits at 3 (SendGradient) for stage 0 replica 0"
    )
    assert validate(schedule("1f1b", [1, 1], 1)).rendezvous_deadlock is None
    assert validate(schedule("1f1b", [3], 7)).rendezvous_deadlock is None


@given(schedules(), st.data())
def test_no_instruction_can_be_left_out_or_done_twice(plan: Schedule, data: st.DataObject) -> None:
    worker = data.draw(st.sampled_from([w for w, steps in plan.programs.items() if steps]))
    index = data.draw(st.integers(0, len(plan.programs[worker]) - 1))
    step = plan.programs[worker][index]
    with pytest.raises(ScheduleError):
        validate(edited(plan, worker, lambda program: program.pop(index)))
    for again in (index, len(plan.programs[worker])):
        with pytest.raises(ScheduleError):
            validate(edited(plan, worker, lambda p, at=again: p.insert(at, step)))  # type: ignore[misc]


@given(schedules(), st.data())
def test_nothing_in_an_instruction_can_be_changed(plan: Schedule, data: st.DataObject) -> None:
    worker = data.draw(st.sampled_from([w for w, steps in plan.programs.items() if steps]))
    index = data.draw(st.integers(0, len(plan.programs[worker]) - 1))
    step = plan.programs[worker][index]
    by = data.draw(st.sampled_from([-1, 1]))
    wrong: list[Instruction] = []
    if isinstance(step, Forward | Backward | AllReduce | Update):
        wrong.append(replace(step, version=step.version + by))
    if isinstance(step, AllReduce):
        wrong.append(replace(step, contributors=step.contributors + by))
    if isinstance(step, Forward | Backward | Messages):
        wrong.append(replace(step, minibatch=step.minibatch + by))
        wrong.append(replace(step, microbatch=step.microbatch + by))
    if isinstance(step, Messages):
        stage, replica = step.peer
        wrong.append(replace(step, peer=Worker(stage + by, replica)))
        wrong.append(replace(step, peer=Worker(stage, replica + by)))
    for other in wrong:
        with pytest.raises(ScheduleError) as error:
            validate(edited(plan, worker, put(index, other)))
        assert error.value.rule in {"route", "once", "order", "version", "update"}


STRAIGHT = schedule("1f1b", [1, 1, 1], 6)
# 0 RecvActivation 0, 1 Forward 0, 2 SendActivation 0, 3..5 the same of 1, 6 RecvGradient 0,
# 7 Backward 0, 8 SendGradient 0, 9 Update 1
MIDDLE = Worker(1, 0)
ROUND_ROBIN = schedule("1f1b", [2, 1], 5)
# 0 Forward 0, 1 SendActivation 0, 2..3 the same of 2, 4 RecvGradient 0, 5 Backward 0,
# 6 AllReduce 1, 7 Update 1
FIRST = Worker(0, 0)


@pytest.mark.parametrize(
    ("plan", "worker", "edit", "index", "rule", "words"),
    [
        (STRAIGHT, MIDDLE, lambda p: p.pop(0), 0, "order", "no RecvActivation before"),
        (STRAIGHT, MIDDLE, swap(7, 8), 7, "order", "no Backward before"),
        (STRAIGHT, MIDDLE, put(7, Backward(0, 0, 1)), 7, "version", "forward took version 0"),
        (STRAIGHT, MIDDLE, put(7, Update(1)), 7, "update", r"applies .*\[\], .*is \[0\]"),
        (
            STRAIGHT,
            MIDDLE,
            put(2, SendActivation(0, 0, Worker(2, 1))),
            2,
            "route",
            "u = 0 is with stage 2 replica 0",
        ),
        (STRAIGHT, MIDDLE, lambda p: p.append(p[0]), -1, "once", "done before"),
        (STRAIGHT, MIDDLE, lambda p: p.append(Update(7)), -1, "update", "but 6 updates"),
        (ROUND_ROBIN, FIRST, put(6, AllReduce(1, 1)), 6, "update", "2 replicas have a gradient"),
    ],
)
def test_breaks_are_named(
    plan: Schedule,
    worker: Worker,
    edit: Callable[[Program], object],
    index: int,
    rule: str,
    words: str,
) -> None:
    broken = edited(plan, worker, edit)
    with pytest.raises(ScheduleError, match=words) as error:
        validate(broken)
    assert error.value.worker == worker
    assert error.value.rule == rule
    assert str(error.value).startswith(f"{worker}, instruction {error.value.index} (")
    if index >= 0:
        assert error.value.index == index


def test_a_deadlock_is_played_out() -> None:
    # Stage 0 sends activation 1 after it has gradient 0. Stage 1 sends gradient 0 after it has
    # activation 1. Both receive first.
    plan = schedule("1f1b-flush", [1, 1], 1, 2)
    first, last = Worker(0, 0), Worker(1, 0)
    one = tuple(plan.programs[first][at] for at in (0, 1, 4, 5, 2, 3, 6, 7, 8))
    two = tuple(plan.programs[last][at] for at in (0, 1, 4, 2, 3, 5, 6, 7, 8))
    with pytest.raises(ScheduleError) as error:
        validate(replace(plan, programs={first: one, last: two}))
    assert error.value.rule == "deadlock"
    assert str(error.value).splitlines()[1:] == [
        "stage 0 replica 0 waits at 2 (RecvGradient) for stage 1 replica 0",
        "stage 1 replica 0 waits at 2 (RecvActivation) for stage 0 replica 0",
    ]
