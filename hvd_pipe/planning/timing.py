"""Time of a step of every method, in closed form, once it has settled.

Forward f, backward b and update u follow each other on a worker, ``c = f + b + u``. One link
carries one message at a time, first in, first out, while the worker computes; a codec's time
counts as the message's. All workers are alike (:mod:`hvd_pipe.planning.simulate` lets them
differ), and warm-up steps are not counted. With m the seconds of a step's messages, d the delay of
the network, and ``last`` when messages that have the link to themselves arrive after backward
starts (where it is ``blocking``, d is in ``last``, and Pipe-SGD's steps are followed one by one)::

    conventional     c + m + d                       no overlap, a message a tensor
    merged-gradient  f + max(b, last) + u
                     c + what gates wait     overlap=forward: `overlap.overlapped_step`
    horovod          f + max(b, last) + u            buckets made at cycle ticks
    pipe-sgd         max(c, m, (f + last + u) / K)   K = 2; wider is as fast while all keep step
    local-sgd        (k c + m + d) / k               m: of one average of the model
    cocod            max(k c, m + d) / k             fragments, within=node: `turns`

Each comes with its limit, which no order, grouping or slicing of messages beats.

Source: MG-WFBP, arXiv 1912.09268; Pipe-SGD, arXiv 1811.03619; CoCoD-SGD, arXiv 1906.12043.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvd_pipe.planning import merge
from hvd_pipe.planning.codec import NONE, CodecCost
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.messages import (
    Messages,
    gradient_messages,
    least_busy_s,
    model_messages,
    synchronous_limit,
)
from hvd_pipe.planning.methods import (
    Conventional,
    HorovodFusion,
    LocalSGD,
    Method,
    WidePipeSGD,
    label,
    parse,
)
from hvd_pipe.planning.overlap import overlapped_step
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.turns import averaged_behind
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD

__all__ = [
    "StepTime",
    "cocod",
    "conventional",
    "horovod_fusion",
    "local_sgd",
    "merged_gradient",
    "pipe_sgd",
    "step_time",
]

TICK = 1e-9
"""A gradient that comes this part of a cycle after Horovod's tick is still seen by it."""


@dataclass(frozen=True)
class StepTime:
    """What a step takes once the method has settled; means over a round where there are rounds.

    Args:
        method: as :func:`hvd_pipe.planning.methods.label` writes it.
        compute_s: seconds of a worker's own work: forward, backward, update (two with prediction).
        comm_s: seconds in which the link is busy.
        total_s: seconds of a step.
        limit_s: lower bound of ``total_s``: the method's physical limit.
        messages: how many a step.

    Example:
        >>> time = StepTime("wfbp", compute_s=1, comm_s=0.5, total_s=1.25, limit_s=1, messages=3)
        >>> time.exposed_s, time.of_limit, time.speedup(workers=10)
        (0.25, 0.8, 8.0)
    """

    method: str
    compute_s: float
    comm_s: float
    total_s: float
    limit_s: float
    messages: float

    @property
    def exposed_s(self) -> float:
        """Seconds per step in which computation waits for the network."""
        return max(0.0, self.total_s - self.compute_s)

    @property
    def of_limit(self) -> float:
        """Limit over total: 1.0 is as fast as the method can be on this network."""
        return min(1.0, self.limit_s / self.total_s) if self.total_s > 0.0 else 1.0

    def speedup(self, workers: int) -> float:
        """Samples per second over those of one worker that computes alone."""
        return workers * self.compute_s / self.total_s if self.total_s > 0.0 else float(workers)


