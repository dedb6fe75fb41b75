"""PipeDream's rows of the advice: which stages, in which mode, how fast and at what price.

A pipeline trains one minibatch, a worker's batch, a period; n workers with a copy of the model
each train n of them a step. So a row's step is n periods, in which as many samples are trained.
Modes that cut a minibatch get microbatches as large as a worker's batch, as many as there are
workers, or the nearest number that their replicas can share: an update then sees about as many
samples as one of data parallelism.

Which plans are tried is said in :mod:`hvd_pipe.planning.pipeline_plans`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hvd_pipe.planning._advice import PipelinePlan, Row, Training, stability
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.modes import mode_named
from hvd_pipe.planning.pipeline_cost import (
    PipelineCost,
)
from hvd_pipe.planning.pipeline_plans import (
    Offer,
    divider,
    fastest,
    offer_of,
    plans_of,
    slack_of,
)
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.stability import delayed_rate
from hvd_pipe.planning.stages import STRAIGHT, Partition
from hvd_pipe.planning.timing import StepTime
from hvd_pipe.units import format_bytes, format_seconds

__all__ = ["MODES", "PIPEDREAM", "pipeline_rows"]

PIPEDREAM = "pipedream"
"""Its name among the methods that :func:`hvd_pipe.planning.advise.advise` chooses from."""

MODES = ("stash", "2bw", "flush")


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
        pipedream 3-1 stash 0.04 2
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
        divide = divider(profile, cluster, mode, training.optimizer_ratio)
        # Without a limit of memory, plans do not depend on the versions that a mode keeps.
        if mode == MODES[0] or cluster.memory_bytes is not None:
            plans = plans_of(divide, cluster, reasons)
        fitting = fitting or bool(plans)
        offer = partial(offer_of, profile, cluster, mode, training.optimizer_ratio)
        best = fastest(offer, plans, slack_of(divide, cluster, mode), cluster, slowest_s)
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


def _refused(profile: ModelProfile, cluster: Cluster) -> str | None:
    """Why there can be no pipeline."""
    if cluster.workers == 1:
        return "there is one worker"
    if cluster.speeds is not None and len(set(cluster.speeds)) > 1:
        return "its stages are for workers of one speed"
    if not any(layer.activation_bytes for layer in profile.layers):
        return (
            "the profile has no activation_bytes, so nothing is known of the messages between "
            "stages; measure it with hvd-pipe profile models.py:make --input 32,3,224,224"
        )
    return None


def _row(profile: ModelProfile, cluster: Cluster, offer: Offer, training: Training) -> Row:
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


def _time(name: str, cluster: Cluster, offer: Offer) -> StepTime:
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


def _plan(name: str, offer: Offer, workers: int) -> PipelinePlan:
    cost = offer.cost
    cut = f", microbatches={cost.microbatches}" if cost.microbatches > 1 else ""
    cut += f", in_transit={offer.plan.in_transit}" if offer.plan.in_transit else ""
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
