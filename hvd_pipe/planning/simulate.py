"""Event simulation: workers compute, one link carries messages, what is late makes others wait.

Each worker is a resource, and so is the link, which carries one message at a time, first in,
first out. An all-reduce starts when the link is free and every worker has made its part, so one
straggler delays all; whom it delays, and when, is the method's::

    gradients     worker  forward, backward, wait for the average of step t - lag, update
                  link    bucket i leaves when the last worker has it (Pipe-SGD: lag 1, else 0)
    forward       worker  forward, waiting at each gate for what is needed there; backward
                  link    messages in the plan's order, as the last worker has them
    models        worker  k steps, then wait for the average of the models as they are then
                          (Local SGD), or as they were before the round (CoCoD)
                  link    one message a round

A worker's step takes its profile's time, times its share of the batch, over its speed, times a
lognormal of mean 1 that is drawn anew each step. Without such jitter, what comes out is
:func:`hvd_pipe.planning.timing.step_time`, which computes it another way.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning._overlap_run import run_overlapped
from hvd_pipe.planning._recorder import MAX_EVENTS, Recorder
from hvd_pipe.planning._training_run import TrainingRun, latest
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.codec import NONE, CodecCost
from hvd_pipe.planning.comm import CommModel, blocked_ends
from hvd_pipe.planning.messages import Messages, gradient_messages, model_messages
from hvd_pipe.planning.methods import (
    Conventional,
    HorovodFusion,
    LocalSGD,
    Method,
    WidePipeSGD,
    label,
    parse,
)
from hvd_pipe.planning.overlap import overlapped_messages
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.timing import TICK
from hvd_pipe.planning.turns import NodeWork, node_comm, turns_of, within_node
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD
from hvd_pipe.timeline import Timeline

__all__ = ["MAX_EVENTS", "Simulation", "simulate"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a simulated run took.

    Args:
        method: as :func:`hvd_pipe.planning.methods.label` writes it.
        workers: how many took part.
        step_s: seconds of a step once the run has settled: mean over the second half, of the last
            worker, of all, or of the link, whichever is slowest (while messages queue up, a
            bottleneck has not reached the workers yet).
        iteration_ends: when the last worker was done with each step, seconds; 1-D.
        compute_s: seconds of a step's own work, mean over workers.
        exposed_s: what a step takes longer: waiting for the network, or for slower workers.
        comm_s: seconds per step in which the link is busy.
        timeline: the first steps of the workers that were asked for.
    """

    method: str
    workers: int
    step_s: float
    iteration_ends: FloatArray
    compute_s: float
    exposed_s: float
    comm_s: float
    timeline: Timeline


def simulate(
    profile: ModelProfile,
    cluster: Cluster,
    method: Method | str,
    codec: CodecCost = NONE,
    iterations: int = 100,
    seed: int = 0,
    trace_workers: Sequence[int] = (0,),
) -> Simulation:
    """Simulate steps of a method on a cluster.

    Args:
        profile: the model on a worker of speed 1.
        cluster: workers, their speeds and jitter, and the network.
        method: a method or its string; CoCoD's ``weights`` are taken for the workers' batches.
        codec: compression of what travels.
        iterations: steps, rounded up to two whole rounds or more where there are rounds.
        seed: of the stragglers; methods with one seed meet the same ones.
        trace_workers: whose events the timeline has.

    Raises:
        TypeError, ValueError: an unknown method, a plan of another model, weights of another
            number of workers, no iterations, or a worker that there is not.

    Example:
        >>> from hvd_pipe.planning.cluster import Link, Network
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model = ModelProfile((LayerProfile("a", 1000, 0.5, 0.25),))
        >>> cluster = Cluster(4, Network(Link(alpha=0.125, beta=0.0)))
        >>> simulate(model, cluster, "wfbp").step_s  # a ring of 4: 6 alpha
        1.5
        >>> simulate(model, cluster, "pipe-sgd").exposed_s
        0.0
    """
    method = parse(method)
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"iterations must be an int of at least 1, got {iterations!r}")
    period = method.period if isinstance(method, LocalSGD | CoCoD) else 1
    if period > 1:
        iterations = max(2, math.ceil(iterations / period)) * period
    trace = Recorder(_checked(trace_workers, cluster.workers))
    run = TrainingRun(
        profile,
        _pace(cluster, method),
        cluster.jitter,
        np.random.default_rng(seed),
        iterations,
        trace,
    )
    net = cluster.comm().compressed(codec)
    sends = bool(profile.gradient_order())
    if isinstance(method, LocalSGD | CoCoD):
        sent = model_messages(method, profile, cluster.comm(), codec)
        if isinstance(method, LocalSGD):
            _models(run, sent, [list(range(len(sent.seconds)))], method.period, behind=False)
        else:
            work = within_node(profile, node_comm(method, cluster.network))
            each = cluster.network.per_node if work else 1
            _models(run, sent, turns_of(method, sent), method.turn, work=work, per_node=each)
    elif isinstance(method, MergedGradient) and method.overlaps_forward and sends:
        run_overlapped(run, *overlapped_messages(method, profile, net), net)
    elif isinstance(method, HorovodFusion):
        _gradients(run, _fusion(profile, net, method), net.delay_behind)
    else:
        sent = gradient_messages(method, profile, net)
        wide = method.width if isinstance(method, WidePipeSGD) else None
        lag = 1 if isinstance(method, PipeSGD) else (wide or 1) - 1
        twice = isinstance(method, PipeSGD) and method.prediction != "none"
        after = isinstance(method, Conventional) or wide == 1
        _gradients(run, _buckets(profile, sent, after), net.delay_behind, lag, updates=1 + twice)
        period = lag + 1  # a step goes with the update that waits for it: they come in bursts
    return _result(run, label(method), period)


