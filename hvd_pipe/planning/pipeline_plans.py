"""What a pipeline needs and does, and which of its plans is fastest as it runs.

Memory follows from the schedule itself, walked instruction by instruction. A version of the
weights may go once it is not the newest and no later instruction of the worker names it; what a
forward pass keeps goes with its backward pass. Of all moments the one with the most counts.

Plans that are tried: the best on paper (:mod:`hvd_pipe.planning.partition`), the best for slower
links, one worker a stage, equally many replicas a stage, and two stages of which the second has
few. Those that could win are simulated, with as many minibatches in transit as each needs, as
replicas that finish in bursts are slower than on paper.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.partition import partition
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.schedule import (
    Backward,
    Forward,
    Instruction,
    Schedule,
    Update,
    Worker,
    mode_named,
    schedule,
    warm_up,
)
from hvd_pipe.planning.simulate_pipeline import simulate_partition
from hvd_pipe.planning.stages import Partition

REACHED = 0.98
"""The part of a plan's speed at which its schedule has reached it.

Not less: a real message takes longer than a planned one, and where too few are in transit, all
stages wait for that.
"""

MOST_IN_TRANSIT = 3
"""One hides messages; more make up for bursts of replicas, at a price in every stage."""

_SLOWER = (0.7, 0.6, 0.5)  # links, for plans with slack
_DEEPEST = 16  # stages of equally many replicas
_MOST_TURNS = 8  # rounds of unlike replicas, in workers, above which a plan is not looked at


@dataclass(frozen=True)
class Held:
    """What a worker holds at most, as its schedule has it."""

    versions: int  # of its weights, the newest among them
    in_flight: int  # microbatches that have been forward and not yet backward
    staleness: int  # updates between a gradient's forward pass and its own update


@dataclass(frozen=True)
class PipelineCost:
    """What a partition costs in a mode; tuples have an entry a stage."""

    mode: str
    microbatches: int  # of a minibatch; 1 where the mode has none
    held: tuple[Held, ...]  # by the worker of a stage that holds the most
    memory_bytes: tuple[int, ...]  # of it: weights, gradients, optimizer state, activations
    activation_bytes: tuple[float, ...]  # the last of these
    period_s: float  # per minibatch in the steady state
    compute_s: float  # per minibatch, of the busiest stage, shared by its replicas
    replicas: tuple[int, ...]
    sent_bytes: tuple[float, ...]  # that leave each worker for a minibatch of the whole pipeline
    data_parallel_bytes: float  # that leave all workers for one, were each to hold the model

    @property
    def wire_bytes(self) -> float:
        """Bytes per minibatch that leave all workers together."""
        return math.fsum(r * x for r, x in zip(self.replicas, self.sent_bytes, strict=True))

    def saved(self, minibatches: int = 1) -> float:
        """The part of data parallelism's bytes that it does without; negative: it sends more."""
        parallel = self.data_parallel_bytes * minibatches
        return 1.0 - self.wire_bytes / parallel if parallel else 0.0

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
    """A profile and a partition for minibatches ``count`` times as large; an update takes as long.

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
    """What a worker holds at most while it carries out its program."""
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


def held_by_stage(plan: Schedule) -> tuple[Held, ...]:
    """The most that any worker of each stage holds."""
    most = []
    for stage, width in enumerate(plan.replicas):
        replicas = [held(plan.programs[Worker(stage, replica)]) for replica in range(width)]
        most.append(Held(*map(max, zip(*map(astuple, replicas), strict=True))))
    return tuple(most)


def pipeline_cost(
    partition: Partition,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    mode: str = "stash",
    microbatches: int | None = None,
    optimizer_bytes_per_parameter_byte: float = 1.0,
    recompute: bool = False,
) -> PipelineCost:
    """Memory, speed and traffic of a partition in a mode.

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
    ``2 (n-1)/n w`` bytes per minibatch leave all workers together. The period is simulated.
    """
    chosen, replicas, workers = mode_named(mode), partition.replicas, sum(partition.replicas)
    optimizer = optimizer_bytes_per_parameter_byte
    if not 0.0 <= optimizer < math.inf:
        raise ValueError(
            "optimizer_bytes_per_parameter_byte must be finite and at least 0 (0 plain SGD, 1 "
            f"momentum, 2 Adam), got {optimizer_bytes_per_parameter_byte}"
        )
    if microbatches is None:
        microbatches = fewest_microbatches(mode, replicas, in_transit=partition.in_transit)
    steady = _steady_minibatches(partition) if microbatches == 1 else 8
    run = simulate_partition(
        partition,
        profile,
        cluster,
        method=chosen.method,
        minibatches=steady,
        microbatches=microbatches,
        recompute=recompute,
    )
    program = schedule(chosen.method, replicas, steady, microbatches, partition.in_transit)
    stages = held_by_stage(program)
    by_name = {layer.name: layer for layer in profile.layers}
    parameters = math.fsum(stage.parameter_bytes for stage in partition.stages)
    memory, activations, sent, compute = [], [], [], []
    for stage, most in zip(partition.stages, stages, strict=True):
        layers = [by_name[name] for name in stage.layers]
        r, w, share = stage.replicas, stage.parameter_bytes, most.in_flight / microbatches
        part = 1 / microbatches if recompute else share
        kept = sum(layer.held_bytes for layer in layers) * part
        activations.append(kept + stage.activation_in_bytes * share)
        memory.append(math.ceil(w * (most.versions + 1 + optimizer) + activations[-1]))
        # Each replica makes every update: one a minibatch, or one for a minibatch of each.
        rounds = r if chosen.coalesces else 1
        messages = (stage.activation_out_bytes + stage.activation_in_bytes) / r
        sent.append(messages + 2 * (r - 1) / r * w / (r / rounds))
        passes = math.fsum(layer.forward_s for layer in layers) * (2 if recompute else 1)
        passes += math.fsum(layer.backward_s for layer in layers)
        compute.append((passes + profile.update_s * (w / (parameters or 1.0)) * rounds) / r)
    return PipelineCost(
        mode=mode,
        microbatches=microbatches,
        held=stages,
        memory_bytes=tuple(memory),
        activation_bytes=tuple(activations),
        period_s=run.period_s,
        compute_s=max(compute),
        replicas=replicas,
        sent_bytes=tuple(sent),
        data_parallel_bytes=2 * (workers - 1) / workers * parameters,
    )


def _steady_minibatches(partition: Partition) -> int:
    """Enough minibatches for a steady state: whole rounds of all replicas."""
    a_round = math.lcm(*partition.replicas)
    between = 4 * partition.in_transit * (len(partition.replicas) - 1)
    return a_round * -(-(max(128, 8 * sum(partition.replicas)) + between) // a_round)


def scheduled(
    plan: Partition,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    mode: str = "stash",
    in_transit: int | None = None,
    **how: Any,
) -> tuple[Partition, PipelineCost]:
    """The plan with as many minibatches in transit as it needs, and what it then costs.

    Modes that cut a minibatch keep the plan's number. ``how``: options of :func:`pipeline_cost`.
    """

    @functools.cache
    def cost(count: int) -> PipelineCost:
        return pipeline_cost(plan.with_in_transit(count), profile, cluster, mode=mode, **how)

    count = plan.in_transit if in_transit is None else in_transit
    if in_transit is None and not mode_named(mode).coalesces:
        periods: list[float] = []
        for tried in range(MOST_IN_TRANSIT + 1 if len(plan.stages) > 1 else 1):
            periods.append(cost(tried).period_s)
            if periods[-1] <= plan.period_s / REACHED:
                break
        enough_s = max(plan.period_s, min(periods)) / REACHED  # or what can be reached
        count = next(count for count, period_s in enumerate(periods) if period_s <= enough_s)
    limit = math.inf if cluster.memory_bytes is None else cluster.memory_bytes
    while in_transit is None and count and max(cost(count).memory_bytes) > limit:
        count -= 1
    stages = tuple(
        replace(stage, memory_bytes=memory)
        for stage, memory in zip(plan.stages, cost(count).memory_bytes, strict=True)
    )
    plan = replace(plan.with_in_transit(count), stages=stages, simulated_s=cost(count).period_s)
    return plan, cost(count)


@dataclass(frozen=True)
class Offer:
    """A plan for a worker's batch in a mode, and the costs of a minibatch."""

    plan: Partition
    cost: PipelineCost

    @property
    def period_s(self) -> float:
        """Seconds for a worker's batch."""
        return self.cost.period_s / self.cost.microbatches


