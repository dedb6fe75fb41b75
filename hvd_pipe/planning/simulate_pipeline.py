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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hvd_pipe.planning._pipeline_run import PipelineRun, StageCost, check
from hvd_pipe.planning.instructions import Schedule, Worker
from hvd_pipe.planning.schedule import schedule
from hvd_pipe.timeline import Timeline

if TYPE_CHECKING:
    from hvd_pipe.planning.cluster import Cluster, Link, Network
    from hvd_pipe.planning.profile import ModelProfile
    from hvd_pipe.planning.stages import Partition

__all__ = ["PipelineSimulation", "StageCost", "simulate_partition", "simulate_pipeline"]


@dataclass(frozen=True)
class PipelineSimulation:
    """How a schedule went.

    Args:
        period_s: Seconds per minibatch in the steady state: the slope of the completed minibatches
            over the second half of those that are completed while new ones still come in, or
            ``total_s`` shared out if there are too few.
        total_s: Seconds from the first forward pass to the last update.
        utilisation: Of each worker, the part of ``total_s`` in which it computes.
        timeline: Ranks are stage by stage; lanes "compute", "network" (what leaves, and
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
    is at least the largest ``(forward + backward + update) / replicas`` of a stage, and is that if
    all stages have equally many replicas, or if there are two and R_2 divides R_1. Other replicas
    finish their rounds in bursts, which NOAM's minibatches in flight need not carry over: it may
    be twice as long. A message of c seconds between n equal stages of one worker makes it
    ``forward + backward + update + 2c(n - 1)/n``.

    Args:
        schedule: Of :func:`hvd_pipe.planning.schedule.schedule`.
        stages: Costs, one a stage.
        bandwidth: Bytes per second of each worker's link, each way.
        latency: Seconds per message, during which the link is taken.
        per_node: Workers of one machine, which has as many ranks in a row.
        inside: Between two workers of one machine; None for bandwidth and latency as elsewhere.
        recompute: Backward runs the forward pass once more, as it kept no activations.
        jitter: Coefficient of variation of each computation: lognormal, mean 1.
        seed: Of the jitter.
        speeds: Of each worker, in rank order (stage by stage); all 1 if None.

    Raises:
        ValueError: Costs, speeds or link that do not fit, or a schedule that does not run.

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
    check("latency", latency)
    check("jitter", jitter)
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
    within = between if inside is None else (inside.bandwidth, inside.alpha)
    run = PipelineRun(schedule, stages, between, within, per_node, recompute)
    sigma = math.sqrt(math.log1p(jitter * jitter))
    for worker, speed in zip(workers, speeds, strict=True):
        # Each worker has its own numbers, so that they do not depend on who comes first.
        draw = np.random.default_rng([seed, *worker]).lognormal(
            -sigma * sigma / 2.0, sigma, len(schedule.programs[worker])
        )
        run.factors[worker] = [float(factor) / speed for factor in draw]
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
    parameters. The cluster's jitter is taken for that of each computation.

    Ranks are stage by stage, and ``per_node`` of them in a row are on one machine. A message takes
    ``network.inside`` within a machine, else the link between machines. Replicas on several
    machines that they do not fill take an all-reduce over those machines as if they did.

    Args:
        partition: Of :func:`hvd_pipe.planning.partition.partition`; its ``in_transit`` is taken.
        profile: The model that it divides.
        cluster: Network, speeds and jitter; it has as many workers as the partition, or more.
        method, minibatches, microbatches: As :func:`hvd_pipe.planning.schedule.schedule`.
        recompute, seed: As :func:`simulate_pipeline`.

    Raises:
        ValueError: Numbers that the method cannot do with, too few workers, or another model.

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
        own = [layers[name] for name in stage.layers]
        share = stage.parameter_bytes / parameters if parameters else 0.0
        costs.append(
            StageCost(
                sum(layer.forward_s for layer in own) / microbatches,
                sum(layer.backward_s for layer in own) / microbatches,
                profile.update_s * share,
                stage.activation_out_bytes / microbatches,
                _allreduce_s(cluster.network, first, stage.replicas, stage.parameter_bytes),
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
    each = network.per_node
    if first // each != (first + replicas - 1) // each:
        replicas = max(2, -(-replicas // each)) * each
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
        took = settled[turn:] - settled[:-turn]
        if np.ptp(took) <= 1e-9 * took[-1]:
            whole = span // turn * turn
            return float(settled[-1] - settled[-1 - whole]) / whole
    return float(settled[-1] - settled[0]) / span