def _result(run: TrainingRun, method: str, period: int) -> Simulation:
    workers = len(run.pace)
    steps = min(run.iterations, math.ceil(run.iterations / (2 * period)) * period)
    half = run.iterations - steps

    def growth(ends: FloatArray) -> float:
        return float(ends[-1] - (ends[half - 1] if half else 0.0)) / steps

    step = max(map(growth, (run.ends, run.mean_ends, run.link_ends)))
    compute = run.work[half:].mean()
    title = f"{method}, {workers} workers"
    if run.trace.steps < run.iterations:
        title += f": the first {run.trace.steps} of {run.iterations} steps"
    return Simulation(
        method=method,
        workers=workers,
        step_s=step,
        iteration_ends=run.ends,
        compute_s=float(compute),
        exposed_s=max(0.0, step - float(compute)),
        comm_s=float(run.busy[half:].mean()),
        timeline=Timeline(tuple(run.trace.events), title),
    )


class _Message(NamedTuple):
    name: str
    bytes: float
    ready: float  # seconds after a step's begin at which a worker of factor 1 has made its part
    start: float
    end: float


_Network = Callable[[FloatArray, FloatArray, FloatArray, float], list[_Message]]
"""From begin, factors and end of backward of each worker, and the link's end, what it carries."""


def _gradients(
    run: TrainingRun, network: _Network, delay: float, lag: int = 0, updates: int = 1
) -> None:
    """Steps that end with an update, for which the average of ``lag`` steps before is needed."""
    arrived, update_s = np.zeros(run.iterations), updates * run.update_s
    for step in range(run.iterations):
        factors, begin = run.factors(), run.begin
        forward = begin + run.forward_s * factors
        backward = forward + run.backward_s * factors
        messages = network(begin, factors, backward, run.free)
        run.trace.begin(len(messages))
        for message in messages:
            run.send(step, message.name, message.bytes, message.start, message.end)
        if messages:
            arrived[step] = messages[-1].end + delay
        start = backward if step < lag else np.maximum(backward, arrived[step - lag])
        end = start + update_s * factors
        run.work[step] = (run.forward_s + run.backward_s + update_s) * float(factors.mean())
        run.finished(step, end)
        _trace_step(run.trace, step, begin, forward, backward, start, end)
        for worker in run.trace.now:
            own, factor = float(begin[worker]), float(factors[worker])
            for message in messages:
                at = own + factor * message.ready
                run.trace.note(message.name, "ready", worker, "compute", at, at, step=step)


