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
lognormal of mean 1 that is drawn anew each step.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.comm import NONE, CodecCost, CommModel, blocked_ends
from hvd_pipe.planning.messages import (
    Messages,
    NodeWork,
    gradient_messages,
    model_messages,
    node_comm,
    overlapped_messages,
    turns_of,
    within_node,
)
from hvd_pipe.planning.methods import (
    DEFAULT_BUCKET_BYTES,
    Conventional,
    HorovodFusion,
    LocalSGD,
    Method,
    WidePipeSGD,
    label,
    parse,
)
from hvd_pipe.planning.overlap import Pass, TimedMessage
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD
from hvd_pipe.timeline import Event, Timeline

__all__ = ["MAX_EVENTS", "Simulation", "simulate"]

FloatArray = npt.NDArray[np.float64]

MAX_EVENTS = 20_000
"""A timeline has the first steps, as many as fit."""

TICK = 1e-9
"""A gradient that comes this part of a cycle after Horovod's tick is still seen by it."""

MARGIN = 0.005
"""Pipe-SGD's buckets are as fast as any where a step takes no larger a part longer."""

_RACED_STEPS = 40


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a simulated run took.

    Args:
        method, workers: as :func:`hvd_pipe.planning.methods.label` writes it; how many took part.
        step_s: seconds of a step once the run has settled: mean over the second half, of the last
            worker, of all, or of the link, whichever is slowest (while messages queue up, a
            bottleneck has not reached the workers yet).
        iteration_ends: when the last worker was done with each step, seconds; 1-D.
        compute_s: seconds of a step's own work, mean over workers.
        exposed_s: what a step takes longer: waiting for the network, or for slower workers.
        comm_s, messages: seconds per step in which the link is busy, and with how many.
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
    messages: float = 0.0


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
            Pipe-SGD without ``bucket_bytes`` has those that trials in a job keep.
        codec: compression of what travels.
        iterations: steps, rounded up to two whole rounds or more where there are rounds.
        seed: of the stragglers; methods with one seed meet the same ones.
        trace_workers: whose events the timeline has.

    Raises:
        TypeError, ValueError: an unknown method, a plan or weights that do not fit, no iterations,
            or a worker that there is not.

    Example:
        >>> from hvd_pipe.planning.cluster import Link, Network
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model = ModelProfile((LayerProfile("a", 1000, 0.5, 0.25),))
        >>> cluster = Cluster(4, Network(Link(alpha=0.125, beta=0.0)))
        >>> simulate(model, cluster, "wfbp").step_s  # a ring of 4: 6 alpha
        1.5
    """
    method = parse(method)
    if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
        raise ValueError(f"iterations must be an int of at least 1, got {iterations!r}")
    links = Links(cluster.comm(), node_comm(method, cluster.network), cluster.network.per_node)
    random = np.random.default_rng(seed)
    workers = Workers(pace_of(cluster, method), cluster.jitter, random)
    trace = _Recorder(_checked_ranks(trace_workers, cluster.workers))
    return simulate_workers(profile, links, workers, method, codec, iterations, trace)


class Links(NamedTuple):
    """What carries messages: between all workers, and within a node, if a method uses that."""

    comm: CommModel
    node: CommModel | None = None
    per_node: int = 1


class Workers(NamedTuple):
    """How much longer than its profile each worker takes, and what makes it vary."""

    pace: FloatArray
    jitter: float
    random: np.random.Generator


def simulate_workers(
    profile: ModelProfile,
    links: Links,
    workers: Workers,
    method: Method,
    codec: CodecCost,
    iterations: int,
    trace: _Recorder | None = None,
) -> Simulation:
    """Simulate workers whose all-reduce takes what a model says; see :func:`simulate`."""
    period = method.period if isinstance(method, LocalSGD | CoCoD) else 1
    if period > 1:
        iterations = max(2, math.ceil(iterations / period)) * period
    run = _Run(profile, workers, iterations, trace or _Recorder(()))
    net = links.comm.compressed(codec)
    sends = bool(profile.gradient_order())
    if isinstance(method, LocalSGD | CoCoD):
        sent = model_messages(method, profile, links.comm, codec)
        if isinstance(method, LocalSGD):
            _models(run, sent, [list(range(len(sent.seconds)))], method.period, behind=False)
        else:
            work = None if links.node is None else within_node(profile, links.node)
            per_node = links.per_node if work else 1
            _models(run, sent, turns_of(method, sent), method.turn, work=work, per_node=per_node)
    elif isinstance(method, MergedGradient) and method.overlaps_forward and sends:
        _overlapped(run, *overlapped_messages(method, profile, net), net)
    elif isinstance(method, HorovodFusion):
        _gradients(run, _fusion(profile, net, method), net.delay_behind)
    else:
        sized = method
        if isinstance(method, PipeSGD) and method.bucket_bytes is None:
            sized = as_raced(method, profile, net)
        sent = gradient_messages(sized, profile, net)
        wide = method.width if isinstance(method, WidePipeSGD) else None
        lag = 1 if isinstance(method, PipeSGD) else (wide or 1) - 1
        twice = isinstance(method, PipeSGD) and method.prediction != "none"
        after = isinstance(method, Conventional) or wide == 1
        _gradients(run, _buckets(profile, sent, after), net.delay_behind, lag, updates=1 + twice)
        period = lag + 1  # a step goes with the update that waits for it: they come in bursts
    return _result(run, label(method), period)


def as_raced(method: PipeSGD, profile: ModelProfile, comm: CommModel) -> PipeSGD:
    """Pipe-SGD with the buckets that trials in a job keep: the largest that are as fast as any.

    Messages have the whole next step to travel in, so little is lost by sending fewer.
    """
    sizes, total = [DEFAULT_BUCKET_BYTES], int(profile.gradient_bytes().sum())
    while sizes[-1] < total:
        sizes.append(2 * sizes[-1])
    options = [replace(method, bucket_bytes=size) for size in sizes]
    if len(options) == 1:
        return options[0]
    alone = Workers(np.ones(1), 0.0, np.random.default_rng(0))
    steps_s = [
        simulate_workers(profile, Links(comm), alone, option, NONE, _RACED_STEPS).step_s
        for option in options
    ]
    fast = (1.0 + MARGIN) * min(steps_s)
    return max(
        (option for option, step_s in zip(options, steps_s, strict=True) if step_s <= fast),
        key=lambda option: option.bucket_bytes or 0,
    )


def _result(run: _Run, method: str, period: int) -> Simulation:
    workers = len(run.workers.pace)
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
        messages=float(run.sent[half:].mean()),
    )


class _Run:
    """The state that all methods share: the clock of each worker and of the link."""

    def __init__(
        self, profile: ModelProfile, workers: Workers, iterations: int, trace: _Recorder
    ) -> None:
        self.profile, self.workers = profile, workers
        self.iterations, self.trace = iterations, trace
        self.forward_s, self.backward_s = profile.forward_s, profile.backward_s
        self.update_s = profile.update_s
        self.begin = np.zeros(len(workers.pace))
        self.free = 0.0  # when the link is
        self.busy, self.sent, self.work = np.zeros((3, iterations))
        self.ends, self.mean_ends, self.link_ends = np.zeros((3, iterations))

    def factors(self) -> FloatArray:
        """How much longer than its profile each worker takes for the coming step."""
        pace, jitter, random = self.workers
        if not jitter:
            return pace
        variance = math.log1p(jitter**2)
        noise = random.normal(-variance / 2, math.sqrt(variance), len(pace))
        return np.asarray(pace * np.exp(noise), dtype=np.float64)

    def send(self, step: int, name: str, bytes: float, start: float, end: float) -> None:
        """Record a message, which is on the link of every worker at once."""
        self.busy[step] += end - start
        self.sent[step] += 1
        self.free = end
        for worker in self.trace.now:
            self.trace.note(name, "allreduce", worker, start, end, step, bytes=int(bytes))

    def trace_passes(
        self,
        step: int,
        forward: FloatArray,
        backward: FloatArray,
        start: FloatArray,
        end: FloatArray,
    ) -> None:
        """Record when the passes of a step end, and its update starts and ends."""
        add = self.trace.add
        add(f"forward {step}", "forward", self.begin, forward, step)
        add(f"backward {step}", "backward", forward, backward, step)
        add("wait for the average", "wait", backward, start, step)
        add(f"update {step}", "update", start, end, step)

    def finished(self, step: int, end: FloatArray) -> None:
        """Every worker is done with a step."""
        self.begin = end
        self.ends[step] = end.max()
        self.mean_ends[step] = end.mean()
        self.link_ends[step] = self.free


def _latest(begin: FloatArray, factors: FloatArray, offset: FloatArray) -> FloatArray:
    """``max over workers of begin + offset * factor``, for each offset."""
    order = np.lexsort((-begin, -factors))
    begin, factors = begin[order], factors[order]
    ahead = np.concatenate(([-np.inf], np.maximum.accumulate(begin)[:-1]))
    last = begin > ahead
    times = begin[last, None] + factors[last, None] * offset
    return np.asarray(times.max(axis=0), dtype=np.float64)


@dataclass
class _Recorder:
    """Events of some workers, until there are enough."""

    workers: tuple[int, ...]
    events: list[Event] = field(default_factory=list)
    steps: int = 0
    open: bool = True

    def begin(self, messages: int, gates: int = 0) -> None:
        """Begin a step; close the recorder where its events do not fit."""
        count = len(self.workers) * (4 + 2 * messages + 2 * gates)
        if self.open and len(self.events) + count > MAX_EVENTS:
            if not self.events:
                raise ValueError(
                    f"a step of {len(self.workers)} workers with {messages} messages has {count} "
                    f"events, a timeline at most {MAX_EVENTS}: ask for fewer trace_workers"
                )
            self.open = False
        self.open = self.open and bool(self.workers)
        self.steps += self.open

    def add(self, name: str, category: str, start: FloatArray, end: FloatArray, step: int) -> None:
        """An event of each traced worker; ``start`` and ``end`` have one entry a worker."""
        for worker in self.now:
            self.note(name, category, worker, float(start[worker]), float(end[worker]), step)

    def note(
        self,
        name: str,
        category: str,
        worker: int,
        start: float,
        end: float,
        step: int,
        **args: object,
    ) -> None:
        """Record an event, unless it takes no time and is not a moment."""
        if end > start or category == "ready":
            lane = "network" if category == "allreduce" else "compute"
            args["step"] = step
            self.events.append(Event(name, category, worker, lane, start, end - start, args))

    @property
    def now(self) -> tuple[int, ...]:
        """The workers whose events are recorded."""
        return self.workers if self.open else ()


class _Message(NamedTuple):
    name: str
    bytes: float
    ready: float  # seconds after a step's begin at which a worker of factor 1 has made its part
    start: float
    end: float


_Network = Callable[[FloatArray, FloatArray, FloatArray, float], list[_Message]]
"""(begin, factor, end of backward) by worker, and when the link is free -> the messages."""


def _gradients(run: _Run, network: _Network, delay: float, lag: int = 0, updates: int = 1) -> None:
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
        run.trace_passes(step, forward, backward, start, end)
        run.finished(step, end)
        for worker in run.trace.now:
            start_s, factor = float(begin[worker]), float(factors[worker])
            for message in messages:
                at = start_s + factor * message.ready
                run.trace.note(message.name, "ready", worker, at, at, step)


def _models(
    run: _Run,
    sent: Messages,
    turns: Sequence[Sequence[int]],
    steps: int,
    behind: bool = True,
    work: NodeWork | None = None,
    per_node: int = 1,
) -> None:
    """Local steps, in turns of ``steps``; models are averaged at a turn's start or end."""

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
        run.trace_passes(step, forward, backward, backward, end)
        run.begin = end
        if step % steps == steps - 1:
            if not behind:
                average(step)
            late = np.maximum(end, run.free + sent.delay_s)
            run.trace.add("wait for the average", "wait", end, late, step)
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
        release = all_done if after else _latest(begin, factors, offset)
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
        ready = _latest(begin - origin, factors, offset)  # since then, so that ticks stay exact
        now, sent = 0.0, 0
        while sent < len(bytes):
            late = float(ready[sent]) - now
            if late > slack:
                now += cycle * math.ceil(late / cycle - TICK) if cycle else late
            visible = int(np.searchsorted(ready, now + slack, side="right"))
            end = now + comm.delay - comm.delay_behind
            while sent < visible:
                first, sent = sent, min(visible, int(full[sent]))
                size = float(total[sent] - total[first])
                start, end = end, end + comm(size)
                name, made_s = f"fused {len(messages)}", float(offset[sent - 1])
                messages.append(_Message(name, size, made_s, origin + start, origin + end))
            now = max(now + cycle, end)
        return messages

    return network