def step_time(
    method: Method | str,
    profile: ModelProfile,
    comm: CommModel,
    codec: CodecCost = NONE,
    node: CommModel | None = None,
) -> StepTime:
    """The time of a step of any method.

    Args:
        method: a method or its string, such as ``"cocod:period=8"``.
        profile: the model on one worker.
        comm: all-reduce time of an uncompressed message.
        codec: compression of what travels.
        node: all-reduce time within a node, for ``within=node`` (`turns.node_comm`).

    Raises:
        TypeError, ValueError: an unknown method, or a plan of another model.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> layers = (LayerProfile("conv", 2, 3.0, 1.0), LayerProfile("fc", 10, 1.0, 1.0))
        >>> net = CommModel.linear(0.5, 1.0)
        >>> for name in ("conventional", "wfbp", "pipe-sgd", "local-sgd:period=4", "cocod"):
        ...     print(name, step_time(name, ModelProfile(layers), net).total_s)
        conventional 19.0
        wfbp 16.0
        pipe-sgd 12.5
        local-sgd:period=4 9.125
        cocod 6.0
    """
    method = parse(method)
    if isinstance(method, Conventional):
        return conventional(profile, comm, codec)
    if isinstance(method, MergedGradient):
        return _overlapped(method, profile, comm, codec)
    if isinstance(method, HorovodFusion):
        return horovod_fusion(profile, comm, codec, method.threshold_bytes, method.cycle_s)
    if isinstance(method, PipeSGD | WidePipeSGD):
        return _pipelined(method, profile, comm, codec)
    if isinstance(method, LocalSGD):
        return local_sgd(profile, comm, codec, method.period)
    behind = averaged_behind(method, profile, comm, codec, node)
    return _result(method, profile.compute_s, *behind, method.period)


def conventional(profile: ModelProfile, comm: CommModel, codec: CodecCost = NONE) -> StepTime:
    """Synchronous SGD without overlap: forward, backward, a message a tensor, update.

    ``total = c + sum over tensors of T(bytes) + delay``. The limit is that of synchronous SGD,
    which may overlap (:func:`hvd_pipe.planning.messages.synchronous_limit`).

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model = ModelProfile((LayerProfile("a", 4, 1.0), LayerProfile("b", 8, 1.0)))
        >>> conventional(model, CommModel.linear(0.5, 1.0)).total_s
        15.0
    """
    method, net = Conventional(), comm.compressed(codec)
    sent = gradient_messages(method, profile, net)
    total = profile.compute_s + sent.total_s + sent.delay_s
    return _result(method, profile.compute_s, sent, total, synchronous_limit(profile, net))


def merged_gradient(
    profile: ModelProfile, comm: CommModel, codec: CodecCost = NONE, method: str = "exact"
) -> StepTime:
    """Synchronous SGD whose messages travel behind backward, in merged groups (MG-WFBP).

    ``total = f + max(b, finish + delay) + u``, finish being the last bucket's of
    ``finish_i = max(finish_{i-1}, R_i) + T(bucket i)``. The limit is
    :func:`hvd_pipe.planning.messages.synchronous_limit`, whose proof is there.

    Args:
        profile, comm, codec: as :func:`step_time`.
        method: "exact" (coalesced, as the job does), "greedy", "wfbp" or "single".

    Raises:
        ValueError: another method.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model = ModelProfile((LayerProfile("a", 4, 1.0), LayerProfile("b", 8, 9.0)))
        >>> net = CommModel.linear(0.5, 0.1)
        >>> for method in ("exact", "greedy", "wfbp", "single"):
        ...     print(method, round(merged_gradient(model, net, method=method).exposed_s, 6))
        exact 1.2
        greedy 1.2
        wfbp 1.2
        single 1.7

    Source: MG-WFBP, arXiv 1912.09268; wfbp: Poseidon, arXiv 1706.03292; single: SyncEASGD.
    """
    if method not in ("exact", "greedy", "wfbp", "single"):
        raise ValueError(f"method must be exact, greedy, wfbp or single, got {method!r}")
    plan = "auto" if method == "exact" else method
    return _overlapped(MergedGradient(plan=plan), profile, comm, codec)


