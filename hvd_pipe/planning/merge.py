"""Which gradients travel together: a plan of buckets from ready times, sizes and a network.

Tensors 1..L are ready at ``R_1 <= ... <= R_L`` seconds after backward starts, and ``P`` are the
prefix sums of their sizes. One link carries one message at a time, first in, first out, so buckets
are runs of neighbours: a bucket of tensors i+1..j is sent once tensor j is ready and the link is
free, ``finish = max(previous finish, R_j) + T(P_j - P_i)``. Every ``sizes`` here is an int64 array
of how many tensors each bucket holds, in the order in which they are sent.

Source: MG-WFBP, arXiv 1912.09268. Its Theorem 1 is :func:`greedy`, which is not
optimal; :func:`exact` is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning.comm import CommModel, blocked_ends
from hvd_pipe.planning.plan import Plan

__all__ = [
    "METHODS",
    "Plan",
    "by_bytes",
    "coalesce",
    "exact",
    "finish_times",
    "greedy",
    "plan",
    "single",
    "sizes_of",
    "wfbp",
]


FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def exact(ready: npt.ArrayLike, bytes: npt.ArrayLike, comm: CommModel) -> IntArray:
    """The buckets whose last message finishes first.

    ``f(0) = 0; f(j) = min over i < j of max(f(i), R_j) + T(P_j - P_i)``. With i* the last i that
    is free in time, ``f(i*) <= R_j``, an earlier i only makes the message longer, so i* and those
    after it are all that matter. After i* the max is f(i), and within one segment of T the best i
    is the argmin of ``f(i) - slope * P_i`` over a slice. ``f(first) + T(shortest)`` bounds a slice
    from below; most are never looked at.

    Args:
        ready, bytes: 1-D, L times in seconds, not decreasing, and L sizes, not negative.
        comm: all-reduce time of a message; its delay and ``blocking`` play no part.

    Returns:
        Sizes of the buckets of one best plan. O(L^2) at worst, but O(L) of it outside numpy.

    Raises:
        ValueError: the arrays are malformed.

    Example:
        >>> ready, sizes = [0.1, 1.0, 1.9, 2.8], [1, 0.01, 0.01, 0.01]
        >>> exact(ready, sizes, CommModel.linear(1.0, 1.0)).tolist()
        [1, 3]

    Source: ours, for the problem of MG-WFBP, arXiv 1912.09268.
    """
    ready, bytes = checked(ready, bytes)
    count = len(ready)
    total = np.concatenate(([0.0], np.cumsum(bytes)))
    finish = np.zeros(count + 1)
    previous = np.zeros(count + 1, dtype=np.int64)
    starts, intercepts, slopes = (
        np.array(values) for values in (comm.starts, comm.intercepts, comm.slopes)
    )
    free = 0  # i*; it only grows, because both f and R do
    for j in range(1, count + 1):
        while free + 1 < j and finish[free + 1] <= ready[j - 1]:
            free += 1
        best = max(finish[free], ready[j - 1]) + comm(total[j] - total[free])
        best_i = free
        first = free + 1
        if first < j:
            # Messages total[j] - total[i] of segment k: low[k] <= i < high[k], low[k] = high[k+1].
            high = first + np.searchsorted(total[first:j], total[j] - starts, side="right")
            low = np.append(high[1:], first)
            used = np.flatnonzero(low < high)
            shortest = total[j] - total[high[used] - 1]
            bound = finish[low[used]] + intercepts[used] + slopes[used] * shortest
            for at in np.argsort(bound):
                if bound[at] >= best:
                    break
                k = used[at]
                part = slice(low[k], high[k])
                i = int(low[k] + np.argmin(finish[part] - slopes[k] * total[part]))
                value = finish[i] + comm(total[j] - total[i])
                if value < best:
                    best, best_i = value, i
        finish[j], previous[j] = best, best_i
    ends = [count]
    while ends[-1]:
        ends.append(int(previous[ends[-1]]))
    return _sizes(reversed(ends))


def coalesce(
    sizes: npt.ArrayLike, ready: npt.ArrayLike, bytes: npt.ArrayLike, comm: CommModel
) -> IntArray:
    """Merge neighbouring buckets where that makes the last message no later.

    :func:`exact` minimises the finish alone, and each message costs processor time that the model
    does not see. From the last bucket on, each takes in as many before it as its deadline allows:
    the last one's is its own finish, an earlier one's the moment at which the next must start.

    Args:
        sizes, ready, bytes, comm: as :func:`finish_times`.

    Example:
        >>> ready, net = [1.0, 2.0, 9.0], CommModel.linear(0.5, 0.1)
        >>> coalesce([1, 1, 1], ready, [1, 1, 1], net).tolist()
        [2, 1]
    """
    finish = np.concatenate(([0.0], finish_times(sizes, ready, bytes, comm)))
    ready, bytes = checked(ready, bytes)
    ends = np.concatenate(([0], np.cumsum(sizes)))
    total = np.concatenate(([0.0], np.cumsum(bytes)))[ends]
    last, deadline = len(ends) - 1, finish[-1]
    kept = [int(ends[-1])]
    while last:
        cost = comm(total[last] - total[:last])
        # A bucket alone always meets its deadline; rounding must not talk it out of that.
        done = np.maximum(finish[:last], ready[ends[last] - 1]) + cost
        first = int(np.argmax(done <= deadline)) if (done[:-1] <= deadline).any() else last - 1
        deadline -= cost[first]
        last = first
        kept.append(int(ends[last]))
    return _sizes(reversed(kept))


def greedy(ready: npt.ArrayLike, bytes: npt.ArrayLike, comm: CommModel) -> IntArray:
    """The buckets of the paper's Theorem 1, in O(L): merge what is ready within one latency.

    With ``a`` the latency and ``c`` when the bucket so far could start, tensor j+1 joins while
    ``R_{j+1} < c + a``; then ``c`` becomes ``max(previous finish, R_{j+1})``. The test looks at
    neighbours only, so many small gaps chain everything into one bucket: use :func:`exact`.

    Args, Returns, Raises: as :func:`exact`.

    Example:
        >>> ready, sizes = [0.1, 1.0, 1.9, 2.8], [1, 0.01, 0.01, 0.01]
        >>> greedy(ready, sizes, CommModel.linear(1.0, 1.0)).tolist()
        [4]

    Source: MG-WFBP, arXiv 1912.09268, Theorem 1 and Algorithm 1 (there in O(L^2)).
    """
    ready, bytes = checked(ready, bytes)
    sizes = [1]
    finished, begin, size = 0.0, ready[0], bytes[0]
    for at, more in zip(ready[1:], bytes[1:], strict=True):
        if at < begin + comm.latency:
            sizes[-1] += 1
            size += more
        else:
            finished = begin + comm(size)
            sizes.append(1)
            size = more
        begin = max(finished, at)
    return np.array(sizes, dtype=np.int64)


def wfbp(ready: npt.ArrayLike, bytes: npt.ArrayLike, comm: CommModel) -> IntArray:
    """Each gradient alone, as soon as it is ready (Poseidon, arXiv 1706.03292)."""
    ready, _ = checked(ready, bytes)
    return np.ones(len(ready), dtype=np.int64)


def single(ready: npt.ArrayLike, bytes: npt.ArrayLike, comm: CommModel) -> IntArray:
    """All gradients in one message, after backward (SyncEASGD, with which MG-WFBP compares)."""
    ready, _ = checked(ready, bytes)
    return np.array([len(ready)], dtype=np.int64)


def by_bytes(bytes: npt.ArrayLike, bucket_bytes: int) -> IntArray:
    """Buckets of at most ``bucket_bytes``, at least 1; a larger tensor is a bucket of its own.

    Raises:
        ValueError: the sizes are malformed or the limit is below 1.

    Example:
        >>> by_bytes([4, 4, 4, 20, 1], bucket_bytes=8).tolist()
        [2, 1, 1, 1]

    Source: the rule of PyTorch DDP's ``bucket_cap_mb`` and Horovod's fusion threshold.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    _, tensors = checked(np.zeros(np.shape(bytes)), bytes)
    sizes: list[int] = []
    room = -1.0
    for more in tensors:
        if more > room:
            sizes.append(0)
            room = float(bucket_bytes)
        sizes[-1] += 1
        room -= more
    return np.array(sizes, dtype=np.int64)


