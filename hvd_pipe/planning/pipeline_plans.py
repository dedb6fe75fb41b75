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
from hvd_pipe.planning.in_transit import REACHED, scheduled
from hvd_pipe.planning.modes import mode_named
from hvd_pipe.planning.partition import partition
from hvd_pipe.planning.pipeline_cost import PipelineCost, coalesced, fewest_microbatches
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.stages import Partition

__all__ = ["Offer", "best_plan", "divider", "fastest", "offer_of", "plans_of", "slack_of"]

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

    Args:
        profile: the model on one worker; a microbatch of it, where the mode has them.
        cluster: workers and network; its memory is kept to.
        mode: of :data:`hvd_pipe.planning.modes.MODES`.
        optimizer_ratio: bytes of the optimizer's state a byte of parameters.
        in_transit: minibatches between two stages; None for as many as each plan needs.
        replicas: workers of each stage, where they are settled: the fastest cuts for them.
        offer: simulates a plan, as :func:`offer_of` does with the arguments above; None for that.
            One that remembers spares plans that the caller has asked for, too.
        how: more arguments of :func:`hvd_pipe.planning.partition.partition`.

    Raises:
        ValueError: nothing fits; says what would.

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
