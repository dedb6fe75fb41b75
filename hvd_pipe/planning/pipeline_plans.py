"""Which plan of a pipeline is fastest as it runs.

Among the plans that are tried are the best on paper (:mod:`hvd_pipe.planning.partition`), the best
for slower links, which leaves messages time to wait for each other, one worker a stage, equally
many replicas a stage, and two stages of which the second has few. All but
those that could not win are simulated, with as many minibatches in transit as each needs, as
replicas that finish in bursts are slower than on paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.partition import partition
from hvd_pipe.planning.pipeline_cost import (
    PipelineCost,
    coalesced,
    fewest_microbatches,
    pipeline_cost,
    steady_minibatches,
)
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.schedule import mode_named
from hvd_pipe.planning.simulate_pipeline import simulate_partition
from hvd_pipe.planning.stages import Partition

REACHED = 0.98
"""The part of a plan's speed at which its schedule has reached it.

Not less: a real message takes longer than a planned one, and where too few are in transit, all
stages wait for that.
"""

MOST_IN_TRANSIT = 3
"""One hides messages; more make up for bursts of replicas, at a price in every stage."""


def scheduled(
    plan: Partition,
    profile: ModelProfile,
    cluster: Cluster,
    *,
    mode: str = "stash",
    microbatches: int | None = None,
    optimizer_bytes_per_parameter_byte: float = 1.0,
    recompute: bool = False,
    in_transit: int | None = None,
) -> tuple[Partition, PipelineCost]:
    """The plan with as many minibatches in transit as it needs, and what it then costs.

    Modes that cut a minibatch keep the plan's number: their minibatch would have to grow.

    Example:
        >>> from hvd_pipe.planning.cluster import Link, Network
        >>> from hvd_pipe.planning.partition import partition
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> layer = LayerProfile("layer", 800, 2.0, 1.0, 10**9)
        >>> model = ModelProfile(tuple(replace(layer, name=name) for name in "abc"))
        >>> cluster = Cluster(3, Network(Link.of(1e9, 0.0)))
        >>> plan = partition(model, cluster, straight=True)
        >>> found, _ = scheduled(plan, model, cluster)
        >>> found.period_s, scheduled(plan, model, cluster, in_transit=0)[0].simulated_s
        (3.0, 4.333333333333333)
        >>> found.in_transit, found.simulated_s, found.in_flight
        (1, 3.0, (5, 3, 1))
    """
    periods: list[float] = []

    def costs(count: int) -> PipelineCost:
        return pipeline_cost(
            plan.with_in_transit(count),
            profile,
            cluster,
            mode=mode,
            microbatches=microbatches,
            optimizer_bytes_per_parameter_byte=optimizer_bytes_per_parameter_byte,
            recompute=recompute,
            period_s=periods[count] if count < len(periods) else None,
        )

    if in_transit is None and not mode_named(mode).coalesces:
        periods = _periods(plan, profile, cluster, mode_named(mode).method, recompute)
        count = _fewest(plan, periods)
    else:
        count = plan.in_transit if in_transit is None else in_transit
    cost = costs(count)
    while in_transit is None and count and _exceeds(cluster, cost):
        count -= 1
        cost = costs(count)
    stages = tuple(
        replace(stage, memory_bytes=memory)
        for stage, memory in zip(plan.stages, cost.memory_bytes, strict=True)
    )
    found = plan.with_in_transit(count)
    return replace(found, stages=stages, simulated_s=cost.period_s), cost


def _periods(
    plan: Partition, profile: ModelProfile, cluster: Cluster, method: str, recompute: bool
) -> list[float]:
    """Simulated periods by the minibatches in transit, up to what reaches the plan's period."""
    periods: list[float] = []
    for count in range(MOST_IN_TRANSIT + 1 if len(plan.stages) > 1 else 1):
        tried = plan.with_in_transit(count)
        steady = steady_minibatches(tried)
        run = simulate_partition(
            tried, profile, cluster, method=method, minibatches=steady, recompute=recompute
        )
        periods.append(run.period_s)
        if run.period_s <= plan.period_s / REACHED:
            break
    return periods


