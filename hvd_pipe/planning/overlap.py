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
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.messages import Messages, gradient_messages, merged_sizes
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.profile import FORWARD, ModelProfile
from hvd_pipe.planning.samples import fit_line
from hvd_pipe.strategy import MergedGradient

__all__ = [
    "Pass",
    "TimedMessage",
    "fitted",
    "in_order",
    "overlapped_messages",
    "overlapped_s",
    "overlapped_step",
    "plan_overlap",
    "send_order",
]

PARTS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40)
"""Into about how many messages of one size the gradients are divided, to see which is best."""

WORTH = 0.005
"""More messages have to save this part of a step: what they cost beside is not in the model."""

STEPS = 6  # until a simulated step takes as long as the one before

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pass:
    """What a worker computes in a step, and when its gradients come and its weights are needed.

    Args:
        ready_s: By gradient, seconds after backward starts at which it is computed.
        needed_s: By gradient, seconds after forward starts at which its weight is first used.
        bytes: By gradient, as it is sent.
        forward_s: Seconds from the end of a step to the start of the next backward pass.
        backward_s: Seconds from there to the end of the step; no gradient is ready later.

    Raises:
        ValueError: Arrays of different lengths, none, or a time or size that is negative.
    """

    ready_s: FloatArray
    needed_s: FloatArray
    bytes: FloatArray
    forward_s: float
    backward_s: float

    def __post_init__(self) -> None:
        lengths = {len(each) for each in (self.ready_s, self.needed_s, self.bytes)}
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
    """A bucket, or a piece of one.

    Args:
        bucket: Its number.
        ready_s: After backward starts.
        needed_s: After forward starts.
        seconds: That the link is busy with it.
        bytes: That it carries.
    """

    bucket: int
    ready_s: float
    needed_s: float
    seconds: float
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
    `send_order`'s, and the step `overlapped_s`.

    Args:
        names: Of the gradients.
        work: Their times and sizes, in the same order.
        comm: All-reduce time of a message that is sent alone.
        dtypes: By gradient, what those of one bucket have alike; None: all are.
        parts: Which numbers of parts to try.

    Returns:
        A plan whose ``order`` has a number for each message, whose ``predicted_s`` is the step,
        and whose ``exposed_s`` is what of it is no computation.

    Example:
        >>> work = Pass(
        ...     np.array([0.0, 1.0, 2.0]), np.array([2.0, 1.0, 0.0]), np.array([6.0, 2.0, 1.0]),
        ...     forward_s=3.0, backward_s=3.0,
        ... )
        >>> plan = plan_overlap("cba", work, CommModel.linear(0.0, 0.5), parts=(1, 6))
        >>> plan.buckets, plan.order, plan.predicted_s
        ((('c',), ('b',), ('a',)), (0, 0, 1, 1, 0, 2, 0), 6.75)
    """
    kinds = list(dtypes) if dtypes is not None else [None] * len(names)
    best: tuple[float, Plan] | None = None
    for count in sorted(set(parts)):
        buckets, pieces = _partition(work, kinds, count)
        messages = _messages(work, comm, buckets, pieces)
        sent = [messages[i] for i in _order(messages)]
        seconds = overlapped_s(work, sent)
        if best is None or seconds < (1.0 - WORTH) * best[0]:
            compute = work.forward_s + work.backward_s
            named = tuple(tuple(names[i] for i in bucket) for bucket in buckets)
            plan = Plan(
                named,
                "overlap",
                predicted_s=seconds,
                exposed_s=max(0.0, seconds - compute),
                order=tuple(each.bucket for each in sent),
            )
            best = seconds, plan
    assert best is not None
    return best[1]


def fitted(seconds: Sequence[tuple[float, float]]) -> CommModel:
    """The line through what messages have taken in training, by least squares.

    Args:
        seconds: Bytes and seconds of each message, of two sizes at least.

    Example:
        >>> fitted([(100, 3.0), (200, 5.0), (300, 7.0)])(50)
        2.0
    """
    bytes, times = (np.array(each, dtype=np.float64) for each in zip(*seconds, strict=True))
    if np.ptp(bytes) == 0.0:
        return CommModel.linear(0.0, float(np.median(times) / max(bytes[0], 1.0)))
    return CommModel.linear(*fit_line(bytes, times, np.ones(len(bytes))))


def overlapped_step(
    method: MergedGradient, profile: ModelProfile, comm: CommModel
) -> tuple[float, Messages]:
    """Seconds of a step of a model, and its messages in the order in which the link carries them.

    Each layer is updated just before its forward pass. The profile has the time of all updates,
    which is divided among the layers by their bytes. The messages are those of `plan_overlap`, or
    of the plan or the bucket size that the method names.

    The profile of a running job (`choice.profile_of`) has one number for the whole forward pass.
    Forward is then assumed to be spread over the parameters as backward is, in reverse order.

    Args:
        method: With ``overlap="forward"``.
        profile: A worker's own work.
        comm: All-reduce time of a message, codec included.

    Raises:
        ValueError: A given plan is not about this profile's gradients.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model = ModelProfile((LayerProfile("a", 1, 1.0, 1.0), LayerProfile("b", 7, 1.0, 1.0)))
        >>> for plan in ("wfbp", "auto"):
        ...     method = MergedGradient(plan=plan, overlap="forward")
        ...     step, sent = overlapped_step(method, model, CommModel.linear(0.0, 0.5))
        ...     print(step, sent.bytes.tolist())
        7.0 [7.0, 1.0]
        6.0 [3.5, 1.0, 3.5]
    """
    if not profile.gradient_order():
        return profile.compute_s, gradient_messages(method, profile, comm)
    work, sent = overlapped_messages(method, profile, comm)
    bytes = np.array([each.bytes for each in sent])
    ready = np.maximum.accumulate([each.ready_s for each in sent])
    return float(overlapped_s(work, sent)), Messages(ready, bytes, comm(bytes), comm.delay)


def overlapped_messages(
    method: MergedGradient, profile: ModelProfile, comm: CommModel
) -> tuple[Pass, list[TimedMessage]]:
    """What a worker computes, and its messages in the order in which the link carries them.

    Args:
        method, profile, comm: As for `overlapped_step`.

    Raises:
        ValueError: A given plan is not about this profile's gradients, or it has none.
    """
    names, work, plan = profile.gradient_order(), _work(profile), method.load_plan()
    if plan is not None:
        gradient_messages(method, profile, comm)  # raises where the plan is another model's
    elif method == MergedGradient(overlap="forward"):
        plan = plan_overlap(names, work, comm)
    else:
        ends = np.cumsum(merged_sizes(method, work.ready_s, work.bytes, comm)).tolist()
        buckets = [names[begin:end] for begin, end in itertools.pairwise([0, *ends])]
        plan = Plan(tuple(buckets), str(method.plan))
    if plan.order is None:
        plan = in_order(plan, names, work)
    assert plan.order is not None
    index = {name: i for i, name in enumerate(names)}
    groups = [[index[name] for name in bucket] for bucket in plan.buckets]
    pieces = [plan.order.count(number) for number in range(len(groups))]
    of_bucket = {each.bucket: each for each in _messages(work, comm, groups, pieces)}
    return work, [of_bucket[number] for number in plan.order]


def _work(profile: ModelProfile) -> Pass:
    bytes = profile.gradient_bytes().astype(np.float64)
    update_s = {
        name: profile.update_s * size / bytes.sum()
        for name, size in zip(profile.gradient_order(), bytes.tolist(), strict=True)
    }
    needed_s, now = [], 0.0
    for layer, forward_s in zip(profile.layers, _forward_s(profile), strict=True):
        if layer.gradient_bytes:
            needed_s.append(now)
        now += forward_s + update_s.get(layer.name, 0.0)
    return Pass(profile.ready_times(), np.array(needed_s[::-1]), bytes, now, profile.backward_s)


def _forward_s(profile: ModelProfile) -> list[float]:
    """Seconds of each layer's forward pass; a running job's are assumed."""
    seconds = [layer.forward_s for layer in profile.layers]
    if profile.layers[0].name != FORWARD:
        return seconds
    parts = [layer.backward_s for layer in profile.layers]
    if not any(parts):
        parts = [float(layer.gradient_bytes > 0) for layer in profile.layers]
    return [sum(seconds) * part / sum(parts) for part in parts]


def in_order(plan: Plan, names: Sequence[str], work: Pass) -> Plan:
    """The buckets of a plan, each in one message, in the order in which they are best sent.

    The link is taken to be busy for as long as the worker. What the plan predicts is left out: it
    counts on a barrier.

    Args:
        plan: Whose buckets.
        names, work: As for `plan_overlap`.
    """
    index = {name: i for i, name in enumerate(names)}
    buckets = [[index[name] for name in bucket] for bucket in plan.buckets]
    total = max(float(work.bytes.sum()), 1.0)
    comm = CommModel.linear(0.0, (work.forward_s + work.backward_s) / total)
    messages = _messages(work, comm, buckets, [1] * len(buckets))
    order = tuple(messages[i].bucket for i in _order(messages))
    return replace(plan, predicted_s=None, exposed_s=None, order=order)


def send_order(
    ready_s: Sequence[float], needed_s: Sequence[float], seconds: Sequence[float]
) -> list[int]:
    """The order of messages on one link that always sends what is needed first of what is ready.

    A message is not interrupted. Of two that are needed at the same time, the earlier one goes.

    Args:
        ready_s: By message, when it can leave.
        needed_s: By message, when it is needed.
        seconds: By message, how long the link is busy with it.

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


def _partition(
    work: Pass, kinds: Sequence[Hashable], count: int
) -> tuple[list[list[int]], list[int]]:
    """Buckets of about a ``count``-th of all bytes, and into how many pieces each is cut."""
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
    return buckets, [max(1, math.ceil(size / part - 1e-6)) for size in sizes]


def _messages(
    work: Pass, comm: CommModel, buckets: Sequence[Sequence[int]], pieces: Sequence[int]
) -> list[TimedMessage]:
    found = []
    for number, (bucket, count) in enumerate(zip(buckets, pieces, strict=True)):
        own = list(bucket)
        # The last bucket has the control flags, which are known at the end of the step.
        last = number == len(buckets) - 1
        ready = work.backward_s if last else float(work.ready_s[own].max())
        needed = float(work.needed_s[own].min())
        size = float(work.bytes[own].sum()) / count
        seconds = comm(size) + comm.delay
        found += [TimedMessage(number, ready, needed, seconds, size)] * count
    return found


def _order(messages: Sequence[TimedMessage]) -> list[int]:
    return send_order(
        [each.ready_s for each in messages],
        [each.needed_s for each in messages],
        [each.seconds for each in messages],
    )