def finish_times(
    sizes: npt.ArrayLike, ready: npt.ArrayLike, bytes: npt.ArrayLike, comm: CommModel
) -> FloatArray:
    """When each bucket's message finishes on a link that is first in, first out.

    Args:
        sizes: 1-D, tensors of each bucket; positive integers that add up to L.
        ready, bytes, comm: as :func:`exact`.

    Returns:
        Seconds after backward starts, one a bucket; float64. A ``blocking`` delay is in them.

    Raises:
        ValueError: the arrays are malformed or do not belong together.

    Example:
        >>> finish_times([1, 1], [1.0, 2.0], [4, 4], CommModel.linear(0.5, 1.0)).tolist()
        [5.5, 10.0]
    """
    ready, bytes = checked(ready, bytes)
    groups = np.asarray(sizes)
    if groups.ndim != 1 or groups.dtype.kind not in "iu" or not (groups > 0).all():
        raise ValueError(f"sizes must be a 1-D array of positive integers, got {sizes!r}")
    if groups.sum() != len(ready):
        raise ValueError(f"the buckets hold {groups.sum()} tensors, but there are {len(ready)}")
    ends = np.cumsum(groups)
    total = np.concatenate(([0.0], np.cumsum(bytes)))
    cost = comm(np.diff(total[np.concatenate(([0], ends))]))
    if comm.blocking:
        return np.array(blocked_ends(ready[ends - 1].tolist(), cost.tolist(), comm.delay))
    finish = np.empty(len(groups))
    last = 0.0
    for group, begin in enumerate(ready[ends - 1]):
        last = max(last, begin) + cost[group]
        finish[group] = last
    return finish


