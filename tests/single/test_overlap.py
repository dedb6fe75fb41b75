"""Plans whose messages travel behind the next forward pass, against a simulation of events."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_pipe.planning import overlap
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.overlap import (
    Pass,
    deferring_plan,
    first_deferred,
    in_order,
    overlapped_s,
    plan_overlap,
    send_order,
)
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.tuner import Gradients, Trial

WORST = 1.6  # a planned order's step over that of the best of all orders, in random cases

Times = tuple[float, float, float]
"""When a message is ready, when it is needed, and how long the link is busy with it."""

times = st.integers(0, 8).map(float)
messages = st.lists(st.tuples(times, times, times), min_size=1, max_size=5)


def by_events(each: Sequence[Times]) -> list[int]:
    """The rule, written as a link that looks into a heap whenever it is free."""
    coming = sorted(range(len(each)), key=lambda i: each[i][0])
    heap: list[tuple[float, int]] = []
    now, sent = 0.0, []
    while coming or heap:
        while coming and each[coming[0]][0] <= now:
            first = coming.pop(0)
            heapq.heappush(heap, (each[first][1], first))
        if heap:
            _, first = heapq.heappop(heap)
            sent.append(first)
            now += each[first][2]
        else:
            now = each[coming[0]][0]
    return sent


def step_by_events(work: Pass, sent: Sequence[Any], steps: int = 60) -> float:
    """A step's seconds once it has settled: worker and link as two clocks that wait for another.

    The worker goes through its forward pass gate by gate, in the order of need.
    """
    worker = link = 0.0
    done: dict[int, float] = {}
    ends = [worker]
    for _ in range(steps):
        at = 0.0  # of its own work in this forward pass
        for i in sorted(done, key=lambda i: sent[i].needed_s):
            worker += sent[i].needed_s - at
            at = sent[i].needed_s
            worker = max(worker, done[i])
        worker += work.forward_s - at
        for i, message in enumerate(sent):
            start = max(link, worker + message.ready_s)
            link = done[i] = start + message.seconds
        worker += work.backward_s
        ends.append(worker)
    return (ends[-1] - ends[-11]) / 10


def made(each: Sequence[Times], order: Sequence[int]) -> tuple[Pass, list[Any]]:
    """A worker whose passes are as long as its messages say, and the messages in an order."""
    ready, needed, seconds = (np.array(column) for column in zip(*each, strict=True))
    work = Pass(ready, needed, seconds, float(needed.max()) + 1.0, float(ready.max()) + 1.0)
    sent = [overlap.TimedMessage(i, *each[i], bytes=0.0) for i in order]
    return work, sent


@given(messages)
def test_the_order_is_that_of_a_link_that_takes_what_is_needed_first(each: list[Times]) -> None:
    order = send_order(*zip(*each, strict=True))
    assert order == by_events(each)
    assert sorted(order) == list(range(len(each)))


@given(messages)
def test_a_step_is_that_of_a_simulation_of_events(each: list[Times]) -> None:
    work, sent = made(each, send_order(*zip(*each, strict=True)))
    assert overlapped_s(work, sent) == pytest.approx(step_by_events(work, sent))


@given(messages)
def test_no_order_is_below_the_lower_bound_and_the_planned_one_is_near_the_best(
    each: list[Times],
) -> None:
    planned = overlapped_s(*made(each, send_order(*zip(*each, strict=True))))
    orders = itertools.permutations(range(len(each)))
    steps = [overlapped_s(*made(each, order)) for order in orders]
    work, sent = made(each, range(len(each)))
    least = max(work.forward_s + work.backward_s, sum(message.seconds for message in sent))
    assert min(steps) >= least - 1e-9
    assert min(steps) <= planned <= WORST * min(steps) + 1e-9


def layers(count: int, comm_over_compute: float) -> tuple[list[str], Pass, CommModel]:
    """A chain of equal layers, whose last one is ready first and needed last."""
    at = np.arange(count, dtype=np.float64)
    size = np.full(count, 1000.0)
    work = Pass(at + 1, at[::-1], size, float(count), float(count))
    seconds = comm_over_compute * 2 * count / size.sum()
    return [f"layer {i}" for i in range(count)], work, CommModel.linear(0.0, seconds)


def test_what_is_needed_first_beats_first_in_first_out() -> None:
    """With as much communication as computation."""
    names, work, comm = layers(12, 1.0)
    plan = plan_overlap(names, work, comm, parts=[12])
    sent = overlap.timed_messages(work, comm, [([i], 1) for i in range(12)])
    first_in_first_out = overlapped_s(work, sent)
    assert plan.predicted_s is not None
    assert plan.predicted_s < 0.9 * first_in_first_out
    assert plan.predicted_s == pytest.approx(
        step_by_events(work, [sent[i] for i in plan.order or ()])
    )
    assert plan.exposed_s == pytest.approx(plan.predicted_s - work.forward_s - work.backward_s)


@pytest.mark.parametrize("startup", [0.0, 0.5])
def test_a_plan_is_better_than_its_parts(startup: float) -> None:
    """Many messages cost their start; few overlap less."""
    names, work, comm = layers(10, 0.8)
    comm = CommModel.linear(startup, comm(1000.0) / 1000.0)
    each = {n: plan_overlap(names, work, comm, parts=[n]).predicted_s for n in overlap.PARTS}
    best = plan_overlap(names, work, comm)
    assert best.predicted_s is not None
    fastest = min(s for s in each.values() if s is not None)
    assert best.predicted_s <= fastest / (1.0 - overlap.WORTH) ** len(each)
    assert best.predicted_s >= max(
        work.forward_s + work.backward_s, len(best.order or ()) * startup
    )


def test_a_net_with_most_bytes_in_its_last_layers_has_buckets_of_unequal_size() -> None:
    """As ResNet-50: parts of one size merge half of its layers in what forward needs first."""
    at, count = np.arange(32.0), 32
    size = 2.0 ** (3 - np.arange(count) // 8)  # by gradient, as they are ready
    work = Pass(2.0 * (at + 1.0), at[::-1], size, float(count), 2.0 * count)
    comm = CommModel.linear(2.0, 3.0 * count / size.sum())
    names = [str(i) for i in range(count)]
    plan = plan_overlap(names, work, comm)
    each = [plan_overlap(names, work, comm, parts=[n]).predicted_s for n in overlap.PARTS]
    assert plan.predicted_s is not None
    assert plan.predicted_s < min(s for s in each if s is not None) / 1.05


sizes = st.lists(st.integers(0, 5000), min_size=1, max_size=12)


@given(sizes, st.integers(1, 40), st.data())
def test_partition(bytes: list[int], count: int, data: st.DataObject) -> None:
    """Each gradient once, dtypes apart, pieces of at most a part, buckets as they are ready."""
    length = len(bytes)
    drawn = st.lists(times, min_size=length, max_size=length)
    ready, needed = (np.array(data.draw(drawn)) for _ in range(2))
    kinds = data.draw(st.lists(st.sampled_from("ab"), min_size=length, max_size=length))
    work = Pass(ready, needed, np.array(bytes, dtype=np.float64), 9.0, 9.0)
    buckets, pieces = zip(*overlap._partition(work, kinds, count), strict=True)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(length))
    assert all(len({kinds[i] for i in bucket}) == 1 for bucket in buckets)
    ends = [max(ready[i] for i in bucket) for bucket in buckets]
    assert ends == sorted(ends)
    part = max(sum(bytes) / count, 1.0)
    for bucket, cut in zip(buckets, pieces, strict=True):
        size = sum(bytes[i] for i in bucket)
        assert cut >= 1
        assert size / cut <= part * 1.001
        assert cut == 1 or size / (cut - 1) > part * 0.999  # no more pieces than it takes
        # It was closed as soon as it was full: without its last gradient it is no full part.
        assert size - bytes[bucket[-1]] < part
    names = [str(i) for i in range(length)]
    plan = plan_overlap(names, work, CommModel.linear(0.1, 1e-3), kinds, [count])
    assert [plan.order.count(i) for i in range(len(buckets))] == list(pieces)  # type: ignore[union-attr]
    assert sorted(plan.names) == sorted(names)
    for changed in overlap._changes(kinds, list(zip(buckets, pieces, strict=True))):
        assert sorted(index for bucket, _ in changed for index in bucket) == list(range(length))
        assert all(bucket and cut >= 1 for bucket, cut in changed)
        assert all(len({kinds[index] for index in bucket}) == 1 for bucket, _ in changed)


def test_the_last_bucket_leaves_at_the_end_of_the_step() -> None:
    """It carries the control flags, which are known then."""
    _, work, comm = layers(3, 1.0)
    work = dataclasses.replace(work, backward_s=50.0)
    sent = overlap.timed_messages(work, comm, [([0], 2), ([1, 2], 1)])
    assert [(m.bucket, m.ready_s, m.needed_s) for m in sent] == [(0, 1.0, 2.0)] * 2 + [
        (1, 50.0, 0.0)
    ]


ONE = np.array([1.0])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((ONE, ONE, np.ones(2), 1.0, 1.0), "give each gradient a time, a need and a size"),
        ((-ONE, ONE, ONE, 1.0, 1.0), "must be 0 or more, got -1"),
        ((ONE, ONE * np.nan, ONE, 1.0, 1.0), "must be 0 or more, got nan"),
        ((ONE, ONE, ONE, 1.0, -2.0), "must be 0 or more, got -2"),
    ],
)
def test_bad_passes(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Pass(*arguments)


def test_in_order_keeps_the_buckets() -> None:
    names, work, _ = layers(4, 1.0)
    plan = Plan((("layer 0", "layer 1"), ("layer 2",), ("layer 3",)), "bytes")
    found = in_order(plan, names, work)
    assert found.buckets == plan.buckets
    assert sorted(found.order or ()) == [0, 1, 2]
    total = work.forward_s + work.backward_s
    each = [
        (2.0, 2.0, total / 2),
        (3.0, 1.0, total / 4),
        (work.backward_s, 0.0, total / 4),
    ]
    assert list(found.order or ()) == by_events(each) == [0, 2, 1]
    timed = dataclasses.replace(plan, predicted_s=9.0, exposed_s=1.0)  # with the barrier
    assert in_order(timed, names, work) == found
    assert "exposed" not in str(in_order(timed, names, work))
    assert "ms of it exposed" in str(plan_overlap(names, work, CommModel.linear(0.0, 1.0)))


ORDERED = Plan((("a", "b"), ("c",)), "overlap", 1.5, 0.5, order=(1, 0, 0))


@pytest.mark.parametrize("order", [(), (0,), (0, 2), (0, 1, 2), (0, 1, -1)])
def test_bad_orders(order: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="number of each of the 2 buckets at least once"):
        dataclasses.replace(ORDERED, order=order)


def test_what_may_arrive_after_the_next_forward_pass_has_begun() -> None:
    def late(count: int, *order: int) -> tuple[int, ...]:
        plan = Plan(tuple((str(i),) for i in range(count)), "given", order=order)
        return order[first_deferred(plan) :]

    assert late(3, 0, 1, 2) == ()
    assert late(3, 2, 1, 0) == (1, 0)
    assert late(3, 0, 1, 0, 2, 1, 2, 1, 0) == (1, 0)
    assert late(1, 0, 0, 0) == ()


def trials_of(forward_s: float, wait_s: float) -> tuple[list[Trial], Gradients]:
    names = [f"layer {i}" for i in reversed(range(8))]
    gradients = Gradients(names, np.arange(8.0), np.arange(8.0, 0.0, -1.0))
    single = Plan((tuple(names),), "single")
    backward_s = 7.0
    return [Trial(single, forward_s + backward_s + wait_s, wait_s)], gradients


def test_a_deferring_plan_follows_from_what_trials_have_shown() -> None:
    """One message that is sent when all is ready waits for as long as it takes."""
    tried, gradients = trials_of(forward_s=6.0, wait_s=24.0)
    plan = deferring_plan(tried, gradients)
    assert plan is not None
    assert plan.order is not None
    assert sorted(plan.names) == sorted(gradients.names)
    assert plan.predicted_s is not None
    assert plan.predicted_s < tried[0].step_s
    late = {plan.buckets[i] for i in plan.order[first_deferred(plan) :]}
    first_needed = max(zip(gradients.ready_s, gradients.names, strict=True))[1]
    assert late
    assert not any(first_needed in bucket for bucket in late)


def test_no_plan_defers_where_little_waits_or_no_forward_is_left() -> None:
    assert deferring_plan(*trials_of(forward_s=6.0, wait_s=0.1)) is None
    assert deferring_plan(*trials_of(forward_s=0.0, wait_s=7.0)) is None
