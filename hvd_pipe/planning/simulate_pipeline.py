"""Event simulation of a pipeline's schedule: when each worker computes, sends, and waits.

A worker computes one instruction at a time, and its link carries one message each way at a time,
first come first served, while it computes::

    compute   | F 2 |     B 0      | U |    | F 3 |          a receive waits for its message,
    network            | act. 2 |  | grad. 0 |               a send does not wait

A message takes ``latency + bytes / bandwidth`` of the sender's way out and of the receiver's way
in at once. The all-reduce of a replicated stage starts as the last of its replicas starts the
backward pass that completes the gradient, since a layer's gradient travels as soon as it is there
(WFBP), has the links of all replicas to itself, and is done no earlier than their backward passes.
The update and the next forward pass wait for it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from hvd_pipe.planning._checks import check_finite
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.schedule import (
    AllReduce,
    Backward,
    Forward,
    Recv,
    RecvActivation,
    RecvGradient,
    Schedule,
    Send,
    SendActivation,
    Update,
    Worker,
    schedule,
)
from hvd_pipe.planning.stages import Partition
from hvd_pipe.timeline import Event, Timeline

__all__ = ["PipelineSimulation", "StageCost", "simulate_partition", "simulate_pipeline"]


@dataclass(frozen=True)
class StageCost:
    """What one microbatch (for 1F1B: minibatch) costs on one worker of a stage.

    Args:
        forward_s, backward_s, update_s: seconds of a pass and of an update.
        activation_bytes: output to the next stage; the gradient that comes back is as large.
        allreduce_s: seconds to average the stage's gradient over its replicas.

    Raises:
        ValueError: a number that is not finite or is negative.
    """

    forward_s: float
    backward_s: float
    update_s: float = 0.0
    activation_bytes: float = 0.0
    allreduce_s: float = 0.0

    def __post_init__(self) -> None:
        for cost in fields(self):
            check_finite(cost.name, getattr(self, cost.name))


@dataclass
class _Average:
    """An all-reduce for which some replicas have registered."""

    members: set[Worker] = field(default_factory=set)
    ready_s: float = 0.0  # the last backward pass ends
    finish_s: float | None = None  # known once all have registered


class _Run:
    """The state of a simulation; events are taken in the order of their times."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageCost],
        links: tuple[tuple[float, float], tuple[float, float]],
        per_node: int,
        recompute: bool,
        factors: Mapping[Worker, Sequence[float]],
    ) -> None:
        """Links between machines and inside one: bytes/s and seconds a message."""
        self.schedule, self.stages, self.factors = schedule, stages, factors
        self.links, self.per_node, self.recompute = links, per_node, recompute
        self.programs = schedule.programs
        self.ranks = {worker: rank for rank, worker in enumerate(self.programs)}
        self.at = dict.fromkeys(self.programs, 0)
        self.now = dict.fromkeys(self.programs, 0.0)
        self.busy = dict.fromkeys(self.programs, 0.0)
        self.way_out = dict.fromkeys(self.programs, 0.0)  # when it is free
        self.way_in = dict.fromkeys(self.programs, 0.0)
        self.arrivals: dict[tuple[object, ...], float] = {}
        self.averages: dict[tuple[int, int], _Average] = {}
        self.completed = [0.0] * schedule.minibatches
        self.events: list[Event] = []
        self.waiting: dict[Worker, tuple[object, ...]] = {}  # and for what
        self.queue = [(0.0, rank, worker) for worker, rank in self.ranks.items()]

    def go(self) -> None:
        """Carry out all programs."""
        while self.queue:
            now, _, worker = heapq.heappop(self.queue)
            self.now[worker] = now
            if self.at[worker] < len(self.programs[worker]):
                self._step(worker)
        for worker, what in self.waiting.items():
            raise ValueError(
                f"the schedule does not run: {worker} waits for ever at instruction "
                f"{self.at[worker]} {what}: no instruction of another worker ends that"
            )

    def _step(self, worker: Worker) -> None:
        """Do the next instruction, or note what it waits for."""
        step, now = self.programs[worker][self.at[worker]], self.now[worker]
        if isinstance(step, Recv):
            key = (worker, type(step), step.minibatch, step.microbatch)
            if key not in self.arrivals:
                self.waiting[worker] = key
                return
            now = max(now, self.arrivals.pop(key))
        elif isinstance(step, AllReduce):
            finish = self._average(worker, step.version, now)
            if finish is None:
                self.waiting[worker] = (worker.stage, step.version)
                return
            now = max(now, finish)
        elif isinstance(step, Send):
            self._send(worker, step)
        else:
            now = self._compute(worker, step)
        self.at[worker] += 1
        heapq.heappush(self.queue, (now, self.ranks[worker], worker))

    def _wake(self, worker: Worker, what: tuple[object, ...], at: float) -> None:
        if self.waiting.get(worker) == what:
            del self.waiting[worker]
            heapq.heappush(self.queue, (at, self.ranks[worker], worker))

    def _compute(self, worker: Worker, step: Forward | Backward | Update) -> float:
        cost, now, index = self.stages[worker.stage], self.now[worker], self.at[worker]
        args, text = {"version": step.version}, str(step.version)
        if isinstance(step, Update):
            seconds = cost.update_s
        else:
            seconds = cost.forward_s
            if isinstance(step, Backward):
                seconds = cost.backward_s + (cost.forward_s if self.recompute else 0.0)
            args |= {"minibatch": step.minibatch, "microbatch": step.microbatch}
            text = self._name(step)
        seconds *= self.factors[worker][index]
        self.busy[worker] += seconds
        name = type(step).__name__.lower()
        self._note(f"{name} {text}", name, worker, "compute", now, seconds, args)
        if isinstance(step, Backward):
            if worker.stage == 0:
                done = self.completed[step.minibatch]
                self.completed[step.minibatch] = max(done, now + seconds)
            program = self.programs[worker]
            following = (program[at] for at in range(index + 1, len(program)))
            after = next((later for later in following if not isinstance(later, Send)), None)
            if isinstance(after, AllReduce):
                self._average(worker, after.version, now + seconds)
        return now + seconds

    def _send(self, worker: Worker, step: Send) -> None:
        activation = isinstance(step, SendActivation)
        size = self.stages[worker.stage - (not activation)].activation_bytes
        start = max(self.now[worker], self.way_out[worker], self.way_in[step.peer])
        machines = {self.ranks[end] // self.per_node for end in (worker, step.peer)}
        bandwidth, latency = self.links[len(machines) == 1]
        seconds = latency + size / bandwidth
        end = start + seconds
        self.way_out[worker] = self.way_in[step.peer] = end
        kind = "activation" if activation else "gradient"
        name, args = f"{kind} {self._name(step)}", {"bytes": size}
        self._note(name, "send", worker, "network", start, seconds, args)
        self._note(name, "recv", step.peer, "network in", start, seconds, args)
        receive = RecvActivation if activation else RecvGradient
        key = (step.peer, receive, step.minibatch, step.microbatch)
        self.arrivals[key] = end
        self._wake(step.peer, key, end)

    def _average(self, worker: Worker, version: int, ready_s: float) -> float | None:
        """Register a replica whose gradient is ready then; the end, once all have."""
        stage, now = worker.stage, self.now[worker]
        average = self.averages.setdefault((stage, version), _Average())
        members = average.members
        if worker in members:
            return average.finish_s
        members.add(worker)
        average.ready_s = max(average.ready_s, ready_s)
        if len(members) == self.schedule.replicas[stage]:
            seconds = self.stages[stage].allreduce_s
            if seconds:
                now = max(now, *(max(self.way_out[w], self.way_in[w]) for w in members))
            for member in members if seconds else ():
                self.way_out[member] = self.way_in[member] = now + seconds
                name, args = f"all-reduce {version}", {"version": version}
                self._note(name, "allreduce", member, "network", now, seconds, args)
            average.finish_s = max(now + seconds, average.ready_s)
            for member in members - {worker}:
                self._wake(member, (stage, version), average.finish_s)
        return average.finish_s

    def _name(self, step: Forward | Backward | Send) -> str:
        cut = self.schedule.microbatches > 1
        return f"{step.minibatch}.{step.microbatch}" if cut else str(step.minibatch)

    def _note(
        self,
        name: str,
        category: str,
        worker: Worker,
        lane: str,
        start_s: float,
        seconds: float,
        args: Mapping[str, object],
    ) -> None:
        if seconds:
            event = Event(name, category, self.ranks[worker], lane, start_s, seconds, args)
            self.events.append(event)


@dataclass(frozen=True)
class PipelineSimulation:
    """How a schedule went.

    Args:
        period_s: seconds per minibatch in the steady state: the slope over the second half of the
            minibatches that end while new ones come in, or ``total_s`` shared out if too few do.
        total_s: seconds from the first forward pass to the last update.
        utilisation: of each worker, the part of ``total_s`` in which it computes.
        timeline: ranks are stage by stage; lanes "compute", "network" (what leaves, and
            all-reduces) and "network in" (what arrives).
    """

    period_s: float
    total_s: float
    utilisation: Mapping[Worker, float]
    timeline: Timeline


def simulate_pipeline(
    schedule: Schedule,
    stages: Sequence[StageCost],
    *,
    bandwidth: float = math.inf,
    latency: float = 0.0,
    per_node: int = 1,
    inside: Link | None = None,
    recompute: bool = False,
    jitter: float = 0.0,
    seed: int = 0,
    speeds: Sequence[float] | None = None,
) -> PipelineSimulation:
    """Simulate a schedule.

    Closed forms, where messages and all-reduces are free: GPipe and 1F1B-flush of n equal stages
    and m microbatches take ``(m + n - 1)(forward + backward) + update`` a minibatch. 1F1B's period
    is the largest ``(forward + backward + update) / replicas`` of a stage, or more where stages
    have unlike replicas, which finish in bursts. A message of c seconds between n equal stages of
    one worker makes it ``forward + backward + update + 2c(n - 1)/n``.

    Args:
        schedule: of :func:`hvd_pipe.planning.schedule.schedule`.
        stages: costs, one a stage.
        bandwidth, latency: bytes per second of each worker's link, each way; seconds per message.
        per_node: workers of one machine, which has as many ranks in a row.
        inside: between two workers of one machine; None for bandwidth and latency as elsewhere.
        recompute: backward runs the forward pass once more, as it kept no activations.
        jitter, seed: coefficient of variation of each computation (lognormal of mean 1); its seed.
        speeds: of each worker, in rank order (stage by stage); all 1 if None.

    Raises:
        ValueError: costs, speeds or link that do not fit, or a schedule that does not run.

    Example:
        >>> from hvd_pipe.planning.schedule import schedule
        >>> run = simulate_pipeline(schedule("gpipe", [1, 1], 1, 3), [StageCost(1.0, 1.0)] * 2)
        >>> run.total_s, run.utilisation[Worker(stage=0, replica=0)]
        (8.0, 0.75)
    """
    if len(stages) != len(schedule.replicas):
        raise ValueError(
            f"stages must have a cost for each stage: the schedule has {len(schedule.replicas)}, "
            f"got {len(stages)}"
        )
    if not bandwidth > 0.0:
        raise ValueError(f"bandwidth must be above 0 bytes/s, got {bandwidth}")
    check_finite("latency", latency)
    check_finite("jitter", jitter)
    if per_node < 1:
        raise ValueError(f"per_node must be at least 1, got {per_node}")
    workers = list(schedule.programs)
    if speeds is None:
        speeds = [1.0] * len(workers)
    if len(speeds) != len(workers) or not all(0.0 < speed < math.inf for speed in speeds):
        raise ValueError(
            f"speeds must be {len(workers)} positive numbers, one a worker, got {list(speeds)}"
        )
    between = (bandwidth, latency)
    links = between, between if inside is None else (inside.bandwidth, inside.alpha)
    sigma = math.sqrt(math.log1p(jitter * jitter))
    factors = {}
    for worker, speed in zip(workers, speeds, strict=True):
        # Each worker has its own numbers, so that they do not depend on who comes first.
        random, count = np.random.default_rng([seed, *worker]), len(schedule.programs[worker])
        draw = random.lognormal(-sigma * sigma / 2.0, sigma, count)
        factors[worker] = [float(factor) / speed for factor in draw]
    run = _Run(schedule, stages, links, per_node, recompute, factors)
    run.go()
    total = max(run.now.values())
    title = f"{schedule.method}, replicas {'-'.join(map(str, schedule.replicas))}"
    return PipelineSimulation(
        _period(schedule, run.completed, total),
        total,
        {worker: run.busy[worker] / total if total else 0.0 for worker in workers},
        Timeline(tuple(run.events), title),
    )


def simulate_partition(
    partition: Partition,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    method: str = "1f1b",
    minibatches: int = 128,
    microbatches: int = 1,
    recompute: bool = False,
    seed: int = 0,
) -> PipelineSimulation:
    """Simulate a partition's stages on a cluster.

    A microbatch takes its part of the minibatch's times and bytes; updates are shared out by
    parameters; jitter is each computation's. Ranks are stage by stage, ``per_node`` of them in a
    row on one machine. Replicas average over machines that they do not fill as if they did.

    Args:
        partition: of :func:`hvd_pipe.planning.partition.partition`; its ``in_transit`` is taken.
        profile: the model that it divides.
        cluster: network, speeds and jitter; it has as many workers as the partition, or more.
        method, minibatches, microbatches: as :func:`hvd_pipe.planning.schedule.schedule`.
        recompute, seed: as :func:`simulate_pipeline`.

    Raises:
        ValueError: numbers that the method cannot do with, too few workers, or another model.

    Example:
        >>> from hvd_pipe.planning.cluster import Cluster, Link, Network
        >>> from hvd_pipe.planning.partition import partition
        >>> from hvd_pipe.planning.profile import LayerProfile, ModelProfile
        >>> layers = (LayerProfile("a", 8, 1.5, 0.5), LayerProfile("b", 8, 2.0, 1.0))
        >>> model, cluster = ModelProfile(layers), Cluster(2, Network(Link(0.0, 0.0)))
        >>> plan = partition(model, [(2, 1e9)], straight=True)
        >>> plan.period_s, simulate_partition(plan, model, cluster).period_s
        (3.0, 3.0)
    """
    plan = schedule(method, partition.replicas, minibatches, microbatches, partition.in_transit)
    workers = sum(partition.replicas)
    if cluster.workers < workers:
        raise ValueError(
            f"the partition needs {workers} workers, but the cluster has {cluster.workers}"
        )
    layers = {layer.name: layer for layer in profile.layers}
    unknown = {name for stage in partition.stages for name in stage.layers} - layers.keys()
    if unknown:
        raise ValueError(
            f"the partition is of another model: the profile has no layers {sorted(unknown)[:5]}"
        )
    parameters = sum(stage.parameter_bytes for stage in partition.stages)
    costs, first = [], 0
    for stage in partition.stages:
        parts = [layers[name] for name in stage.layers]
        share = stage.parameter_bytes / parameters if parameters else 0.0
        average_s = _allreduce_s(cluster.network, first, stage.replicas, stage.parameter_bytes)
        costs.append(
            StageCost(
                sum(layer.forward_s for layer in parts) / microbatches,
                sum(layer.backward_s for layer in parts) / microbatches,
                profile.update_s * share,
                stage.activation_out_bytes / microbatches,
                average_s,
            )
        )
        first += stage.replicas
    link = cluster.network.link_time
    return simulate_pipeline(
        plan,
        costs,
        bandwidth=link.bandwidth,
        latency=link.alpha,
        per_node=cluster.network.per_node,
        inside=cluster.network.inside,
        recompute=recompute,
        jitter=cluster.jitter,
        seed=seed,
        speeds=None if cluster.speeds is None else cluster.speeds[:workers],
    )


def _allreduce_s(network: Network, first: int, replicas: int, bytes: int) -> float:
    """Seconds to average over so many ranks, of which this is the first."""
    if replicas == 1:
        return 0.0
    per_node = network.per_node
    if first // per_node != (first + replicas - 1) // per_node:
        replicas = max(2, -(-replicas // per_node)) * per_node
    return float(network.comm(replicas)(bytes))


def _period(schedule: Schedule, completed: Sequence[float], total_s: float) -> float:
    # Order of completion may not be that of the minibatches where stages are replicated.
    ends = np.maximum.accumulate(completed)
    stages = len(schedule.replicas)
    draining = sum(schedule.replicas) + schedule.in_transit * (stages - 1)
    if schedule.method in {"gpipe", "1f1b-flush"}:
        draining = 0
    last = schedule.minibatches - 1 - -(-draining // schedule.microbatches)
    span = last - last // 2
    if span < 1:
        return total_s / schedule.minibatches
    settled = ends[last - span : last + 1]
    # Workers take turns of some minibatches: count whole turns, where all of them are alike.
    for turn in range(1, span // 2 + 1):
        turn_s = settled[turn:] - settled[:-turn]
        if np.ptp(turn_s) <= 1e-9 * turn_s[-1]:
            whole = span // turn * turn
            return float(settled[-1] - settled[-1 - whole]) / whole
    return float(settled[-1] - settled[0]) / span
