"""Plans that are tried in training, each for some steps; the fastest stays.

What a message costs is seen in training alone. A message by itself pays for its negotiation, one
of a burst hardly does, and how busy the processors are says how much that is. So nothing is sent
to measure: what is seen is how long steps take, and how long they wait::

    backward of the slowest rank |   wait    | update
    link      | bucket | | bucket | | bucket |

The plans, in turn: the buckets that training began with; about `MANY` messages; the best plan for
messages that cost what both waits show; and one with fewer messages than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.plan import Plan

__all__ = ["SETTLE_STEPS", "TRIAL_STEPS", "Gradients", "Trial", "fitted_to_waits", "next_plan"]

SETTLE_STEPS = 1
"""Steps of a new plan that do not count: its buffers are new."""
TRIAL_STEPS = 5
"""Steps of a plan that are timed."""
MANY = 12
FEWER = 0.6
HIDDEN = 0.02
"""Where waits are no larger a part of a step, no plan can gain much, and none is tried."""

_LATENCIES = 60
_BISECTIONS = 50

FloatArray = npt.NDArray[np.float64]

Find = Callable[[CommModel, str, int | None], Plan]
"""Makes a plan for a link, by a method of `hvd_pipe.planning.merge.plan`, with its limit."""


@dataclass(frozen=True)
class Trial:
    """What was seen of a plan.

    Args:
        plan: Which.
        step_s: Seconds of a step, on the slowest rank.
        wait_s: Seconds from the last gradient to the last average, on the rank that waits least.
    """

    plan: Plan
    step_s: float
    wait_s: float


@dataclass(frozen=True)
class Gradients:
    """What messages are made of.

    Args:
        names: Of the gradients.
        ready_s: By gradient, seconds after backward starts.
        bytes: By gradient, as it is sent.
    """

    names: Sequence[str]
    ready_s: FloatArray
    bytes: FloatArray

    def messages(self, plan: Plan) -> tuple[FloatArray, FloatArray]:
        """When the messages of a plan can leave, in that order, and the bytes of each."""
        index = {name: i for i, name in enumerate(self.names)}
        groups = [[index[name] for name in bucket] for bucket in plan.buckets]
        ready = np.array([self.ready_s[group].max() for group in groups])
        order = np.argsort(ready, kind="stable")
        return ready[order], np.array([self.bytes[group].sum() for group in groups])[order]

    def in_order(self, plan: Plan) -> Plan:
        """The plan with its buckets in the order in which they can leave."""
        index = {name: i for i, name in enumerate(self.names)}
        last = [max(float(self.ready_s[index[name]]) for name in each) for each in plan.buckets]
        order = sorted(range(len(last)), key=lambda number: last[number])
        return replace(plan, buckets=tuple(plan.buckets[number] for number in order))


def next_plan(
    tried: Sequence[Trial],
    gradients: Gradients,
    find: Find,
    method: str = "exact",
    most: int = 4,
) -> tuple[Plan, bool]:
    """The plan of the next steps, and whether it stays.

    Args:
        tried: What was seen so far, of one plan at least.
        gradients: What messages are made of.
        find: Makes plans.
        method: How the best plan is made. Only of "exact" plans does the fastest stay; any other
            is what the user wants, and needs nothing but the cost of messages.
        most: How many plans may be tried. With two, the best plan for what they show stays.

    Returns:
        A plan that was not tried, and False; or the one to keep, and True. That one says what was
        tried, and its times are those that were seen.

    Example:
        >>> from hvd_pipe.planning import merge
        >>> names, ready, sizes = "cba", np.array([0.0, 1.0, 2.0]), np.array([4.0, 4.0, 4.0])
        >>> def find(comm, method, limit):
        ...     return merge.plan(names, ready, sizes, comm, method, limit)
        >>> first = Trial(find(CommModel.linear(0.0, 0.0), "single", None), 9.0, 3.5)
        >>> plan, stays = next_plan([first], Gradients(names, ready, sizes), find)
        >>> plan.buckets, stays
        ((('c',), ('b',), ('a',)), False)
        >>> tried = [first, Trial(plan, 7.0, 1.5)]
        >>> next_plan(tried, Gradients(names, ready, sizes), find)[0].tried
        ((1, 9.0), (3, 7.0))
    """
    races, first = method == "exact" and most > 2, tried[0]
    if len(tried) == 1:
        if method == "exact" and first.wait_s <= HIDDEN * first.step_s:
            return _kept(first, tried, gradients), True
        limit = max(1, math.ceil(float(gradients.bytes.sum()) / MANY))
        plan = find(CommModel.linear(0.0, 0.0), "bytes", limit)
        plan = replace(plan, predicted_s=None, exposed_s=None)  # of no link
        if not _is_tried(plan, tried):
            return plan, False
    comm = fitted_to_waits(tried, gradients)
    if not races:
        return replace(find(comm, method, None), tried=_seen(tried)), True
    if 1 < len(tried) < most:
        plan = find(comm, method, None)
        if len(tried) > 2:
            plan = _with_fewer(len(plan.buckets), comm, first, find)
        if not _is_tried(plan, tried):
            return plan, False
    return _kept(min(tried, key=lambda each: each.step_s), tried, gradients), True


def fitted_to_waits(tried: Sequence[Trial], gradients: Gradients) -> CommModel:
    """The line ``T(x) = a + b x`` with which steps wait as they were seen to.

    One link carries one message at a time, so a step waits ``finish - max_i R_i`` with ``finish =
    max(finish, R) + T(bytes)`` over its messages. For each a there is one b with which the first
    plan waits as it did. Of these lines, the result is closest to the other waits, by their
    relative errors squared. One trial alone says nothing about a, which is then 0.

    Args:
        tried: What was seen; of one plan at least.
        gradients: What messages are made of.

    Example:
        >>> gradients = Gradients("ab", np.array([0.0, 0.0]), np.array([100.0, 100.0]))
        >>> one, two = Plan((("a", "b"),), "given"), Plan((("a",), ("b",)), "given")
        >>> line = fitted_to_waits([Trial(one, 5.0, 3.0), Trial(two, 6.0, 4.0)], gradients)
        >>> round(line.latency, 1), round(line(200), 1)
        (1.0, 3.0)
    """
    (first, wait), *others = [(gradients.messages(each.plan), each.wait_s) for each in tried]
    if wait <= 0.0:
        return CommModel.linear(0.0, 0.0)

    def line(latency: float) -> tuple[float, float, float]:
        if _wait_s(*first, latency, 0.0) > wait:
            return math.inf, latency, 0.0
        per_byte = _per_byte(*first, latency, wait)
        misses = [
            _wait_s(*messages, latency, per_byte) / max(seen, 1e-9) - 1.0
            for messages, seen in others
        ]
        return sum(miss**2 for miss in misses), latency, per_byte

    latencies = [0.0, *np.geomspace(1e-4 * wait, wait, _LATENCIES).tolist()] if others else [0.0]
    at = min(range(len(latencies)), key=lambda i: line(latencies[i]))
    low, high = latencies[max(at - 1, 0)], latencies[min(at + 1, len(latencies) - 1)]
    nearby = [latencies[at], *np.linspace(low, high, _LATENCIES).tolist()]
    _, latency, per_byte = min(map(line, nearby))
    return CommModel.linear(latency, per_byte)


def _wait_s(ready: FloatArray, bytes: FloatArray, latency: float, per_byte: float) -> float:
    finish = 0.0
    for begin, size in zip(ready.tolist(), bytes.tolist(), strict=True):
        finish = max(finish, begin) + latency + per_byte * size
    return finish - float(ready[-1])


def _per_byte(ready: FloatArray, bytes: FloatArray, latency: float, wait: float) -> float:
    """The seconds a byte with which messages end as late as seen; waits grow with them."""
    if not bytes.any():
        return 0.0
    low, high = 0.0, wait / max(float(bytes[-1]), 1.0)
    if _wait_s(ready, bytes, latency, high) < wait:  # by rounding, or an empty last message
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        late = _wait_s(ready, bytes, latency, middle) > wait
        low, high = (low, middle) if late else (middle, high)
    return low


def _with_fewer(count: int, comm: CommModel, first: Trial, find: Find) -> Plan:
    """The best plan for messages that cost so much more that there are fewer of them."""
    latency = max(comm.latency, 0.01 * first.wait_s)
    while True:
        latency *= 1.5
        plan = find(CommModel.linear(latency, comm.slopes[0]), "exact", None)
        if len(plan.buckets) <= FEWER * count or latency > first.step_s:
            return replace(plan, predicted_s=None, exposed_s=None)  # of a link that is none


def _is_tried(plan: Plan, tried: Sequence[Trial]) -> bool:
    buckets = set(map(frozenset, plan.buckets))
    return any(set(map(frozenset, each.plan.buckets)) == buckets for each in tried)


def _kept(trial: Trial, tried: Sequence[Trial], gradients: Gradients) -> Plan:
    finish = float(gradients.ready_s.max()) + trial.wait_s
    plan = gradients.in_order(trial.plan)
    return replace(plan, predicted_s=finish, exposed_s=trial.wait_s, tried=_seen(tried))


def _seen(tried: Sequence[Trial]) -> tuple[tuple[int, float], ...]:
    return tuple((len(each.plan.buckets), each.step_s) for each in tried)
