"""Messages that travel behind backward and behind the next forward pass: synchronous, no barrier.

Synchronous SGD needs a layer's new weights before that layer's next forward pass, no earlier::

    worker  | backward t     | forward t+1        | backward t+1
    link         | c   b  a1 a2 | a3  b  c  c |
                                ^ a is needed here, c only here ^

So what is needed first is sent first, and large gradients travel in pieces, so that they can be
overtaken. A step takes ``max(c, m)`` at best: c is a worker's own work, m its messages' time.

The order is fixed before training and the same on all ranks. Ranks that choose by themselves, with
few messages in flight, would wait for each other for ever.

Source: Jayarajan et al., "Priority-based Parameter Propagation" (MLSys 2019, arXiv 1905.03960);
Peng et al., "ByteScheduler" (SOSP 2019). The partition that follows from simulated steps is ours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning.comm import CommModel, fit_line
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.tuner import HIDDEN, Gradients, Trial, fitted_to_waits

PARTS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40)
"""Into about how many messages of one size the gradients are divided, to see which is best."""

WORTH = 0.005
"""The part of a step that more messages must save: the model leaves out some of their cost."""

CHANGE_WORTH = 0.002
"""The part of a step that a change of one or two buckets must save; each of them is small."""

CHANGES = 1000
"""How many changes are simulated at most: about a quarter of a second."""

CUTS, MOVED = (0.25, 0.5, 0.75), (1, 3, 8)
"""Where a bucket may be divided, by its tensors, and how many may move to the next one."""

STEPS = 6  # until a simulated step takes as long as the one before

FloatArray = npt.NDArray[np.float64]
Partition = list[tuple[list[int], int]]
"""Buckets, in the order in which they are ready, and into how many pieces each is cut."""


@dataclass(frozen=True)
class Pass:
    """What a worker computes in a step, and when its gradients come and its weights are needed."""

    ready_s: FloatArray  # by gradient, seconds after backward starts at which it is computed
    needed_s: FloatArray  # by gradient, after forward starts at which its weight is first used
    bytes: FloatArray  # by gradient, as it is sent
    forward_s: float  # from the end of a step to the start of the next backward pass
    backward_s: float  # from there to the end of the step; no gradient is ready later

    def __post_init__(self) -> None:
        lengths = {len(values) for values in (self.ready_s, self.needed_s, self.bytes)}
        if len(lengths) != 1 or lengths == {0}:
            raise ValueError(
                f"give each gradient a time, a need and a size, got {lengths} of them"
            )
        arrays = (self.ready_s, self.needed_s, self.bytes)
        # numpy's minimum of NaN and others is NaN.
        least = np.min([*map(np.min, arrays), self.forward_s, self.backward_s])
        if not least >= 0.0:
            raise ValueError(f"times and sizes must be 0 or more, got {least}")


@dataclass(frozen=True)
class TimedMessage:
    """A bucket, or a piece of one."""

    bucket: int
    ready_s: float  # after backward starts
    needed_s: float  # after forward starts
    seconds: float  # that the link is busy with it
    bytes: float


def plan_overlap(
    names: Sequence[str],
    work: Pass,
    comm: CommModel,
    dtypes: Sequence[Hashable] | None = None,
    parts: Sequence[int] = PARTS,
) -> Plan:
    """The buckets, their pieces and the order of all messages with which a step is shortest.

    Gradients are merged, in the order in which they are ready, until a part of all bytes is full;
    a bucket that is larger than a part is cut into pieces. For each number of parts the order is
    `send_order`'s, and the step `overlapped_s`. Where there is a choice of parts, the best one is
    improved: buckets are divided, merged, cut otherwise, or give tensors to the next one, as long
    as that saves time. What forward needs first is small then, and what it needs last is large.
    """
    kinds = list(dtypes) if dtypes is not None else [None] * len(names)
    best: tuple[float, Partition] | None = None
    for count in sorted(set(parts)):
        partition = _partition(work, kinds, count)
        seconds = overlapped_s(work, _sent(work, comm, partition))
        if best is None or seconds < (1.0 - WORTH) * best[0]:
            best = seconds, partition
    assert best is not None
    seconds, partition = _improved(work, comm, kinds, *best) if len(parts) > 1 else best
    return Plan(
        tuple(tuple(names[i] for i in bucket) for bucket, _ in partition),
        "overlap",
        predicted_s=seconds,
        exposed_s=max(0.0, seconds - work.forward_s - work.backward_s),
        order=tuple(message.bucket for message in _sent(work, comm, partition)),
    )


def _improved(
    work: Pass, comm: CommModel, kinds: Sequence[Hashable], seconds: float, partition: Partition
) -> tuple[float, Partition]:
    """Change a partition as long as that saves time; return the seconds of a step, and it."""
    left = CHANGES
    while True:
        changed = list(itertools.islice(_changes(kinds, partition), left))
        left -= len(changed)
        times = [overlapped_s(work, _sent(work, comm, one)) for one in changed]
        if not times or min(times) >= (1.0 - CHANGE_WORTH) * seconds:
            return seconds, partition
        seconds = min(times)
        partition = changed[times.index(seconds)]


def _changes(kinds: Sequence[Hashable], partition: Partition) -> Iterator[Partition]:
    """Yield the partitions that differ from this one in a bucket, or in two that meet."""
    for i, (bucket, pieces) in enumerate(partition):
        before, after = partition[:i], partition[i + 1 :]
        for count in {pieces + 1, max(1, pieces - 1)} - {pieces}:
            yield [*before, (bucket, count), *after]
        for cut in sorted({round(part * len(bucket)) for part in CUTS} - {0, len(bucket)}):
            halves = (bucket[:cut], -(-pieces // 2)), (bucket[cut:], max(1, pieces // 2))
            yield [*before, *halves, *after]
        if not after or kinds[bucket[0]] != kinds[after[0][0][0]]:
            continue
        (following, others), after = after[0], after[1:]
        both = [*bucket, *following]
        yield [*before, (both, max(pieces, others)), *after]
        for moved in (*MOVED, *(-count for count in MOVED)):
            cut = len(bucket) + moved
            if 0 < cut < len(both):
                yield [*before, (both[:cut], pieces), (both[cut:], others), *after]


def fitted(seconds: Sequence[tuple[float, float]], starts: float = 1.0) -> CommModel:
    """The least-squares line through messages' seconds in training; its start times ``starts``."""
    bytes, times = (np.array(column, dtype=np.float64) for column in zip(*seconds, strict=True))
    if np.ptp(bytes) == 0.0:
        return CommModel.linear(0.0, float(np.median(times) / max(bytes[0], 1.0)))
    start, per_byte = fit_line(bytes, times, np.ones(len(bytes)))
    return CommModel.linear(starts * start, per_byte)


