"""Plan buckets of gradients in several dtype groups, which share a link but no bucket.

A dtype group has the gradients of one dtype on one device. A plan for each group by itself would
ignore the messages of the others, so here all groups are planned together. A bucket is a run of
neighbours of its group. One link carries all messages: ``finish = max(previous finish, R) +
T(bytes)``, where R is the time at which the bucket's last tensor is ready. The best order of given
buckets is that of R: if a message is sent right before one that was ready earlier, the two can
change places, and both finish no later than before.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning import merge
from hvd_pipe.planning.comm import CommModel, blocked_ends
from hvd_pipe.planning.plan import Plan

__all__ = ["plan_dtype_groups"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_STATES = 20_000
"""The most states of the joint dynamic programme, about 0.3 s; see :func:`plan_dtype_groups`."""


@dataclass(frozen=True, eq=False)
class _Group:
    """The tensors of a group in order of readiness: indices among all tensors, times, sizes."""

    indices: IntArray
    ready: FloatArray
    bytes: FloatArray


@dataclass(frozen=True)
class _Bucket:
    group: int
    first: int
    end: int


def plan_dtype_groups(
    names: Sequence[str],
    ready: npt.ArrayLike,
    bytes: npt.ArrayLike,
    groups: Sequence[Hashable],
    comm: CommModel,
    method: str = "exact",
    bucket_bytes: int | None = None,
    margin: float = 0.0,
) -> Plan:
    """Return the plan for gradients of which only those of one group may share a bucket.

    Let f(i, j, ...) be the earliest finish of the first i tensors of one group, j of the next::

        f(0, 0, ...) = 0
        f(i, j, ...) = min over groups, and over i' < i of that group,
                       of max(f(i', j, ...), R_i) + T(P_i - P_i')

    This is exact, because it tries every last bucket of every group. The number of states is the
    product of the groups' sizes. Above 20 000 states, neighbours that are ready within d seconds
    of each other count as one tensor, with the smallest d that suffices. If ``T = a + b x``, the
    result then finishes at most d later than the best plan: extend each bucket of the best plan to
    the end of such a run, and it is sent at most d later. The result never finishes later than the
    plans of the groups by themselves. At the end, buckets are merged where the last message then
    finishes no later, as :func:`hvd_pipe.planning.merge.coalesce` does.

    Args:
        names: L names, in the order in which the gradients become ready.
        ready: 1-D, L times in seconds after backward starts, not decreasing.
        bytes: 1-D, L sizes, not negative.
        groups: L labels, equal for those that may share a bucket.
        comm, method, bucket_bytes, margin: as :func:`hvd_pipe.planning.merge.plan`; methods other
            than "exact" plan each group by itself.

    Returns:
        The buckets of all groups in the order in which they are sent; the prediction is for all of
        them on one link.

    Raises:
        ValueError: the arguments are malformed or do not belong together.

    Example:
        >>> names, groups = ["a", "b", "c", "d"], ["half", "full", "half", "full"]
        >>> net = CommModel.linear(1.0, 0.0)
        >>> plan_dtype_groups(names, [1.0, 1.0, 2.0, 2.5], [8, 8, 8, 8], groups, net).buckets
        (('a', 'c'), ('b', 'd'))

    Source: ours, for the problem of MG-WFBP, arXiv 1912.09268.
    """
    times, sizes = merge.checked(ready, bytes)
    if not len(names) == len(groups) == len(times):
        raise ValueError(
            f"names, groups and ready must agree: {len(names)} names, {len(groups)} groups, "
            f"{len(times)} times"
        )
    labels = list(dict.fromkeys(groups))
    if len(labels) == 1:
        return merge.plan(names, times, sizes, comm, method, bucket_bytes, margin)
    parts = []
    for label in labels:
        indices = np.array([i for i, group in enumerate(groups) if group == label], dtype=np.int64)
        parts.append(_Group(indices, times[indices], sizes[indices]))
    buckets = [
        _Bucket(k, int(end - count), int(end))
        for k, part in enumerate(parts)
        for own in [merge.sizes_of(part.ready, part.bytes, comm, method, bucket_bytes, margin)]
        for end, count in zip(np.cumsum(own), own, strict=True)
    ]
    if method == "exact":
        slow = comm.each_alone().scaled(1.0, 1.0 + margin) if margin else comm.each_alone()
        options = [_joint(parts, slow), buckets]
        buckets = min(options, key=lambda option: _finish(option, parts, slow))
        buckets = _coalesced(buckets, parts, slow)
    finish = _finish(buckets, parts, comm) + comm.delay_behind
    sent = tuple(
        tuple(names[i] for i in parts[bucket.group].indices[bucket.first : bucket.end])
        for bucket in _in_order(buckets, parts)
    )
    return Plan(sent, method, finish, finish - float(times[-1]))


def _joint(groups: Sequence[_Group], comm: CommModel) -> list[_Bucket]:
    """Return the buckets of the earliest finish, over runs of tensors that count as one."""
    ends = _runs(groups)
    ready = [np.concatenate(([0.0], g.ready[e - 1])) for g, e in zip(groups, ends, strict=True)]
    total = [
        np.concatenate(([0.0], np.cumsum(g.bytes)))[np.concatenate(([0], e))]
        for g, e in zip(groups, ends, strict=True)
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
    edges = [np.concatenate(([0], e)).tolist() for e in ends]
    state, buckets = tuple(len(e) for e in ends), []
    while any(state):
        k, i = previous[state]
        buckets.append(_Bucket(k, edges[k][i], edges[k][state[k]]))
        state = (*state[:k], i, *state[k + 1 :])
    return buckets[::-1]


def _costs(total: FloatArray, comm: CommModel) -> FloatArray:
    """Return the seconds of a message of tensors i'..i at [i, i']; 0 where there is none."""
    return np.asarray(comm(np.maximum(0.0, total[:, None] - total[None, :])), dtype=np.float64)


def _runs(groups: Sequence[_Group]) -> list[IntArray]:
    """Return where runs of tensors end that count as one, so that there are few enough states."""

    def ends(span: float) -> list[IntArray]:
        return [_within(group.ready, span) for group in groups]

    def few(runs: Sequence[IntArray]) -> bool:
        return math.prod(len(run) + 1 for run in runs) <= MAX_STATES

    runs = [np.arange(1, len(group.ready) + 1) for group in groups]
    if few(runs):
        return runs
    low, high = 0.0, max(float(group.ready[-1]) for group in groups)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if few(ends(middle)) else (middle, high)
    return ends(high)


def _within(ready: FloatArray, span: float) -> IntArray:
    """Return the ends of the runs whose first and last are ready within ``span`` seconds."""
    ends, at = [], 0
    while at < len(ready):
        at = int(np.searchsorted(ready, ready[at] + span, side="right"))
        ends.append(at)
    return np.array(ends, dtype=np.int64)


def _in_order(buckets: Sequence[_Bucket], groups: Sequence[_Group]) -> list[_Bucket]:
    """Sort buckets by the time at which they may be sent: no order is better."""
    return sorted(buckets, key=lambda bucket: float(groups[bucket.group].ready[bucket.end - 1]))


def _finish(buckets: Sequence[_Bucket], groups: Sequence[_Group], comm: CommModel) -> float:
    ready, seconds = [], []
    for bucket in _in_order(buckets, groups):
        group = groups[bucket.group]
        ready.append(float(group.ready[bucket.end - 1]))
        seconds.append(comm(float(group.bytes[bucket.first : bucket.end].sum())))
    if comm.blocking:
        return blocked_ends(ready, seconds, comm.delay)[-1]
    last = 0.0
    for begin, busy in zip(ready, seconds, strict=True):
        last = max(last, begin) + busy
    return last


def _coalesced(
    buckets: Sequence[_Bucket], groups: Sequence[_Group], comm: CommModel
) -> list[_Bucket]:
    """Merge each bucket, from the last on, with those before it in its group, where it is free."""
    kept = _in_order(buckets, groups)
    finish = _finish(kept, groups, comm) * (1 + 1e-12)  # rounding is no difference
    at = len(kept) - 1
    while at > 0:
        own = kept[at]
        before = next((i for i in range(at - 1, -1, -1) if kept[i].group == own.group), None)
        if before is not None:
            wider = _Bucket(own.group, kept[before].first, own.end)
            tried = [*kept[:before], *kept[before + 1 : at], wider, *kept[at + 1 :]]
            if _finish(tried, groups, comm) <= finish:
                kept = tried
        at -= 1
    return kept
