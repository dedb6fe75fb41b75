"""Plans for gradients of several kinds (dtypes, devices), which share a link but no bucket.

Planned each for itself, as if each had the link, kinds get in each other's way: a bucket that
ends just in time by itself then waits for one of another kind. Here all are planned together. A
bucket is a run of neighbours of its kind; on the one link, ``finish = max(previous finish, R) +
T(bytes)``, R being when its last tensor is ready. For given buckets no order beats that of R: a
message that goes right before one that was ready earlier can change places with it, and both are
through no later than they were.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning import merge
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.plan import Plan

__all__ = ["plan_kinds"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_STATES = 20_000
"""How many states the joint dynamic program looks at, about 0.3 s; see :func:`plan_kinds`."""


@dataclass(frozen=True, eq=False)
class _Kind:
    """One kind's tensors in order of readiness: places among all, times, sizes."""

    places: IntArray
    ready: FloatArray
    bytes: FloatArray


@dataclass(frozen=True)
class _Bucket:
    kind: int
    first: int
    end: int


def plan_kinds(
    names: Sequence[str],
    ready: npt.ArrayLike,
    bytes: npt.ArrayLike,
    kinds: Sequence[Hashable],
    comm: CommModel,
    method: str = "exact",
    bucket_bytes: int | None = None,
    margin: float = 0.0,
) -> Plan:
    """The plan for gradients of which only those of one kind may share a bucket.

    With f(i, j, ...) the earliest finish of the first i tensors of one kind, j of the next, ...::

        f(0, 0, ...) = 0
        f(i, j, ...) = min over kinds, and over i' < i of that kind,
                       of max(f(i', j, ...), R_i) + T(P_i - P_i')

    which is exact, as it tries every last bucket of every kind. The states are the product of the
    kinds' counts: up to 20 000 of them. Above, neighbours that are ready within a span d of each
    other count as one tensor, with the smallest d that makes it so few. The result then finishes
    at most d later than the best where ``T = a + b x``: each bucket of the best plan, extended to
    the end of such a run, leaves at most d later, and no more is left for those behind it. It
    never finishes later than when each kind is planned for itself. In the end buckets are merged
    where that makes the last message no later, as :func:`hvd_pipe.planning.merge.coalesce` does.

    Args:
        names: L names, in the order in which the gradients become ready.
        ready: 1-D, L times in seconds after backward starts, not decreasing.
        bytes: 1-D, L sizes, not negative.
        kinds: L labels, equal for those that may share a bucket.
        comm, method, bucket_bytes, margin: as :func:`hvd_pipe.planning.merge.plan`; other methods
            than "exact" plan each kind for itself.

    Returns:
        The buckets of all kinds in the order in which they are sent; the prediction is for all of
        them on one link.

    Raises:
        ValueError: the arguments are malformed or do not belong together.

    Example:
        >>> names, kinds = ["a", "b", "c", "d"], ["half", "full", "half", "full"]
        >>> net = CommModel.linear(1.0, 0.0)
        >>> plan_kinds(names, [1.0, 1.0, 2.0, 2.5], [8, 8, 8, 8], kinds, net).buckets
        (('a', 'c'), ('b', 'd'))

    Source: ours, for the problem of MG-WFBP, arXiv 1912.09268.
    """
    times, sizes = merge.checked(ready, bytes)
    if not len(names) == len(kinds) == len(times):
        raise ValueError(
            f"names, kinds and ready must agree: {len(names)} names, {len(kinds)} kinds, "
            f"{len(times)} times"
        )
    labels = list(dict.fromkeys(kinds))
    if len(labels) == 1:
        return merge.plan(names, times, sizes, comm, method, bucket_bytes, margin)
    groups = []
    for label in labels:
        places = np.array([i for i, kind in enumerate(kinds) if kind == label], dtype=np.int64)
        groups.append(_Kind(places, times[places], sizes[places]))
    buckets = [
        _Bucket(k, int(end - count), int(end))
        for k, group in enumerate(groups)
        for own in [merge.sizes_of(group.ready, group.bytes, comm, method, bucket_bytes, margin)]
        for end, count in zip(np.cumsum(own), own, strict=True)
    ]
    if method == "exact":
        slow = comm.scaled(1.0, 1.0 + margin) if margin else comm
        options = [_joint(groups, slow), buckets]
        buckets = min(options, key=lambda option: _finish(option, groups, slow))
        buckets = _coalesced(buckets, groups, slow)
    finish = _finish(buckets, groups, comm) + comm.delay
    sent = tuple(
        tuple(names[place] for place in groups[bucket.kind].places[bucket.first : bucket.end])
        for bucket in _in_order(buckets, groups)
    )
    return Plan(sent, method, finish, finish - float(times[-1]))


