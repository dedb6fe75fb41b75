"""PipeDream's rows of the advice: which stages, in which mode, how fast and at what price.

A pipeline trains one minibatch, a worker's batch, a period; n workers with a copy of the model
each train n of them a step. So a row's step is n periods, in which as many samples are trained.
Modes that cut a minibatch get microbatches as large as a worker's batch, as many as there are
workers, or the nearest number that their replicas can share: an update then sees about as many
samples as one of data parallelism.

Among the plans that are tried are the best on paper (:mod:`hvd_pipe.planning.partition`), one
worker a stage, equally many replicas a stage, and two stages of which the second has few. All but
those that could not win are simulated, as replicas that finish in bursts are slower than on paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from hvd_pipe.planning._advice import PipelinePlan, Row, Training, stability
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.modes import mode_named
from hvd_pipe.planning.partition import partition
from hvd_pipe.planning.pipeline_cost import (
    PipelineCost,
    coalesced,
    fewest_microbatches,
    pipeline_cost,
)
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.stability import delayed_rate
from hvd_pipe.planning.stages import STRAIGHT, Partition
from hvd_pipe.planning.timing import StepTime
from hvd_pipe.units import format_bytes, format_seconds

__all__ = ["MODES", "PIPEDREAM", "best_plan", "pipeline_rows"]

PIPEDREAM = "pipedream"
"""Its name among the methods that :func:`hvd_pipe.planning.advise.advise` chooses from."""

MODES = ("stash", "2bw", "flush")

_DEEPEST = 16  # stages of equally many replicas
_MOST_TURNS = 8  # rounds of unlike replicas, in workers, above which a plan is not looked at


@dataclass(frozen=True)
class _Offer:
    """A plan in a mode, with its seconds for a worker's batch."""

    plan: Partition
    cost: PipelineCost
    period_s: float


def pipeline_rows(
    profile: ModelProfile, cluster: Cluster, training: Training, data_parallel_s: float
) -> tuple[list[Row], tuple[str, ...]]:
    """A row for each mode in which a pipeline is faster than data parallelism.

    Args:
        profile: the model on one worker of speed 1.
        cluster: workers and network.
        training: what is known of it.
        data_parallel_s: seconds of the fastest exact step with a copy of the model on each worker;
            infinite where none can be.

    Returns:
        Rows, and if there are none, why not.

    Example:
        >>> from hvd_pipe.planning.cluster import Link, Network
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model = ModelProfile((
        ...     LayerProfile("conv", 10**6, 0.02, 0.01, 10**6), LayerProfile("fc", 10**8, 0.01)))
        >>> cluster = Cluster(4, Network(Link.of(1e9, 0.0)))
        >>> rows, notes = pipeline_rows(model, cluster, Training(None, None, None, 1.0), 0.19)
        >>> for row in rows:
        ...     print(row.strategy, round(row.time.total_s, 3), row.staleness)
        pipedream 3-1 stash 0.041 1
        pipedream 3-1 2bw 0.041 1
        pipedream 3-1 flush 0.083 0
    """
    refused = _refused(profile, cluster)
    if refused:
        return [], (f"No pipeline: {refused}.",)
    rows = []
    slowest_s = data_parallel_s / cluster.workers
    reasons: list[str] = []
    plans: list[Partition] = []
    fitting = False
    for mode in MODES:
        best: _Offer | None = None
        # Without a limit of memory, plans do not depend on the versions that a mode keeps.
        if mode == MODES[0] or cluster.memory_bytes is not None:
            plans = _plans(profile, cluster, mode, training.optimizer_ratio, reasons)
        fitting = fitting or bool(plans)
        for plan in sorted(plans, key=lambda plan: plan.period_s):
            least_s = best.period_s if best else slowest_s
            if _bound(plan, cluster) < least_s:
                offer = _offer(profile, cluster, plan, mode, training.optimizer_ratio)
                best = offer if offer.period_s < least_s else best
        if best is not None:
            rows.append(_row(profile, cluster, best, training))
    if rows:
        return rows, ()
    if not fitting:
        return [], (f"No pipeline: {reasons[0]}.",)
    return [], (
        "No pipeline: data parallelism is PipeDream's best partition here, as no other is faster "
        f"than {format_seconds(data_parallel_s)} a step.",
    )