def _models(
    run: TrainingRun,
    sent: Messages,
    turns: Sequence[Sequence[int]],
    steps: int,
    behind: bool = True,
    work: NodeWork | None = None,
    per_node: int = 1,
) -> None:
    """Local steps, in turns of ``steps``; the models of a turn's start or end are averaged."""

    def average(step: int) -> None:
        start = max(run.free, float(run.begin.max()))
        for number in turns[step // steps % len(turns)]:
            seconds = float(sent.seconds[number])
            run.send(step, "models", float(sent.bytes[number]), start, start + seconds)
            start = run.free

    for step in range(run.iterations):
        run.trace.begin(len(sent.seconds))
        if behind and step % steps == 0:
            average(step)
        factors, begin = run.factors(), run.begin
        forward = begin + run.forward_s * factors
        backward = forward + run.backward_s * factors
        end = backward + run.update_s * factors
        run.work[step] = (run.forward_s + run.backward_s + run.update_s) * float(factors.mean())
        if work is not None:
            end = np.repeat(end.reshape(-1, per_node).max(axis=1), per_node) + work.exposed_s
            if step % steps == 0:
                queued = run.free + sent.delay_s + work.busy_s
                end = np.maximum(end, queued + run.update_s * factors)
        run.begin = end
        _trace_step(run.trace, step, begin, forward, backward, backward, end)
        if step % steps == steps - 1:
            if not behind:
                average(step)
            late = np.maximum(end, run.free + sent.delay_s)
            run.trace.add("wait for the average", "wait", "compute", end, late, step=step)
            end = late
        run.finished(step, end)


def _buckets(profile: ModelProfile, sent: Messages, after: bool) -> _Network:
    """Messages that leave as the last worker has made them, or all of them after backward."""
    offset = profile.forward_s + sent.ready_s
    queued = np.cumsum(sent.seconds) - sent.seconds
    names = [f"bucket {i}" for i in range(len(offset))]
    facts = names, sent.bytes.tolist(), offset.tolist()

    def network(
        begin: FloatArray, factors: FloatArray, backward: FloatArray, free: float
    ) -> list[_Message]:
        if not names:
            return []
        all_done = np.full(len(offset), backward.max())
        release = all_done if after else latest(begin, factors, offset)
        if sent.blocking:
            seconds = sent.seconds.tolist()
            ends = blocked_ends(release.tolist(), seconds, sent.network_delay_s, free)
            return list(map(_Message, *facts, map(operator.sub, ends, seconds), ends))
        # start_i = max over j <= i of max(free, release_j) + what is queued from j to i
        slack = np.maximum.accumulate(np.maximum(release, free) - queued)
        start = slack + queued
        end = start + sent.seconds
        return list(map(_Message, *facts, start.tolist(), end.tolist()))

    return network


def _fusion(profile: ModelProfile, comm: CommModel, method: HorovodFusion) -> _Network:
    """Messages that Horovod's loop makes of what all workers have ready when it looks."""
    offset, bytes = profile.forward_s + profile.ready_times(), profile.gradient_bytes()
    cycle, slack = method.cycle_s, TICK * method.cycle_s
    total = np.concatenate(([0], np.cumsum(bytes)))
    # Where the message ends that begins with each tensor: a larger tensor goes alone.
    full = np.searchsorted(total, total[:-1] + max(1, method.threshold_bytes), side="right") - 1
    full = np.maximum(full, np.arange(1, len(total)))

    def network(
        begin: FloatArray, factors: FloatArray, backward: FloatArray, free: float
    ) -> list[_Message]:
        messages: list[_Message] = []
        origin = float(begin.max())
        ready = latest(begin - origin, factors, offset)  # since then, so that ticks stay exact
        now, sent = 0.0, 0
        while sent < len(bytes):
            late = float(ready[sent]) - now
            if late > slack:
                now += cycle * math.ceil(late / cycle - TICK) if cycle else late
            seen = int(np.searchsorted(ready, now + slack, side="right"))
            end = now + comm.delay - comm.delay_behind
            while sent < seen:
                first, sent = sent, min(seen, int(full[sent]))
                size = float(total[sent] - total[first])
                start, end = end, end + comm(size)
                name, made = f"fused {len(messages)}", float(offset[sent - 1])
                messages.append(_Message(name, size, made, origin + start, origin + end))
            now = max(now + cycle, end)
        return messages

    return network


def _pace(cluster: Cluster, method: Method) -> FloatArray:
    """What each worker's step takes, in the profile's: its part of the batch over its speed."""
    pace = np.ones(cluster.workers)
    if cluster.speeds is not None:
        pace /= np.asarray(cluster.speeds, dtype=np.float64)
    if isinstance(method, CoCoD) and method.weights is not None:
        if len(method.weights) != cluster.workers:
            raise ValueError(
                f"CoCoD's weights are one a worker: {len(method.weights)} weights, "
                f"{cluster.workers} workers"
            )
        weights = np.asarray(method.weights, dtype=np.float64)
        pace *= weights * (len(weights) / weights.sum())
    return pace


def _checked(trace_workers: Sequence[int], workers: int) -> tuple[int, ...]:
    for worker in trace_workers:
        if isinstance(worker, bool) or not isinstance(worker, int) or not 0 <= worker < workers:
            raise ValueError(
                f"trace_workers must be ranks from 0 to {workers - 1}, got {worker!r}"
            )
    return tuple(dict.fromkeys(trace_workers))


def _trace_step(
    trace: Recorder,
    step: int,
    begin: FloatArray,
    forward: FloatArray,
    backward: FloatArray,
    start: FloatArray,
    end: FloatArray,
) -> None:
    trace.add(f"forward {step}", "forward", "compute", begin, forward, step=step)
    trace.add(f"backward {step}", "backward", "compute", forward, backward, step=step)
    trace.add("wait for the average", "wait", "compute", backward, start, step=step)
    trace.add(f"update {step}", "update", "compute", start, end, step=step)