_PLANNERS: dict[str, Callable[[FloatArray, FloatArray, CommModel], IntArray]] = {
    "exact": exact,
    "greedy": greedy,
    "wfbp": wfbp,
    "single": single,
}
METHODS = (*_PLANNERS, "bytes")


def plan(
    names: Sequence[str],
    ready: npt.ArrayLike,
    bytes: npt.ArrayLike,
    comm: CommModel,
    method: str = "exact",
    bucket_bytes: int | None = None,
    margin: float = 0.0,
) -> Plan:
    """The plan for gradients with these names, and how long it is predicted to take.

    The best plan for a link is tight on it: coalesced messages end just when the next ones have to
    start, and on a link 10% slower each is late. With a margin, "exact" plans for a link whose
    messages take ``1 + margin`` times as long; on no link up to that one does it then finish later
    than what is best there. Where ``comm`` is ``blocking``, the plan is for messages that each
    have the delay, an upper bound. What is predicted is exact, and for ``comm`` as it is.

    Args:
        names: L names, in the order in which the gradients become ready.
        ready, bytes, comm: as :func:`exact`, seconds after backward starts.
        method: one of :data:`METHODS`; "exact" is coalesced.
        bucket_bytes: limit of a bucket, for the method "bytes" and no other.
        margin: how much slower a link "exact" prepares for, as a part: 0.25 for a quarter.

    Raises:
        ValueError: the arguments are malformed or do not belong together.

    Example:
        >>> net = CommModel.linear(alpha=1e-3, beta=1e-9)
        >>> print(plan(["fc", "conv2", "conv1"], [0.001, 0.0012, 0.009], [4e6, 1e5, 1e5], net))
        exact: 3 tensors in 2 buckets, finished after 10.100 ms, 1.100 ms of it exposed
        bucket  tensors  names
             0        2  fc .. conv2
             1        1  conv1
    """
    ready, bytes = checked(ready, bytes)
    if len(names) != len(ready):
        raise ValueError(
            f"names, ready and bytes must agree: {len(names)} names, {len(ready)} times"
        )
    sizes = sizes_of(ready, bytes, comm, method, bucket_bytes, margin)
    ends = np.cumsum(sizes)
    finish = float(finish_times(sizes, ready, bytes, comm)[-1]) + comm.delay_behind
    buckets = tuple(tuple(names[end - size : end]) for end, size in zip(ends, sizes, strict=True))
    return Plan(buckets, method, finish, finish - float(ready[-1]))