def best_plan(
    profile: ModelProfile,
    cluster: Cluster,
    mode: str,
    optimizer_ratio: float = 1.0,
) -> Partition:
    """The stages with which a pipeline, or data parallelism as one of one stage, is fastest.

    Args:
        profile: the model on one worker; a microbatch of it, where the mode has them.
        cluster: workers and network; its memory is kept to.
        mode: of :data:`hvd_pipe.planning.modes.MODES`.
        optimizer_ratio: bytes of the optimizer's state a byte of parameters.

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
    plans = _plans(profile, cluster, mode, optimizer_ratio, reasons)
    offers = [_offer(profile, cluster, plan, mode, optimizer_ratio) for plan in plans]
    found = min(zip(offers, plans, strict=True), key=lambda pair: pair[0].period_s, default=None)
    whole = partition(
        profile,
        cluster,
        versions=mode_named(mode).versions,
        optimizer_bytes_per_parameter_byte=optimizer_ratio,
    )
    one_stage = len(whole.stages) == 1
    if found is None or (one_stage and whole.period_s <= found[0].period_s):
        return whole
    return found[1]


def _refused(profile: ModelProfile, cluster: Cluster) -> str | None:
    """Why there can be no pipeline."""
    if cluster.workers == 1:
        return "there is one worker"
    if cluster.speeds is not None and len(set(cluster.speeds)) > 1:
        return "its stages are for workers of one speed"
    if not any(layer.activation_bytes for layer in profile.layers):
        return (
            "the profile has no activation_bytes, so nothing is known of the messages between "
            "stages; measure it with hvd-pipe profile"
        )
    return None


def _plans(
    profile: ModelProfile, cluster: Cluster, mode: str, optimizer: float, reasons: list[str]
) -> list[Partition]:
    """Partitions to look at, which fit into the memory; what else there was goes to reasons."""
    divide = partial(
        partition,
        profile,
        cluster,
        versions=mode_named(mode).versions,
        optimizer_bytes_per_parameter_byte=optimizer,
    )
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
        turns = math.lcm(*plan.replicas)
        if len(plan.stages) > 1 and turns <= _MOST_TURNS * cluster.workers:
            found.setdefault(plan.replicas, plan)
    return list(found.values())


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


def _offer(
    profile: ModelProfile, cluster: Cluster, plan: Partition, mode: str, optimizer: float
) -> _Offer:
    count = 1
    if mode_named(mode).coalesces:
        step = math.lcm(*plan.replicas)
        near = step * max(1, round(cluster.workers / step))
        count = fewest_microbatches(mode, plan.replicas, near)
        profile, plan = coalesced(profile, plan, count)
    cost = pipeline_cost(
        plan,
        profile,
        cluster,
        mode=mode,
        microbatches=count,
        optimizer_bytes_per_parameter_byte=optimizer,
    )
    return _Offer(plan, cost, cost.period_s / count)


def _row(profile: ModelProfile, cluster: Cluster, offer: _Offer, training: Training) -> Row:
    cost, plan, workers = offer.cost, offer.plan, cluster.workers
    staleness = tuple(one.staleness for one in cost.held)
    oldest = max(staleness)
    name = STRAIGHT if max(plan.replicas) == 1 else plan.config
    time = _time(f"{PIPEDREAM} {name} {cost.mode}", cluster, offer)
    unstable, warnings = stability(partial(delayed_rate, oldest), training)
    samples = profile.batch / offer.period_s if profile.batch and offer.period_s else None
    made = _plan(name, offer, workers)
    return Row(
        strategy=time.method,
        compression="hvd.Compression.none",
        codec="none",
        baseline=False,
        time=time,
        speedup=profile.compute_s / offer.period_s if offer.period_s else float(workers),
        samples_per_s=samples,
        memory_bytes=round(
            max(
                whole - part
                for whole, part in zip(cost.memory_bytes, cost.activation_bytes, strict=True)
            )
        ),
        staleness=oldest,
        identical=True,
        exact=mode_named(cost.mode).synchronous,
        batches=None,
        usable=not unstable,
        warnings=tuple(warnings),
        reason=_reason(made, cost, workers),
        pipeline=made,
    )


def _time(name: str, cluster: Cluster, offer: _Offer) -> StepTime:
    cost, plan, workers = offer.cost, offer.plan, cluster.workers
    speed = 1.0 if cluster.speeds is None else cluster.speeds[0]
    total = workers * offer.period_s
    compute = min(total, workers * cost.compute_s / cost.microbatches / speed)
    bandwidth = cluster.network.link_time.bandwidth
    batches = [workers / replicas for replicas in plan.replicas]
    updates = [workers / cost.microbatches if cost.microbatches > 1 else x for x in batches]
    ends = len(plan.stages) - 1
    messages = (
        batches[at] * ((at > 0) + (at < ends)) + (plan.replicas[at] > 1) * updates[at]
        for at in range(ends + 1)
    )
    return StepTime(
        method=name,
        compute_s=compute,
        comm_s=workers * max(cost.sent_bytes) / cost.microbatches / bandwidth,
        total_s=total,
        limit_s=compute,
        messages=max(messages),
    )


def _plan(name: str, offer: _Offer, workers: int) -> PipelinePlan:
    cost = offer.cost
    cut = f", microbatches={cost.microbatches}" if cost.microbatches > 1 else ""
    # Of as many minibatches of one worker each, data parallelism sends for n of them at once.
    parallel = cost.data_parallel_bytes * cost.microbatches
    return PipelinePlan(
        plan=name,
        replicas=offer.plan.replicas,
        mode=cost.mode,
        microbatches=cost.microbatches,
        period_s=offer.period_s,
        memory_bytes=cost.memory_bytes,
        versions=tuple(one.versions for one in cost.held),
        staleness=tuple(one.staleness for one in cost.held),
        saved=1.0 - cost.wire_bytes / parallel if parallel else 0.0,
        paste=f'PipeDream(model, loss_fn, optimizer_fn, plan="{name}", mode="{cost.mode}"{cut})',
    )


def _reason(made: PipelinePlan, cost: PipelineCost, workers: int) -> str:
    """How busy it is, and its price by stage."""
    sends = f"{made.saved:.0%} less" if made.saved >= 0 else f"{-made.saved:.0%} more"
    text = (
        f"the busiest of {len(made.replicas)} stages computes {cost.utilisation:.0%} of the time; "
        f"sends {sends} than data parallelism; by stage, updates late {_each(made.staleness)}, "
        f"versions of the weights {_each(made.versions)}, memory with activations "
        f"{_each([format_bytes(size) for size in made.memory_bytes])}"
    )
    if made.microbatches > 1:
        text += (
            f"; the loader's minibatch is {made.microbatches} workers' batches, a microbatch "
            f"each, where an update of data parallelism has {workers}"
        )
    return text


def _each(values: Sequence[object]) -> str:
    """A few values, or what they are at the ends.

    >>> _each([3, 2, 1, 0]), _each([1, 1]), _each(range(16))
    ('3, 2, 1, 0', '1 each', '0 to 15')
    """
    if len(set(values)) == 1:
        return f"{values[0]} each"
    if len(values) > _MOST_LISTED:
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(str, values))


_MOST_LISTED = 5