def _joint(kinds: Sequence[_Kind], comm: CommModel) -> list[_Bucket]:
    """The buckets of the earliest finish, over runs of tensors that count as one."""
    ends = _runs(kinds)
    ready = [np.concatenate(([0.0], k.ready[e - 1])) for k, e in zip(kinds, ends, strict=True)]
    total = [
        np.concatenate(([0.0], np.cumsum(k.bytes)))[np.concatenate(([0], e))]
        for k, e in zip(kinds, ends, strict=True)
    ]
    costs = [_costs(sizes, comm) for sizes in total]
    finish = np.zeros([len(times) for times in ready])
    previous: dict[tuple[int, ...], tuple[int, int]] = {}
    for state in product(*(range(len(times)) for times in ready)):
        best = math.inf
        for k, i in enumerate(state):
            if not i:
                continue
            where: tuple[int | slice, ...] = (*state[:k], slice(0, i), *state[k + 1 :])
            line = finish[where]
            times = np.maximum(line, ready[k][i]) + costs[k][i, :i]
            at = int(times.argmin())
            if times[at] < best:
                best, previous[state] = float(times[at]), (k, at)
        finish[state] = best if any(state) else 0.0
    places = [np.concatenate(([0], e)).tolist() for e in ends]
    state, buckets = tuple(len(e) for e in ends), []
    while any(state):
        k, i = previous[state]
        buckets.append(_Bucket(k, places[k][i], places[k][state[k]]))
        state = (*state[:k], i, *state[k + 1 :])
    return buckets[::-1]


def _costs(total: FloatArray, comm: CommModel) -> FloatArray:
    """Seconds of a message of i'..i, at [i, i']; 0 where there is none."""
    return np.asarray(comm(np.maximum(0.0, total[:, None] - total[None, :])), dtype=np.float64)


def _runs(kinds: Sequence[_Kind]) -> list[IntArray]:
    """Where runs of tensors end that count as one, so that there are few enough states."""

    def ends(span: float) -> list[IntArray]:
        return [_within(kind.ready, span) for kind in kinds]

    def few(runs: Sequence[IntArray]) -> bool:
        return math.prod(len(run) + 1 for run in runs) <= MAX_STATES

    runs = [np.arange(1, len(kind.ready) + 1) for kind in kinds]
    if few(runs):
        return runs
    low, high = 0.0, max(float(kind.ready[-1]) for kind in kinds)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if few(ends(middle)) else (middle, high)
    return ends(high)


def _within(ready: FloatArray, span: float) -> IntArray:
    """Ends of the runs whose first and last are ready within ``span`` seconds."""
    ends, at = [], 0
    while at < len(ready):
        at = int(np.searchsorted(ready, ready[at] + span, side="right"))
        ends.append(at)
    return np.array(ends, dtype=np.int64)


def _in_order(buckets: Sequence[_Bucket], kinds: Sequence[_Kind]) -> list[_Bucket]:
    """By when they may leave, which no order beats."""
    return sorted(buckets, key=lambda bucket: float(kinds[bucket.kind].ready[bucket.end - 1]))


def _finish(buckets: Sequence[_Bucket], kinds: Sequence[_Kind], comm: CommModel) -> float:
    last = 0.0
    for bucket in _in_order(buckets, kinds):
        kind = kinds[bucket.kind]
        seconds = comm(float(kind.bytes[bucket.first : bucket.end].sum()))
        last = max(last, float(kind.ready[bucket.end - 1])) + seconds
    return last


def _coalesced(
    buckets: Sequence[_Bucket], kinds: Sequence[_Kind], comm: CommModel
) -> list[_Bucket]:
    """From the last bucket on, each takes in as many before it of its kind as cost nothing."""
    kept = _in_order(buckets, kinds)
    finish = _finish(kept, kinds, comm) * (
        1 + 1e-12
    )  # what is as good but for rounding is as good
    at = len(kept) - 1
    while at > 0:
        own = kept[at]
        before = next((i for i in range(at - 1, -1, -1) if kept[i].kind == own.kind), None)
        if before is not None:
            wider = _Bucket(own.kind, kept[before].first, own.end)
            tried = [*kept[:before], *kept[before + 1 : at], wider, *kept[at + 1 :]]
            if _finish(tried, kinds, comm) <= finish:
                kept = tried
        at -= 1
    return kept
