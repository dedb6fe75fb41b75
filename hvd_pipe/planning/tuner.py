"""Plans that are tried in training, each for some steps; the fastest stays.

What a message costs is seen in training alone: a message by itself pays for its negotiation, one
of a burst hardly does, and how busy the processors are says how much that is. So nothing is sent
to measure; how long steps take, and how long they wait, is seen::

    backward of the slowest rank |   wait    | update
    link      | bucket | | bucket | | bucket |

`Tuner` times a plan, takes the slowest rank's medians, and has all ranks take the plan that the
first one proposes. What it proposes, in turn:

- merged-gradient (`next_plan`): the buckets that training began with; about `MANY` messages, or a
  third of the first ones where those are about as many; the best plan for messages that cost what
  both waits show; one with fewer messages. The first stays unless another is faster by more than
  the error of what was seen.
- Pipe-SGD (`next_given`), where messages travel behind a whole step and no wait says what they
  cost: given plans. The one with the fewest messages stays unless another is faster by more than
  the error.
- ``overlap="forward"``: `hvd_pipe.planning.overlap.plan_overlap`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.plan import Plan

SETTLE_STEPS = 1
"""Steps of a new plan that do not count: its buffers are new."""
TRIAL_STEPS = 5
"""Steps of a plan that are timed."""
MANY = 12
FEWER = 0.6
MOST_MERGED = 60
"""Messages that can be merged pair by pair within a fraction of a second."""
HIDDEN = 0.02
"""Where waits are no larger a part of a step, no plan can gain much, and none is tried."""

_LATENCIES = 400

FloatArray = npt.NDArray[np.float64]

Find = Callable[[CommModel, str, int | None], Plan]
"""Makes a plan for a link, by a method of `hvd_pipe.planning.merge.plan`, with its limit."""


@dataclass(frozen=True)
class Trial:
    """The times of a plan on the slowest rank, in seconds."""

    plan: Plan
    step_s: float
    wait_s: float
    """From the last gradient to the last average, on the rank that waits least."""
    error_s: float = 0.0
    """By how much the median of so few steps may be wrong."""


Propose = Callable[[Sequence[Trial]], tuple[Plan, bool]]
"""Returns the plan of the next steps by what was seen, and whether it stays."""


class Tuner:
    """Times plans in training: ``timed`` steps of each, from the end of step ``begin`` on.

    ``largest`` returns the largest of all ranks' values, place by place, and ``found_by_first``
    what the first rank finds.
    """

    def __init__(
        self,
        largest: Callable[[list[float]], list[float]],
        found_by_first: Callable[[Callable[[], Any]], Any],
        begin: int = 0,
        timed: int = TRIAL_STEPS,
    ) -> None:
        self._largest, self._found_by_first = largest, found_by_first
        self.timed = timed
        self.tried: list[Trial] = []
        self.begin(begin)

    def begin(self, step: int) -> None:
        """Time the plan in use anew, from the end of this step on."""
        self.first = step
        self._ends: deque[float] = deque(maxlen=self.timed + 1)

    def end_step(self, step: int, now: float) -> bool:
        """Note when a step has ended; return whether enough steps of the plan were timed."""
        if step >= self.first:
            self._ends.append(now)
        return len(self._ends) > self.timed

    def steps(self) -> list[float]:
        """Return the seconds of each step that was timed on this rank."""
        return [end - start for start, end in pairwise(self._ends)]

    def seen(
        self,
        plan: Plan,
        steps: Sequence[float] = (),
        waits: Sequence[float] = (),
        ready: Sequence[float] = (),
    ) -> list[float]:
        """Record a trial, in the times of the slowest rank; return its times of gradients.

        A bucket leaves when the slowest rank has filled it. The rank that is last in a step waits
        for messages alone, so the least wait counts.
        """
        steps = steps or self.steps()
        values = [median(steps), error_of(steps), *(-wait for wait in waits), *ready]
        step_s, error_s, *rest = self._largest(values)
        least = [-wait for wait in rest[: len(waits)] if math.isfinite(wait)]
        self.tried.append(Trial(plan, step_s, median(least) if least else 0.0, error_s))
        return rest[len(waits) :]

    def next(self, propose: Propose) -> tuple[Plan, bool]:
        """Return the plan that the first rank proposes, and whether it stays."""

        def find() -> tuple[str, bool]:
            plan, stays = propose(self.tried)
            return plan.to_json(), stays

        text, stays = self._found_by_first(find)
        return Plan.from_json(text), stays


def next_given(plans: Sequence[Plan], tried: Sequence[Trial]) -> tuple[Plan, bool]:
    """The next of the given plans; then, of the fastest, that with the fewest messages."""
    if len(tried) < len(plans):
        return plans[len(tried)], False
    best = min(tried, key=lambda trial: trial.step_s)
    as_good = [trial for trial in tried if not _is_faster(best, trial)]
    kept = min(as_good, key=lambda trial: (len(trial.plan.buckets), trial.step_s))
    return replace(kept.plan, tried=_summary(tried)), True


def _is_faster(trial: Trial, slower: Trial) -> bool:
    return slower.step_s - trial.step_s > math.hypot(trial.error_s, slower.error_s)


@dataclass(frozen=True)
class Gradients:
    """The gradients of which messages are made; each field has one entry a gradient."""

    names: Sequence[str]
    ready_s: FloatArray
    """By gradient, seconds after backward starts."""
    bytes: FloatArray
    """By gradient, as it is sent."""
    kinds: Sequence[Hashable] | None = None
    """Only gradients of the same kind may share a message; None: all are of one kind."""

    def messages(self, plan: Plan) -> list[_Message]:
        """The messages of a plan in the order in which they can leave."""
        index = {name: i for i, name in enumerate(self.names)}
        messages = []
        for bucket in plan.buckets:
            members = [index[name] for name in bucket]
            kind = None if self.kinds is None else self.kinds[members[0]]
            ready, size = float(self.ready_s[members].max()), float(self.bytes[members].sum())
            messages.append(_Message(bucket, ready, size, kind))
        return sorted(messages, key=lambda message: message.ready_s)


class _Message(NamedTuple):
    names: tuple[str, ...]
    ready_s: float
    bytes: float
    kind: Hashable


def next_plan(
    tried: Sequence[Trial],
    gradients: Gradients,
    find: Find,
    method: str = "exact",
    most: int = 4,
) -> tuple[Plan, bool]:
    """The plan of the next steps, and whether it stays; see the top of this file."""
    races, first = method == "exact", tried[0]
    if len(tried) == 1:
        if races and first.wait_s <= HIDDEN * first.step_s:
            return _with_prediction(first, tried, gradients), True
        count = len(first.plan.buckets)
        other = count / 3 if MANY / 2 <= count <= 2 * MANY else MANY
        plan = _of_one_size(other, gradients, find)
        if not _is_tried(plan, tried):
            return plan, False
    if not races:
        comm = fitted_to_waits(tried, gradients)
        return replace(find(comm, method, None), tried=_summary(tried)), True
    if len(tried) < most:
        comm = fitted_to_waits(tried, gradients)
        if len(tried) < 3:
            plan = find(comm, method, None)
        else:
            plan = _with_fewer(tried[-1].plan, comm, gradients, find)
        if not _is_tried(plan, tried):
            return plan, False
    best = min(tried, key=lambda trial: trial.step_s)
    return _with_prediction(best if _is_faster(best, first) else first, tried, gradients), True


def error_of(seconds: Sequence[float]) -> float:
    """The standard error of the median of these steps, by their median deviation from it."""
    middle = median(seconds)
    deviation = median(abs(step_s - middle) for step_s in seconds)
    return 1.253 * 1.4826 * deviation / math.sqrt(len(seconds))  # both for Gaussian noise


def fitted_to_waits(tried: Sequence[Trial], gradients: Gradients) -> CommModel:
    """The line ``T(x) = a + b x`` with which steps wait as they were seen to.

    One link carries one message at a time, so a step waits ``finish - max_i R_i`` with ``finish =
    max(finish, R) + T(bytes)`` over its messages. For each a there is one b with which the first
    plan waits as it did. Of these lines, the result is closest to the other waits, by their
    relative errors squared. One trial alone says nothing about a, which is then 0.

    Example:
        >>> gradients = Gradients("ab", np.array([0.0, 0.0]), np.array([100.0, 100.0]))
        >>> one, two = Plan((("a", "b"),), "given"), Plan((("a",), ("b",)), "given")
        >>> line = fitted_to_waits([Trial(one, 5.0, 3.0), Trial(two, 6.0, 4.0)], gradients)
        >>> round(line.latency, 1), round(line(200), 1)
        (1.0, 3.0)
    """
    chains = [_Chain.of(gradients.messages(trial.plan)) for trial in tried]
    waits = np.array([trial.wait_s for trial in tried])
    latencies = [0.0]
    if len(tried) > 1:
        latencies += (waits[0] * np.geomspace(1e-4, 1.0, _LATENCIES)).tolist()
    best = math.inf, 0.0, 0.0
    for latency in latencies:
        per_byte = chains[0].per_byte(latency, float(waits[0]))
        if per_byte >= 0.0:
            predicted = np.array([chain.wait_s(latency, per_byte) for chain in chains[1:]])
            error = float(((predicted / np.maximum(waits[1:], 1e-9) - 1.0) ** 2).sum())
            best = min(best, (error, latency, per_byte))
    return CommModel.linear(*best[1:])


class _Chain(NamedTuple):
    """Messages that follow each other on a link, from each one to the last."""

    lead_s: FloatArray
    counts: FloatArray
    bytes: FloatArray

    @classmethod
    def of(cls, messages: Sequence[_Message]) -> _Chain:
        ready = np.array([message.ready_s for message in messages])
        sizes = np.array([message.bytes for message in messages])
        counts = np.arange(len(messages), 0, -1, dtype=np.float64)
        return cls(ready - ready[-1], counts, np.cumsum(sizes[::-1])[::-1])

    def wait_s(self, latency: float, per_byte: float) -> float:
        return float((self.lead_s + latency * self.counts + per_byte * self.bytes).max())

    def per_byte(self, latency: float, wait: float) -> float:
        """The seconds a byte with which a step waits so long; negative where there are none."""
        left = wait - self.lead_s - latency * self.counts
        sent = self.bytes > 0.0
        return float((left[sent] / self.bytes[sent]).min()) if sent.any() else 0.0


def _of_one_size(count: float, gradients: Gradients, find: Find) -> Plan:
    """A plan of about ``count`` messages of equal bytes."""
    limit = max(1, math.ceil(float(gradients.bytes.sum()) / count))
    plan = find(CommModel.linear(0.0, 0.0), "bytes", limit)
    return replace(plan, predicted_s=None, exposed_s=None)  # of no link


def _with_fewer(plan: Plan, comm: CommModel, gradients: Gradients, find: Find) -> Plan:
    """A plan with neighbours merged, the cheapest pair first, until there are few enough."""
    kept = gradients.messages(plan)
    if len(kept) > MOST_MERGED:
        return _of_one_size(FEWER * len(kept), gradients, find)
    while len(kept) > max(1, math.floor(FEWER * len(plan.buckets))):
        options = []
        for i, message in enumerate(kept):
            j = next((j for j in range(i + 1, len(kept)) if kept[j].kind == message.kind), None)
            if j is not None:
                other = kept[j]
                both = other._replace(
                    names=message.names + other.names, bytes=message.bytes + other.bytes
                )
                options.append([*kept[:i], *kept[i + 1 : j], both, *kept[j + 1 :]])
        if not options:
            break
        kept = min(
            options,
            key=lambda merged: _Chain.of(merged).wait_s(comm.latency, float(comm.slopes[0])),
        )
    return Plan(tuple(message.names for message in kept), plan.method)


def _is_tried(plan: Plan, tried: Sequence[Trial]) -> bool:
    buckets = set(map(frozenset, plan.buckets))
    return any(set(map(frozenset, trial.plan.buckets)) == buckets for trial in tried)


def _with_prediction(trial: Trial, tried: Sequence[Trial], gradients: Gradients) -> Plan:
    messages = gradients.messages(trial.plan)
    finish = float(gradients.ready_s.max()) + trial.wait_s
    names = tuple(message.names for message in messages)
    return Plan(names, trial.plan.method, finish, trial.wait_s, tried=_summary(tried))


def _summary(tried: Sequence[Trial]) -> tuple[tuple[int, float], ...]:
    return tuple((len(trial.plan.buckets), trial.step_s) for trial in tried)