def _fewest(plan: Partition, periods: list[float]) -> int:
    """The fewest minibatches in transit that reach the plan's period, or what can be reached."""
    enough_s = max(plan.period_s, min(periods)) / REACHED
    return next(count for count, period_s in enumerate(periods) if period_s <= enough_s)


def _exceeds(cluster: Cluster, cost: PipelineCost) -> bool:
    return cluster.memory_bytes is not None and max(cost.memory_bytes) > cluster.memory_bytes


_SLOWER = (0.7, 0.6, 0.5)  # links, for plans with slack
_DEEPEST = 16  # stages of equally many replicas
_MOST_TURNS = 8  # rounds of unlike replicas, in workers, above which a plan is not looked at


@dataclass(frozen=True)
class Offer:
    """A plan in a mode; its costs are of a minibatch, and it is for a worker's batch."""

    plan: Partition
    cost: PipelineCost

    @property
    def period_s(self) -> float:
        """Seconds for a worker's batch."""
        return self.cost.period_s / self.cost.microbatches


def best_plan(
    profile: ModelProfile,
    cluster: Cluster,
    mode: str,
    optimizer_ratio: float = 1.0,
    in_transit: int | None = None,
    replicas: Sequence[int] | None = None,
    offer: Callable[[Partition], Offer] | None = None,
    **how: Any,
) -> Partition:
    """The stages with which a pipeline, or data parallelism as one of one stage, is fastest.

    What counts is the period that the schedule reaches in a simulation (``simulated_s``).

    Example:
        >>> from hvd_pipe.planning.cluster import Link, Network
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model = ModelProfile((
        ...     LayerProfile("conv", 10**6, 0.02, 0.01, 10**6), LayerProfile("fc", 10**8, 0.01)))
        >>> best_plan(model, Cluster(4, Network(Link.of(1e9, 0.0))), "stash").config
        '3-1'
    """
    reasons: list[str] = []
    divide = divider(profile, cluster, mode, optimizer_ratio, **how)
    offer = offer or partial(
        offer_of, profile, cluster, mode, optimizer_ratio, in_transit=in_transit
    )
    if replicas is not None:
        cut = partial(divide, replicas=replicas)
        plan = cut()
        best = fastest(offer, [plan], slack_of(cut, cluster, mode), cluster)
        return plan if best is None else best.plan
    whole = divide()
    plans = plans_of(divide, cluster, reasons)
    if not plans and len(whole.stages) > 1:
        plans = [whole]
    best = fastest(offer, plans, slack_of(divide, cluster, mode), cluster)
    copies = _data_parallel(divide, whole, cluster)
    if best is None or (copies is not None and copies.period_s <= best.period_s):
        return copies or whole
    return best.plan


def divider(
    profile: ModelProfile, cluster: Cluster, mode: str, optimizer: float, **how: Any
) -> Callable[..., Partition]:
    def divide(cluster: Cluster = cluster, **more: Any) -> Partition:
        return partition(
            profile,
            cluster,
            versions=mode_named(mode).versions,
            optimizer_bytes_per_parameter_byte=optimizer,
            **how,
            **more,
        )

    return divide


def slack_of(
    divide: Callable[..., Partition], cluster: Cluster, mode: str
) -> Callable[[], list[Partition]]:
    """Finds plans with slack; none where a minibatch is cut, and its number in transit settled."""
    return list if mode_named(mode).coalesces else partial(_with_slack, divide, cluster)


def _with_slack(divide: Callable[..., Partition], cluster: Cluster) -> list[Partition]:
    """The best plans for slower links, on which messages have time to wait for each other."""
    network = cluster.network
    if len(network.levels(cluster.workers)) > 1:
        return []
    link = network.link_time
    if network.per_node > 1 and network.inside is not None:
        link = network.inside
    found: dict[tuple[tuple[str, ...], ...], Partition] = {}
    for factor in _SLOWER:
        slower = Network(Link(link.alpha, link.beta / factor))
        plan = divide(cluster=replace(cluster, network=slower))
        if _is_tried(plan, cluster):
            found.setdefault(tuple(stage.layers for stage in plan.stages), plan)
    return list(found.values())