def horovod_fusion(
    profile: ModelProfile,
    comm: CommModel,
    codec: CodecCost = NONE,
    threshold_bytes: int = HorovodFusion.threshold_bytes,
    cycle_s: float = HorovodFusion.cycle_s,
) -> StepTime:
    """Stock Horovod: at each tick of its loop, what is ready is fused and sent.

    The one background thread looks every ``cycle_s``, or as soon as it is back from its messages
    where those took longer. What is ready then travels at once, in order, in messages of at most
    the threshold (a larger tensor goes alone). A step's ticks are counted from its start: in a job
    they stand anywhere, which is worth up to a cycle. Negotiation between ranks is part of T where
    T was measured through Horovod. Limit: as :func:`merged_gradient`'s, as these are buckets, too.

    Args:
        profile, comm, codec: as :func:`step_time`.
        threshold_bytes, cycle_s: as :class:`hvd_pipe.planning.methods.HorovodFusion`.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model = ModelProfile((LayerProfile("a", 4, 1.0), LayerProfile("b", 8, 1.25)))
        >>> net = CommModel.linear(0.5, 0.25)
        >>> time = horovod_fusion(model, net, cycle_s=1.0)  # ticks at 2, 4.5, after the message
        >>> time.total_s, time.messages
        (6.0, 2.0)

    Source: horovod/common/operations.cc, RunLoopOnce; controller.cc, FuseResponses.
    """
    method = HorovodFusion(threshold_bytes, cycle_s)
    net = comm.compressed(codec)
    ready, bytes = profile.forward_s + profile.ready_times(), profile.gradient_bytes()
    tick, end, busy, sent, messages = 0.0, 0.0, 0.0, 0, 0
    while sent < len(bytes):
        late = float(ready[sent]) - tick
        if late > TICK * cycle_s:
            tick += cycle_s * math.ceil(late / cycle_s - TICK) if cycle_s > 0.0 else late
        seen = sent + int((ready[sent:] <= tick + TICK * cycle_s).sum())
        end = tick + net.delay - net.delay_behind
        for count in merge.by_bytes(bytes[sent:seen], max(1, threshold_bytes)):
            seconds = net(float(bytes[sent : sent + count].sum()))
            end, busy, sent, messages = end + seconds, busy + seconds, sent + count, messages + 1
        tick = max(tick + cycle_s, end)
    arrival = end + net.delay_behind if messages else 0.0
    return StepTime(
        method=label(method),
        compute_s=profile.compute_s,
        comm_s=busy,
        total_s=max(profile.forward_s + profile.backward_s, arrival) + profile.update_s,
        limit_s=synchronous_limit(profile, net),
        messages=float(messages),
    )


def pipe_sgd(
    profile: ModelProfile,
    comm: CommModel,
    codec: CodecCost = NONE,
    width: int = 2,
    bucket_bytes: int | None = None,
) -> StepTime:
    """Pipe-SGD of width K: an update applies the average of K - 1 steps before.

    ``total = max(c, m, (f + last + u) / K)``, m the sum over its buckets: a worker takes c a step,
    the link m, and K steps hold one after another a step's forward pass, its messages until they
    have arrived, and the update that applies them. Without delay the third term is never the
    largest from K = 2 on, as last <= b + m. K = 1 is synchronous SGD that sends its buckets after
    backward: c + m + delay.

    Limit: ``max(c, least_seconds(bytes), synchronous_limit / K)``. The worker must do c and the
    link carry the bytes in each step; and a step's forward, backward, messages and the update that
    applies them come one after another as in a synchronous step, within K steps.

    Args:
        profile, comm, codec: as :func:`step_time`.
        width: the paper's K, at least 1.
        bucket_bytes: buckets are filled up to this; None: as planned, or 8 MiB if K is not 2.

    Raises:
        TypeError, ValueError: a width or size below 1.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model, net = ModelProfile((LayerProfile("a", 4, 1.0),)), CommModel.linear(0.5, 0.25)
        >>> [pipe_sgd(model, net, width=width).total_s for width in (1, 2, 3)]
        [2.5, 1.5, 1.5]

    Source: Li et al., "Pipe-SGD", arXiv 1811.03619.
    """
    if width == 2:
        return _pipelined(PipeSGD(bucket_bytes=bucket_bytes), profile, comm, codec)
    limit = WidePipeSGD.bucket_bytes if bucket_bytes is None else bucket_bytes
    return _pipelined(WidePipeSGD(width, limit), profile, comm, codec)