def in_order(plan: Plan, names: Sequence[str], work: Pass) -> Plan:
    """A plan with an order of sending, without its predictions, which count on a barrier.

    The link is assumed to be busy for as long as the worker.
    """
    index = {name: i for i, name in enumerate(names)}
    buckets = [[index[name] for name in bucket] for bucket in plan.buckets]
    total = max(float(work.bytes.sum()), 1.0)
    comm = CommModel.linear(0.0, (work.forward_s + work.backward_s) / total)
    sent = _sent(work, comm, [(bucket, 1) for bucket in buckets])
    order = tuple(message.bucket for message in sent)
    return replace(plan, predicted_s=None, exposed_s=None, order=order)


def send_order(
    ready_s: Sequence[float], needed_s: Sequence[float], seconds: Sequence[float]
) -> list[int]:
    """The order of messages on one link that always sends what is needed first of what is ready.

    A message is not interrupted. Of two that are needed at the same time, the earlier one goes.

    Example:
        >>> send_order([0.0, 1.0, 2.0], [3.0, 2.0, 1.0], [1.5, 1.5, 1.5])
        [0, 1, 2]
        >>> send_order([0.0, 0.0, 1.0], [3.0, 2.0, 1.0], [1.5, 1.5, 1.5])
        [1, 2, 0]

    Source: the rule is that of Jayarajan et al., arXiv 1905.03960.
    """
    left, order, link = list(range(len(seconds))), list[int](), 0.0
    while left:
        link = max(link, min(ready_s[i] for i in left))
        first = min((i for i in left if ready_s[i] <= link), key=lambda i: (needed_s[i], i))
        left.remove(first)
        order.append(first)
        link += seconds[first]
    return order