class Planner:
    """Finds the plan with which a model on a cluster is fastest in a mode.

    ``how`` are options of :func:`hvd_pipe.planning.partition.partition`.
    """

    def __init__(
        self,
        profile: ModelProfile,
        cluster: Cluster,
        mode: str,
        optimizer_ratio: float = 1.0,
        in_transit: int | None = None,
        **how: Any,
    ) -> None:
        self.profile, self.cluster, self.mode = profile, cluster, mode_named(mode)
        self.optimizer_ratio, self.in_transit, self.how = optimizer_ratio, in_transit, how
        self.offer = functools.cache(self._offer)

    def divide(self, cluster: Cluster | None = None, **more: Any) -> Partition:
        """The best partition on paper."""
        return partition(
            self.profile,
            cluster or self.cluster,
            versions=self.mode.versions,
            optimizer_bytes_per_parameter_byte=self.optimizer_ratio,
            **self.how,
            **more,
        )

    def best(self, replicas: Sequence[int] | None = None) -> Partition:
        """The plan that is fastest as it runs, simulated; data parallelism is one of one stage.

        Example:
            >>> from hvd_pipe.planning.profile import LayerProfile
            >>> model = ModelProfile((
            ...     LayerProfile("a", 10**6, 0.02, 0.01, 10**6), LayerProfile("b", 10**8, 0.01)))
            >>> Planner(model, Cluster(4, Network(Link.of(1e9, 0.0))), "stash").best().config
            '3-1'
        """
        if replicas is not None:
            plan = self.divide(replicas=replicas)
            best = self.fastest([plan], replicas)
            return plan if best is None else best.plan
        whole = self.divide()
        plans = self.candidates([])
        if not plans and len(whole.stages) > 1:
            plans = [whole]
        best = self.fastest(plans)
        copies: Partition | None = whole
        if len(whole.stages) > 1:
            try:
                copies = self.divide(replicas=(self.cluster.workers,))
            except ValueError:  # too little memory, or a network of several levels
                copies = None
        if best is None or (copies is not None and copies.period_s <= best.period_s):
            return copies or whole
        return best.plan

    def choose(
        self, straight: bool = False, replicas: Sequence[int] | None = None
    ) -> tuple[Partition, Partition | None]:
        """The plan that simulates fastest, and the one with the best paper cost, if it differs."""
        plan = self.divide(straight=straight, replicas=replicas)
        if self.mode.name != "stash":
            return plan, None
        plan = self.offer(plan).plan
        best = plan if straight else self.best(replicas)
        if best.simulated_s is None:  # one stage
            best = self.offer(best).plan
        assert plan.simulated_s is not None
        assert best.simulated_s is not None
        return (best, plan) if best.simulated_s < plan.simulated_s else (plan, None)

    def candidates(self, reasons: list[str]) -> list[Partition]:
        """Partitions that fit into memory; says in ``reasons`` why others do not."""
        plans: dict[tuple[int, ...], Partition] = {}
        tries: list[dict[str, Any]] = [{}, {"straight": True}]
        if len(self.cluster.network.levels(self.cluster.workers)) == 1:
            tries += [{"replicas": replicas} for replicas in _shapes(self.cluster.workers)]
        for choice in tries:
            try:
                plan = self.divide(**choice)
            except ValueError as error:
                reasons.append(str(error))
                continue
            if self._is_tried(plan):
                plans.setdefault(plan.replicas, plan)
        return list(plans.values())

    def fastest(
        self,
        plans: Sequence[Partition],
        replicas: Sequence[int] | None = None,
        least_s: float = math.inf,
    ) -> Offer | None:
        """The plan that is simulated to be fastest, if faster than ``least_s``.

        Of plans that are about as fast, that with the fewest minibatches in flight: its gradients
        are the least late.
        """
        offers: list[Offer] = []

        def fastest_s() -> float:
            return min((offer.period_s for offer in offers), default=least_s)

        def race(plans: Sequence[Partition]) -> None:
            for plan in sorted(plans, key=lambda plan: plan.period_s):
                if self._bound(plan) < min(least_s, fastest_s() / REACHED):
                    offer = self.offer(plan)
                    if offer.period_s < least_s:
                        offers.append(offer)

        race(plans)
        promised = min((plan.period_s for plan in plans), default=math.inf)
        # Where a minibatch is cut, its number in transit is settled.
        if offers and fastest_s() > promised / REACHED and not self.mode.coalesces:
            known = plans[0].data_parallel_s  # with links as they are
            race([replace(plan, data_parallel_s=known) for plan in self._with_slack(replicas)])
        near = (offer for offer in offers if offer.period_s <= fastest_s() / REACHED)
        return min(near, key=lambda offer: (offer.plan.in_flight[0], offer.period_s), default=None)

    def _with_slack(self, replicas: Sequence[int] | None) -> list[Partition]:
        """The best plans for slower links, on which messages have time to wait for each other."""
        network = self.cluster.network
        if len(network.levels(self.cluster.workers)) > 1:
            return []
        link = network.link_time
        if network.per_node > 1 and network.inside is not None:
            link = network.inside
        plans: dict[tuple[tuple[str, ...], ...], Partition] = {}
        for factor in _SLOWER:
            slower = Network(Link(link.alpha, link.beta / factor))
            plan = self.divide(replace(self.cluster, network=slower), replicas=replicas)
            if self._is_tried(plan):
                plans.setdefault(tuple(stage.layers for stage in plan.stages), plan)
        return list(plans.values())

    def _is_tried(self, plan: Partition) -> bool:
        turns = math.lcm(*plan.replicas)
        return len(plan.stages) > 1 and turns <= _MOST_TURNS * self.cluster.workers

    def _bound(self, plan: Partition) -> float:
        """Seconds per worker's batch that no schedule of the plan can beat."""
        if self.cluster.jitter:
            return 0.0  # a run may be lucky
        speed = 1.0 if self.cluster.speeds is None else self.cluster.speeds[0]
        seconds = max(stage.compute_s / stage.replicas for stage in plan.stages) / speed
        network = self.cluster.network
        fastest = max(x.bandwidth for x in (network.link_time, network.inside) if x is not None)
        for stage, after in zip(plan.stages, plan.stages[1:], strict=False):
            links = min(stage.replicas, after.replicas)
            seconds = max(seconds, stage.activation_out_bytes / (fastest * links))
        return seconds

    def _offer(self, plan: Partition) -> Offer:
        count, stages, profile = 1, plan.stages, self.profile
        if self.mode.coalesces:
            step = math.lcm(*plan.replicas)
            near = step * max(1, round(self.cluster.workers / step))
            count = fewest_microbatches(self.mode.name, plan.replicas, near, self.in_transit or 0)
            profile, plan = coalesced(profile, plan, count)
        plan, cost = scheduled(
            plan,
            profile,
            self.cluster,
            mode=self.mode.name,
            in_transit=self.in_transit,
            microbatches=count,
            optimizer_bytes_per_parameter_byte=self.optimizer_ratio,
        )
        if count > 1:
            plan = replace(plan, stages=stages, simulated_s=cost.period_s / count)
        return Offer(plan, cost)


def _shapes(workers: int) -> Iterator[tuple[int, ...]]:
    """Two stages of which the second has few workers, and equally many replicas a stage."""
    few = 1
    while 2 * few <= workers:
        yield (workers - few, few)
        few *= 2
    deepest = min(_DEEPEST, workers)
    yield from (
        (workers // depth,) * depth for depth in range(2, deepest + 1) if workers % depth == 0
    )