def local_sgd(
    profile: ModelProfile, comm: CommModel, codec: CodecCost = NONE, period: int = 4
) -> StepTime:
    """Local SGD: k steps, then all wait while the models are averaged in one message.

    ``total = (k c + m + delay) / k``. Limit: ``((k - 1) c + synchronous_limit) / k``: k - 1 steps
    are the worker's own; in the last, tensor j of the model is final after its gradient, R_j, and
    the next round needs all of them, so the proof of the synchronous limit holds for models, too.

    Args:
        profile, comm, codec: as :func:`step_time`.
        period: k, at least 1.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model, net = ModelProfile((LayerProfile("a", 4, 1.0),)), CommModel.linear(0.5, 0.25)
        >>> local_sgd(model, net, period=3).total_s
        1.5

    Source: Stich, arXiv 1805.09767.
    """
    method, compute = LocalSGD(period), profile.compute_s
    sent = model_messages(method, profile, comm, codec)
    # (k c + m + delay) / k, written so that nothing is lost where m is far below k c.
    total = compute + sent.arrival_s / period
    limit = synchronous_limit(profile, comm.compressed(codec))
    return _result(method, compute, sent, total, compute + (limit - compute) / period, period)


def cocod(
    profile: ModelProfile, comm: CommModel, codec: CodecCost = NONE, period: int = 4
) -> StepTime:
    """CoCoD-SGD: the models of the round's start are averaged behind k local steps.

    ``total = max(k c, m + delay) / k``, m the one message that the job sends a round (and one more
    under ``momentum=average``). Limit: ``max(c, least_seconds(bytes) / k)``: a worker takes k c a
    round, and in each the link carries the whole model.

    Args:
        profile, comm, codec: as :func:`step_time`.
        period: k, at least 1.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model, net = ModelProfile((LayerProfile("a", 4, 1.0),)), CommModel.linear(2.0, 0.25)
        >>> [cocod(model, net, period=period).total_s for period in (1, 2, 4)]
        [3.0, 1.5, 1.0]

    Source: Shen et al., "CoCoD-SGD", arXiv 1906.12043.
    """
    return step_time(CoCoD(period=period), profile, comm, codec)


def _overlapped(
    method: MergedGradient, profile: ModelProfile, comm: CommModel, codec: CodecCost
) -> StepTime:
    net, compute = comm.compressed(codec), profile.compute_s
    if method.overlaps_forward:
        total, sent = overlapped_step(method, profile, net)
        return _result(method, compute, sent, total, max(compute, least_busy_s(profile, net)))
    sent = gradient_messages(method, profile, net)
    total = profile.forward_s + max(profile.backward_s, sent.arrival_s) + profile.update_s
    return _result(method, profile.compute_s, sent, total, synchronous_limit(profile, net))


def _pipelined(
    method: PipeSGD | WidePipeSGD, profile: ModelProfile, comm: CommModel, codec: CodecCost
) -> StepTime:
    net = comm.compressed(codec)
    sent = gradient_messages(method, profile, net)
    compute = profile.compute_s
    width = method.width if isinstance(method, WidePipeSGD) else 2
    if isinstance(method, PipeSGD) and method.prediction != "none":
        compute += profile.update_s  # one more update, with the guess
    chain = compute - profile.backward_s + sent.arrival_s
    if width == 1:
        chain = compute + sent.total_s + sent.delay_s
    total = max(compute, sent.total_s, chain / width)
    if sent.blocking and width > 1:
        total = max(total, sent.settled_s(profile, compute, width - 1))
    limit = max(compute, least_busy_s(profile, net), synchronous_limit(profile, net) / width)
    return _result(method, compute, sent, total, limit)


def _result(
    method: Method, compute: float, sent: Messages, total: float, limit: float, period: int = 1
) -> StepTime:
    return StepTime(
        method=label(method),
        compute_s=compute,
        comm_s=sent.total_s / period,
        total_s=total,
        limit_s=limit,
        messages=len(sent.seconds) / period,
    )