def overlapped_s(work: Pass, sent: Sequence[TimedMessage]) -> float:
    """Seconds of a step, once it has settled, when these messages are sent in this order.

    The link carries one message at a time. A worker that comes to a weight whose message has not
    arrived waits for it.
    """
    begin = link = end = 0.0  # of a step; when the link is free; of the step before
    arrived = [0.0] * len(sent)
    gates = sorted(range(len(sent)), key=lambda i: sent[i].needed_s)
    for _ in range(STEPS):
        waited = 0.0  # at the gates of this forward pass
        for i in gates:
            waited = max(waited, arrived[i] - (begin + sent[i].needed_s))
        backward = begin + work.forward_s + max(0.0, waited)
        for i, message in enumerate(sent):
            link = max(link, backward + message.ready_s) + message.seconds
            arrived[i] = link
        end, begin = begin, backward + work.backward_s
    return begin - end


def _partition(work: Pass, kinds: Sequence[Hashable], count: int) -> Partition:
    """Return buckets of about a ``count``-th of all bytes."""
    part = max(float(work.bytes.sum()) / count, 1.0)
    by_ready = sorted(range(len(kinds)), key=lambda i: (float(work.ready_s[i]), i))
    open_: dict[Hashable, list[int]] = {}
    buckets: list[list[int]] = []
    for i in by_ready:
        bucket = open_.setdefault(kinds[i], [])
        bucket.append(i)
        # Rounding must not leave a part open that is full.
        if float(work.bytes[bucket].sum()) >= part * (1.0 - 1e-9):
            buckets.append(open_.pop(kinds[i]))
    buckets += list(open_.values())
    buckets.sort(key=lambda bucket: float(work.ready_s[bucket].max()))
    sizes = [float(work.bytes[bucket].sum()) for bucket in buckets]
    counts = [max(1, math.ceil(size / part - 1e-6)) for size in sizes]
    return list(zip(buckets, counts, strict=True))


def _sent(work: Pass, comm: CommModel, partition: Partition) -> list[TimedMessage]:
    """Return the messages in the order in which they are sent."""
    messages = timed_messages(work, comm, partition)
    order = send_order(
        [message.ready_s for message in messages],
        [message.needed_s for message in messages],
        [message.seconds for message in messages],
    )
    return [messages[i] for i in order]


def timed_messages(work: Pass, comm: CommModel, partition: Partition) -> list[TimedMessage]:
    """Return the messages of a partition, bucket by bucket."""
    messages = []
    for number, (members, count) in enumerate(partition):
        # The last bucket has the control flags, which are known at the end of the step.
        last = number == len(partition) - 1
        ready = work.backward_s if last else float(work.ready_s[members].max())
        needed = float(work.needed_s[members].min())
        size = float(work.bytes[members].sum()) / count
        seconds = comm(size) + comm.delay
        messages += [TimedMessage(number, ready, needed, seconds, size)] * count
    return messages


def first_deferred(plan: Plan) -> int:
    """How many messages of a plan's order must have arrived when the next forward pass begins.

    Those up to the last one of the last bucket, which has what is needed first.
    """
    assert plan.order is not None
    return len(plan.order) - plan.order[::-1].index(len(plan.buckets) - 1)


def deferring_plan(tried: Sequence[Trial], gradients: Gradients) -> Plan | None:
    """The plan without a barrier, by trials of plans with it; None where it defers nothing.

    A message costs what their waits show. Forward is taken to be all of a step that is no backward
    and no wait, spread over the parameters as backward is, in reverse order.
    """
    best, backward_s = min(tried, key=lambda trial: trial.step_s), float(gradients.ready_s.max())
    if best.wait_s <= HIDDEN * best.step_s:
        return None
    forward_s = max(0.0, best.step_s - best.wait_s - backward_s)
    needed_s = forward_s * (1.0 - gradients.ready_s / max(backward_s, 1e-9))
    work = Pass(gradients.ready_s, needed_s, gradients.bytes, forward_s, backward_s)
    comm = fitted_to_waits(tried, gradients)
    plan = plan_overlap(gradients.names, work, comm, gradients.kinds)
    assert plan.order is not None
    return plan if first_deferred(plan) < len(plan.order) else None