def sizes_of(
    ready: npt.ArrayLike,
    bytes: npt.ArrayLike,
    comm: CommModel,
    method: str = "exact",
    bucket_bytes: int | None = None,
    margin: float = 0.0,
) -> IntArray:
    """The sizes of the buckets of :func:`plan`, with its arguments but the names."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    if (bucket_bytes is not None) != (method == "bytes"):
        raise ValueError(
            f"bucket_bytes belongs to the method 'bytes', got method {method!r} and "
            f"bucket_bytes {bucket_bytes}"
        )
    if not (math.isfinite(margin) and margin >= 0.0):
        raise ValueError(
            f"margin must be finite and at least 0, the part by which a link may be slower than "
            f"measured (0.25 for a quarter), got {margin}"
        )
    if bucket_bytes is not None:
        return by_bytes(bytes, bucket_bytes)
    slow = comm.each_alone()
    if method != "exact":
        return _PLANNERS[method](np.asarray(ready), np.asarray(bytes), slow)
    slow = slow.scaled(1.0, 1.0 + margin) if margin else slow
    return coalesce(exact(ready, bytes, slow), ready, bytes, slow)


def _sizes(ends: Iterable[int]) -> IntArray:
    return np.array([end - start for start, end in pairwise(ends)], dtype=np.int64)


def checked(ready: npt.ArrayLike, bytes: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Ready times and sizes as float64; ValueError says what makes them malformed."""
    times, sizes = np.asarray(ready, dtype=np.float64), np.asarray(bytes, dtype=np.float64)
    if times.ndim != 1 or times.shape != sizes.shape or times.size == 0:
        raise ValueError(
            "ready and bytes must be 1-D, of one length and not empty, "
            f"got shapes {times.shape} and {sizes.shape}"
        )
    bad = times[~(np.isfinite(times) & (times >= 0.0))]
    if bad.size:
        raise ValueError(f"ready times must be finite and not negative, got {bad[0]:g} s")
    drops = np.flatnonzero(np.diff(times) < 0.0)
    if drops.size:
        at = int(drops[0])
        raise ValueError(
            f"ready times must not decrease, but tensor {at} is ready at {times[at]:g} s and "
            f"tensor {at + 1} at {times[at + 1]:g} s; sort the tensors by ready time"
        )
    bad = sizes[~(np.isfinite(sizes) & (sizes >= 0.0))]
    if bad.size:
        raise ValueError(f"bytes must be finite and not negative, got {bad[0]:g}")
    return times, sizes


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
    """The plan for gradients of which only those of one group may share a bucket.

    Let f(i, j, ...) be the earliest finish of the first i tensors of one group, j of the next::

        f(0, 0, ...) = 0
        f(i, j, ...) = min over groups, and over i' < i of that group,
                       of max(f(i', j, ...), R_i) + T(P_i - P_i')

    This is exact. The number of states is the product of the groups' sizes; above 20 000,
    neighbours that are ready within d seconds of each other count as one tensor, with the smallest
    d that suffices. If ``T = a + b x``, the result then finishes at most d later than the best
    plan, and never later than the plans of the groups by themselves. At the end, buckets are
    merged where the last message finishes no later, as :func:`coalesce` does.

    Source: ours, for the problem of MG-WFBP, arXiv 1912.09268.
    """
    times, sizes = checked(ready, bytes)
    if not len(names) == len(groups) == len(times):
        raise ValueError(
            f"names, groups and ready must agree: {len(names)} names, {len(groups)} groups, "
            f"{len(times)} times"
        )
    labels = list(dict.fromkeys(groups))
    if len(labels) == 1:
        return plan(names, times, sizes, comm, method, bucket_bytes, margin)
    parts = []
    for label in labels:
        indices = np.array([i for i, group in enumerate(groups) if group == label], dtype=np.int64)
        parts.append(_Group(indices, times[indices], sizes[indices]))
    buckets = []
    for k, part in enumerate(parts):
        counts = sizes_of(part.ready, part.bytes, comm, method, bucket_bytes, margin)
        ends = np.cumsum(counts)
        buckets += [
            _Bucket(k, int(end - count), int(end)) for end, count in zip(ends, counts, strict=True)
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
    # Of tensors i'..i at [i, i']; 0 where there are none.
    costs = [comm(np.maximum(0.0, sums[:, None] - sums[None, :])) for sums in total]
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
        bucket = kept[at]
        before = next((i for i in range(at - 1, -1, -1) if kept[i].group == bucket.group), None)
        if before is not None:
            wider = _Bucket(bucket.group, kept[before].first, bucket.end)
            merged = [*kept[:before], *kept[before + 1 : at], wider, *kept[at + 1 :]]
            if _finish(merged, groups, comm) <= finish:
                kept = merged
        at -= 1
    return kept