def pace_of(cluster: Cluster, method: Method) -> FloatArray:
    """Each worker's step time over the profile's: its part of the batch over its speed."""
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


def _checked_ranks(trace_workers: Sequence[int], workers: int) -> tuple[int, ...]:
    for worker in trace_workers:
        if isinstance(worker, bool) or not isinstance(worker, int) or not 0 <= worker < workers:
            raise ValueError(
                f"trace_workers must be ranks from 0 to {workers - 1}, got {worker!r}"
            )
    return tuple(dict.fromkeys(trace_workers))


def _overlapped(run: _Run, work: Pass, sent: Sequence[TimedMessage], comm: CommModel) -> None:
    """Steps in which every worker waits at each gate for messages of the step before."""
    ready = np.array([message.ready_s for message in sent])
    carried = [comm(message.bytes) for message in sent]
    names = _names(sent)
    last = {message.bucket: i for i, message in enumerate(sent)}
    gates = sorted(last.values(), key=lambda i: sent[i].needed_s)
    arrived = [0.0] * len(sent)
    for step in range(run.iterations):
        run.trace.begin(len(sent), len(gates))
        factors, begin = run.factors(), run.begin
        late = np.zeros(len(begin))
        for message in gates:
            late = np.maximum(late, arrived[message] - (begin + factors * sent[message].needed_s))
        forward = begin + work.forward_s * factors + late
        for worker in run.trace.now:
            times = [(sent[i].needed_s, arrived[i], f"bucket {sent[i].bucket}") for i in gates]
            _trace_forward(run, step, worker, float(factors[worker]), times, work.forward_s)
        link = run.free
        for i, leaves in enumerate(_latest(forward, factors, ready).tolist()):
            start = max(link, leaves)
            run.send(step, names[i], sent[i].bytes, start, start + carried[i])
            link = arrived[i] = start + sent[i].seconds
        backward = forward + work.backward_s * factors
        run.work[step] = (work.forward_s + work.backward_s) * float(factors.mean())
        run.trace.add(f"backward {step}", "backward", forward, backward, step)
        for i in gates:
            at = forward + factors * sent[i].ready_s
            run.trace.add(f"bucket {sent[i].bucket}", "ready", at, at, step)
        run.finished(step, backward)


def _names(sent: Sequence[TimedMessage]) -> list[str]:
    """Names of messages: the bucket, and the number of a piece."""
    buckets = [message.bucket for message in sent]
    return [
        f"bucket {bucket}" + (f"-{buckets[:i].count(bucket)}" if buckets.count(bucket) > 1 else "")
        for i, bucket in enumerate(buckets)
    ]


def _trace_forward(
    run: _Run,
    step: int,
    worker: int,
    factor: float,
    gates: Sequence[tuple[float, float, str]],
    forward_s: float,
) -> None:
    """Note a worker's forward pass, cut where it waits for what has not arrived at a gate."""
    begin = since = float(run.begin[worker])
    late = 0.0
    name = f"forward {step}"
    for needed_s, arrived, bucket in gates:
        at = begin + factor * needed_s + late
        if arrived > at:
            run.trace.note(name, "forward", worker, since, at, step)
            run.trace.note(f"wait for {bucket}", "wait", worker, at, arrived, step)
            since, late = arrived, late + arrived - at
    end = begin + factor * forward_s + late
    run.trace.note(name, "forward", worker, since, end, step)
