"""How many minibatches are in transit between stages: as few as a plan's period needs.

A plan's period (:mod:`hvd_pipe.planning.partition`) takes all messages for hidden. The schedule
hides them only where enough minibatches are in flight: NOAM counts one in each worker, and none
between two stages. More of them cost memory (versions of weights, activations) and staleness, so
the fewest that reach the period are taken::

    in transit          0        1        2        3 at most
    simulated period    35 ms    26 ms                          promised: 25.9 ms, so 1

Where none reaches it, as replicas finish in bursts, the fewest that come as near as any are taken.
"""

from __future__ import annotations

from dataclasses import replace

from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.modes import mode_named
from hvd_pipe.planning.pipeline_cost import PipelineCost, pipeline_cost, steady_minibatches
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.simulate_pipeline import simulate_partition
from hvd_pipe.planning.stages import Partition

__all__ = ["MOST_IN_TRANSIT", "REACHED", "scheduled"]

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

    Args:
        plan: of :func:`hvd_pipe.planning.partition.partition`.
        profile, cluster, mode, microbatches, optimizer_bytes_per_parameter_byte, recompute: as
            :func:`hvd_pipe.planning.pipeline_cost.pipeline_cost`; more than the plan's own number
            are taken only where the cluster's memory allows it.
        in_transit: the number itself; None to find it.

    Returns:
        The plan with ``in_transit``, ``in_flight``, ``simulated_s`` and its stages' memory as they
        then are; and its cost.

    Raises:
        ValueError: as :func:`hvd_pipe.planning.pipeline_cost.pipeline_cost`.

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
