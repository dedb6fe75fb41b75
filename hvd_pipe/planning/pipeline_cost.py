"""What a pipeline needs and does: memory of a stage, seconds per minibatch, bytes on the wire.

Memory follows from the schedule itself, walked instruction by instruction. A version of the
weights may go once it is not the newest and no later instruction of the worker names it; what a
forward pass keeps goes with its backward pass. Of all moments the one with the most counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.instructions import Backward, Forward, Instruction, Schedule, Update, Worker
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.schedule import mode_named, schedule, warm_up
from hvd_pipe.planning.simulate_pipeline import simulate_partition
from hvd_pipe.planning.stages import Partition, Stage


@dataclass(frozen=True)
class Held:
    """What a worker holds at most, as its schedule has it.

    Args:
        versions: of its weights, the newest among them.
        in_flight: microbatches that have been forward and not yet backward.
        staleness: updates that its weights have seen between a gradient's forward pass and its
            own update.
    """

    versions: int
    in_flight: int
    staleness: int


@dataclass(frozen=True)
class PipelineCost:
    """What a partition costs in a mode; tuples have an entry a stage.

    Args:
        mode: of :data:`hvd_pipe.planning.schedule.MODES`.
        microbatches: of a minibatch; 1 where the mode has none.
        held: by the worker of a stage that holds the most.
        memory_bytes: of that worker: weights, gradients, optimizer state, activations.
        activation_bytes: the last of these.
        period_s: seconds per minibatch in the steady state.
        compute_s: seconds per minibatch that the busiest stage computes, shared by its replicas.
        sent_bytes: bytes that leave each worker of a stage, a minibatch of the whole pipeline.
        data_parallel_bytes: that leave all workers for a minibatch, were each to hold the model.
    """

    mode: str
    microbatches: int
    held: tuple[Held, ...]
    memory_bytes: tuple[int, ...]
    activation_bytes: tuple[float, ...]
    period_s: float
    compute_s: float
    replicas: tuple[int, ...]
    sent_bytes: tuple[float, ...]
    data_parallel_bytes: float

    @property
    def wire_bytes(self) -> float:
        """Bytes per minibatch that leave all workers together."""
        return math.fsum(r * x for r, x in zip(self.replicas, self.sent_bytes, strict=True))

    @property
    def saved(self) -> float:
        """The part of data parallelism's bytes that it does without; negative where it sends more.

        Example:
            >>> held = (Held(1, 1, 0),)
            >>> PipelineCost("flush", 1, held, (8,), (0,), 1.0, 1.0, (2,), (1.0,), 8.0).saved
            0.75
        """
        if not self.data_parallel_bytes:
            return 0.0
        return 1.0 - self.wire_bytes / self.data_parallel_bytes

    @property
    def utilisation(self) -> float:
        """The part of the time in which the workers of the busiest stage compute."""
        return min(1.0, self.compute_s / self.period_s) if self.period_s else 1.0


def fewest_microbatches(
    mode: str, replicas: Sequence[int], least: int = 1, in_transit: int = 0
) -> int:
    """The fewest microbatches, and no fewer than ``least``, that a minibatch can have in a mode.

    All replicas of each stage do equal work, so it is a multiple of every R_s; with two versions a
    minibatch must cover what is in flight, ``R_s (warm-up + 1)``.

    Example:
        >>> fewest_microbatches("2bw", (15, 1)), fewest_microbatches("flush", (1, 1), least=8)
        (30, 8)
        >>> fewest_microbatches("stash", (15, 1))
        1
    """
    chosen = mode_named(mode)
    if not chosen.coalesces:
        return 1
    step = math.lcm(*replicas)
    if chosen.versions == "2bw":
        wide = enumerate(replicas)
        in_flight = (width * (warm_up(s, replicas, in_transit) + 1) for s, width in wide)
        least = max(least, *in_flight)
    return -(-least // step) * step


def coalesced(
    profile: ModelProfile, partition: Partition, count: int
) -> tuple[ModelProfile, Partition]:
    """The same for minibatches that many times as large; an update takes as long as it did.

    Cut into as many microbatches, each is one of the profile's minibatches.
    """
    layers = tuple(
        replace(
            layer,
            forward_s=layer.forward_s * count,
            backward_s=layer.backward_s * count,
            activation_bytes=layer.activation_bytes * count,
            saved_bytes=None if layer.saved_bytes is None else layer.saved_bytes * count,
        )
        for layer in profile.layers
    )
    stages = tuple(
        replace(
            stage,
            activation_in_bytes=stage.activation_in_bytes * count,
            activation_out_bytes=stage.activation_out_bytes * count,
        )
        for stage in partition.stages
    )
    return replace(profile, layers=layers), replace(partition, stages=stages)


def held(program: Iterable[Instruction]) -> Held:
    """What a worker holds at most while it carries out its program.

    Example:
        >>> from hvd_pipe.planning.schedule import one_f_one_b
        >>> for versions in ("stash", "vertical-sync"):
        ...     print([held(one_f_one_b(s, [1] * 3, 0, 12, versions)).versions for s in range(3)])
        [3, 2, 1]
        [3, 3, 3]
    """
    steps = list(program)
    named = Counter(step.version for step in steps if isinstance(step, Forward | Backward))
    newest = 0
    kept = {0}
    units = most_units = most_versions = stale = 0
    since: list[int] = []  # versions of the gradients that the next update applies
    for step in steps:
        if isinstance(step, Forward):
            units += 1
            most_units = max(most_units, units)
            named[step.version] -= 1
        elif isinstance(step, Backward):
            units -= 1
            named[step.version] -= 1
            since.append(step.version)
            if not named[step.version] and step.version != newest:
                kept.discard(step.version)
        elif isinstance(step, Update):
            stale = max([stale, *(newest - version for version in since)])
            since.clear()
            if not named[newest]:
                kept.discard(newest)
            newest = step.version
            kept.add(newest)
        most_versions = max(most_versions, len(kept))
    return Held(most_versions, most_units, stale)


def pipeline_cost(
    partition: Partition,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    mode: str = "stash",
    microbatches: int | None = None,
    optimizer_bytes_per_parameter_byte: float = 1.0,
    recompute: bool = False,
    period_s: float | None = None,
) -> PipelineCost:
    r"""Memory, speed and traffic of a partition in a mode.

    With w the bytes of a stage's weights, a those of its input and of what its layers keep for
    the backward pass of a minibatch (``LayerProfile.held_bytes``), v versions and k of m
    microbatches in flight (:func:`held`), r replicas::

        memory     w (v + 1 + optimizer) + a k / m
        recompute  w (v + 1 + optimizer) + input k / m + (a - input) / m
        sent       (out + in) / r + 2 (r - 1)/r w / (minibatches an update takes)

    A minibatch's activations leave the worker of one stage, their gradients, as large, the worker
    of the next; in a ring all-reduce of w bytes each replica sends ``2 (r-1)/r w``. An update
    takes one minibatch where it is cut into microbatches, and r, one a replica, where it is not.
    Data parallelism makes one all-reduce of all weights for a minibatch of each of n workers, so
    ``2 (n-1)/n w`` bytes per minibatch leave all workers together.

    The period is simulated (:mod:`hvd_pipe.planning.simulate_pipeline`).

    Example:
        >>> from hvd_pipe.planning.cluster import Link, Network
        >>> from hvd_pipe.planning.partition import partition
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> layers = (LayerProfile("a", 800, 2.0, 1.0, 80), LayerProfile("b", 400, 2.0, 1.0, 40))
        >>> model, cluster = ModelProfile(layers), Cluster(2, Network(Link(0.0, 0.0)))
        >>> plan = partition(model, [(2, 1e9)], straight=True)
        >>> cost = pipeline_cost(plan, model, cluster, mode="stash")
        >>> cost.memory_bytes, cost.period_s, cost.sent_bytes
        ((3360, 1320), 3.0, (80.0, 80.0))
        >>> [held.staleness for held in cost.held], cost.data_parallel_bytes
        ([1, 0], 1200.0)
    """
    chosen = mode_named(mode)
    replicas = partition.replicas
    _check_ratio(optimizer_bytes_per_parameter_byte)
    if microbatches is None:
        microbatches = fewest_microbatches(mode, replicas, in_transit=partition.in_transit)
    steady = steady_minibatches(partition, microbatches)
    if period_s is None:
        period_s = simulate_partition(
            partition,
            profile,
            cluster,
            method=chosen.method,
            minibatches=steady,
            microbatches=microbatches,
            recompute=recompute,
        ).period_s
    stages = _held(schedule(chosen.method, replicas, steady, microbatches, partition.in_transit))
    by_name = {layer.name: layer for layer in profile.layers}
    parameters = math.fsum(stage.parameter_bytes for stage in partition.stages)
    memory, activations, sent, compute = [], [], [], []
    for stage, found in zip(partition.stages, stages, strict=True):
        layers = [by_name[name] for name in stage.layers]
        share = found.in_flight / microbatches
        passes_keep = sum(layer.held_bytes for layer in layers)
        kept = passes_keep * (1 / microbatches if recompute else share)
        activations.append(kept + stage.activation_in_bytes * share)
        copies = found.versions + 1 + optimizer_bytes_per_parameter_byte  # 1: gradients
        memory.append(math.ceil(stage.parameter_bytes * copies + activations[-1]))
        r = stage.replicas
        sent.append(_sent_bytes(stage, 1 if chosen.coalesces else r))
        part = stage.parameter_bytes / parameters if parameters else 0.0
        # Each replica makes every update: one a minibatch, or one for a minibatch of each.
        updates = profile.update_s * part * (r if chosen.coalesces else 1)
        compute.append((_passes_s(layers, recompute) + updates) / r)
    workers = sum(replicas)
    return PipelineCost(
        mode=mode,
        microbatches=microbatches,
        held=tuple(stages),
        memory_bytes=tuple(memory),
        activation_bytes=tuple(activations),
        period_s=period_s,
        compute_s=max(compute),
        replicas=replicas,
        sent_bytes=tuple(sent),
        data_parallel_bytes=2 * (workers - 1) / workers * parameters,
    )


def _check_ratio(optimizer_bytes_per_parameter_byte: float) -> None:
    if not 0.0 <= optimizer_bytes_per_parameter_byte < math.inf:
        raise ValueError(
            "optimizer_bytes_per_parameter_byte must be finite and at least 0 (0 plain SGD, 1 "
            f"momentum, 2 Adam), got {optimizer_bytes_per_parameter_byte}"
        )


def _sent_bytes(stage: Stage, minibatches: int) -> float:
    """Bytes per minibatch that a replica sends, with a ring all-reduce in so many minibatches."""
    r = stage.replicas
    messages = (stage.activation_out_bytes + stage.activation_in_bytes) / r
    ring = 2 * (r - 1) / r * stage.parameter_bytes
    return messages + ring / minibatches


def _passes_s(layers: Sequence[LayerProfile], recompute: bool) -> float:
    forward = math.fsum(layer.forward_s for layer in layers)
    return forward * (2 if recompute else 1) + math.fsum(layer.backward_s for layer in layers)


def steady_minibatches(partition: Partition, microbatches: int = 1) -> int:
    """So many that the pipeline is steady for a while: whole rounds of all replicas."""
    if microbatches > 1:
        return 8
    replicas = partition.replicas
    a_round = math.lcm(*replicas)
    between = 4 * partition.in_transit * (len(replicas) - 1)
    return a_round * -(-(max(128, 8 * sum(replicas)) + between) // a_round)


def _held(plan: Schedule) -> list[Held]:
    """The most that any worker of each stage holds."""
    most: list[Held] = []
    for stage, width in enumerate(plan.replicas):
        found = [held(plan.programs[Worker(stage, replica)]) for replica in range(width)]
        most.append(
            Held(
                max(one.versions for one in found),
                max(one.in_flight for one in found),
                max(one.staleness for one in found),
            )
        )
    return most
