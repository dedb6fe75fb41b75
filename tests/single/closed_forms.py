"""Closed forms of a step, once it has settled, as limits of what is simulated.

Forward f, backward b and update u follow each other on a worker, ``c = f + b + u``. With m the
seconds of a step's messages, d the delay of the network, and ``last`` when messages that have the
link to themselves arrive after backward starts::

    conventional     c + m + d
    merged-gradient  f + max(b, last) + u
    horovod          f + max(b, last) + u            buckets made at cycle ticks
    pipe-sgd         max(c, m, (f + last + u) / K)   K = 2 or wider
    local-sgd        (k c + m + d) / k
    cocod            sum over fragments p of max(tau c, m_p + d) / k, tau = k / fragments
    cocod, in nodes  c grows by what a node's messages take longer than backward, and the first
                     step of a turn takes at least m_p + d + (the node's messages) + u
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hvd_pipe.planning import merge
from hvd_pipe.planning.comm import NONE, CodecCost, CommModel
from hvd_pipe.planning.messages import gradient_messages, model_messages, turns_of, within_node
from hvd_pipe.planning.methods import Conventional, HorovodFusion, LocalSGD, Method, WidePipeSGD
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.simulate import TICK, as_raced
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD


class Step(NamedTuple):
    """Seconds of a step, and in which its link is busy."""

    total_s: float
    comm_s: float


def step(
    method: Method,
    profile: ModelProfile,
    comm: CommModel,
    codec: CodecCost = NONE,
    node: CommModel | None = None,
) -> Step:
    """Return a step of any method but with ``overlap="forward"``, for which there is no formula.

    Nor is there one for Pipe-SGD where the network is ``blocking``: what is negotiated together
    changes from step to step.
    """
    net, compute = comm.compressed(codec), profile.compute_s
    if isinstance(method, HorovodFusion):
        return _fused(method, profile, net)
    if isinstance(method, LocalSGD | CoCoD):
        sent = model_messages(method, profile, comm, codec)
        busy = float(sent.seconds.sum()) / method.period
        if isinstance(method, LocalSGD):
            return Step(compute + busy + sent.delay_s / method.period, busy)
        work = None if node is None else within_node(profile, node)
        total, slow = 0.0, compute + (work.exposed_s if work else 0.0)
        for turn in turns_of(method, sent):
            arrival = float(sent.seconds[turn].sum()) + sent.delay_s
            first = slow if work is None else 0.0
            if work is not None:
                first = max(slow, arrival + work.busy_s + profile.update_s)
            rest = (method.turn - 1) * slow
            total += max(first + rest, arrival) if work is None else first + rest
        return Step(total / method.period, busy)
    if isinstance(method, PipeSGD):
        compute += (method.prediction != "none") * profile.update_s
        method = method if method.bucket_bytes else as_raced(method, profile, net)
    sent = gradient_messages(method, profile, net)
    busy = float(sent.seconds.sum())
    if isinstance(method, Conventional) or method == WidePipeSGD(1, _size(method)):
        return Step(compute + busy + sent.delay_s, busy)
    chain = compute - profile.backward_s + sent.arrival_s
    if isinstance(method, MergedGradient):
        return Step(max(compute, chain), busy)
    width = method.width if isinstance(method, WidePipeSGD) else 2
    return Step(max(compute, busy, chain / width), busy)


def _size(method: Method) -> int:
    return method.bucket_bytes if isinstance(method, WidePipeSGD) else 1


def _fused(method: HorovodFusion, profile: ModelProfile, net: CommModel) -> Step:
    """What is ready at a tick is fused; the next tick is a cycle later, or after the messages."""
    cycle = method.cycle_s
    ready, bytes = profile.forward_s + profile.ready_times(), profile.gradient_bytes()
    tick, end, busy, sent = 0.0, 0.0, 0.0, 0
    while sent < len(bytes):
        late = float(ready[sent]) - tick
        if late > TICK * cycle:
            tick += cycle * math.ceil(late / cycle - TICK) if cycle > 0.0 else late
        seen = sent + int((ready[sent:] <= tick + TICK * cycle).sum())
        end = tick + net.delay - net.delay_behind
        for count in merge.by_bytes(bytes[sent:seen], max(1, method.threshold_bytes)):
            seconds = net(float(bytes[sent : sent + count].sum()))
            end, busy, sent = end + seconds, busy + seconds, sent + count
        tick = max(tick + cycle, end)
    arrival = end + net.delay_behind if len(bytes) else 0.0
    passes = profile.forward_s + profile.backward_s
    return Step(max(passes, arrival) + profile.update_s, busy)