def _is_tried(plan: Partition, cluster: Cluster) -> bool:
    return len(plan.stages) > 1 and math.lcm(*plan.replicas) <= _MOST_TURNS * cluster.workers


def fastest(
    offer: Callable[[Partition], Offer],
    plans: Sequence[Partition],
    slack: Callable[[], Sequence[Partition]],
    cluster: Cluster,
    least_s: float = math.inf,
) -> Offer | None:
    """What is fastest as it runs, and faster than this; plans with slack where others fail.

    Of plans that are about as fast, that with the fewest minibatches in flight: its gradients are
    the least late.
    """
    offers: list[Offer] = []

    def fastest_s() -> float:
        return min((found.period_s for found in offers), default=least_s)

    def race(plans: Sequence[Partition]) -> None:
        for plan in sorted(plans, key=lambda plan: plan.period_s):
            if _bound(plan, cluster) < min(least_s, fastest_s() / REACHED):
                found = offer(plan)
                if found.period_s < least_s:
                    offers.append(found)

    race(plans)
    promised = min((plan.period_s for plan in plans), default=math.inf)
    if offers and fastest_s() > promised / REACHED:
        known = plans[0].data_parallel_s  # with links as they are
        race([replace(plan, data_parallel_s=known) for plan in slack()])
    near = (found for found in offers if found.period_s <= fastest_s() / REACHED)
    return min(near, key=lambda each: (each.plan.in_flight[0], each.period_s), default=None)


def plans_of(
    divide: Callable[..., Partition], cluster: Cluster, reasons: list[str]
) -> list[Partition]:
    """Partitions to look at, which fit into the memory; what else there was goes to reasons."""
    found: dict[tuple[int, ...], Partition] = {}
    tries = [partial(divide), partial(divide, straight=True)]
    if len(cluster.network.levels(cluster.workers)) == 1:
        tries += [partial(divide, replicas=replicas) for replicas in _shapes(cluster.workers)]
    for make in tries:
        try:
            plan = make()
        except ValueError as error:
            reasons.append(str(error))
            continue
        if _is_tried(plan, cluster):
            found.setdefault(plan.replicas, plan)
    return list(found.values())


def _data_parallel(
    divide: Callable[..., Partition], whole: Partition, cluster: Cluster
) -> Partition | None:
    """The whole model on every worker, where that is the best partition or can be asked for."""
    if len(whole.stages) == 1:
        return whole
    try:
        return divide(replicas=(cluster.workers,))
    except ValueError:  # too little memory, or a network of several levels
        return None


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


def _bound(plan: Partition, cluster: Cluster) -> float:
    """Seconds per worker's batch that no schedule of the plan can beat."""
    speed = 1.0 if cluster.speeds is None else cluster.speeds[0]
    seconds = max(stage.compute_s / stage.replicas for stage in plan.stages) / speed
    if cluster.jitter:
        return 0.0  # a run may be lucky
    network = cluster.network
    fastest = max(x.bandwidth for x in (network.link_time, network.inside) if x is not None)
    for stage, after in zip(plan.stages, plan.stages[1:], strict=False):
        links = min(stage.replicas, after.replicas)
        seconds = max(seconds, stage.activation_out_bytes / (fastest * links))
    return seconds


def offer_of(
    profile: ModelProfile,
    cluster: Cluster,
    mode: str,
    optimizer: float,
    plan: Partition,
    in_transit: int | None = None,
) -> Offer:
    count, stages = 1, plan.stages
    if mode_named(mode).coalesces:
        step = math.lcm(*plan.replicas)
        near = step * max(1, round(cluster.workers / step))
        count = fewest_microbatches(mode, plan.replicas, near, in_transit or 0)
        profile, plan = coalesced(profile, plan, count)
    plan, cost = scheduled(
        plan,
        profile,
        cluster,
        mode=mode,
        microbatches=count,
        optimizer_bytes_per_parameter_byte=optimizer,
        in_transit=in_transit,
    )
    if count > 1:
        plan = replace(plan, stages=stages, simulated_s=cost.period_s / count)
    return Offer(plan, cost)
