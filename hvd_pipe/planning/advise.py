"""Which strategy, with which options, how fast, at what price, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from hvd_pipe.cocod import split_batch
from hvd_pipe.planning import choice
from hvd_pipe.planning._checks import check_finite
from hvd_pipe.planning.choice import MARGIN
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.comm import CODECS, CodecCost
from hvd_pipe.planning.messages import node_comm
from hvd_pipe.planning.methods import (
    BASELINES,
    Conventional,
    HorovodFusion,
    LocalSGD,
    Method,
    WidePipeSGD,
    delayed_rate,
    memory_bytes,
    parse,
    spell,
    stable_rate,
)
from hvd_pipe.planning.pipeline_plans import Offer, PipelineCost, Planner
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.schedule import mode_named
from hvd_pipe.planning.simulate import pace_of, simulate
from hvd_pipe.planning.stages import STRAIGHT, Partition
from hvd_pipe.planning.timing import StepTime, step_time
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD
from hvd_pipe.units import format_bytes, format_seconds

__all__ = ["MARGIN", "Advice", "PipelinePlan", "Row", "advise"]


SCHEMA = "hvd_pipe.advice/1"

PIPEDREAM = "pipedream"
"""Its name among the methods that :func:`advise` chooses from."""

_MODES = ("stash", "2bw", "flush")
_MOMENTUM = 0.9  # where none is given, warn of what this would do
_MOST_LISTED = 5
_SIMULATED_STEPS = 200
_PULL_BACK = 0.6  # as published for Overlap-Local-SGD
_OF_A_FRAGMENT = 0.75  # of its limit is stable where curvature couples fragments, too


@dataclass(frozen=True)
class Training:
    """What is known of the training; see :func:`advise`."""

    learning_rate: float | None
    curvature: float | None
    momentum: float | None
    optimizer_ratio: float


@dataclass(frozen=True)
class PipelinePlan:
    """PipeDream's stages, and their price; tuples have an entry a stage.

    Args:
        plan, replicas: what ``plan=`` takes, such as "15-1", and workers of each stage.
        mode, microbatches: what ``mode=`` takes, and a minibatch's number of workers' batches.
        period_s: seconds in which the pipeline trains one worker's batch.
        memory_bytes, versions: of a worker, with activations, and versions of its weights.
        staleness: how many updates old its gradients are.
        saved: the part of data parallelism's bytes that it does not send.
        paste: the call that makes it.
    """

    plan: str
    replicas: tuple[int, ...]
    mode: str
    microbatches: int
    period_s: float
    memory_bytes: tuple[int, ...]
    versions: tuple[int, ...]
    staleness: tuple[int, ...]
    saved: float
    paste: str


@dataclass(frozen=True)
class Row:
    """One method with one codec, and what to expect of it.

    Args:
        strategy: what ``strategy=`` takes; of methods that are not hvd_pipe's, their name.
        compression, codec: what ``compression=`` takes, and its name.
        baseline: shown for comparison, not to be recommended.
        time: seconds of a step, its limit, messages; simulated where workers jitter.
        speedup: samples per second over those of one worker of speed 1 that computes alone.
        samples_per_s: of all workers; None where the profile has no batch.
        memory_bytes: of a worker, without activations.
        staleness: how many updates old a worker's gradient is, at most, when all have it.
        identical: whether replicas are equal after each step.
        exact: whether it computes what synchronous SGD without compression does.
        batches: samples per step of each worker, where that keeps unequal workers in step.
        usable: stable and within the memory, as far as is known.
        warnings, reason: what to look out for, and what its time is made of.
        pipeline: the plan, of PipeDream alone.
    """

    strategy: str
    compression: str
    codec: str
    baseline: bool
    time: StepTime
    speedup: float
    samples_per_s: float | None
    memory_bytes: int
    staleness: int
    identical: bool
    exact: bool
    batches: tuple[int, ...] | None
    usable: bool
    warnings: tuple[str, ...]
    reason: str
    pipeline: PipelinePlan | None = None


def _stability(limit_at: Callable[[float], float], training: Training) -> tuple[bool, list[str]]:
    """Whether a method is known to diverge, and warnings of that."""
    momentum = training.momentum or 0.0
    limit, usual = limit_at(momentum), 2.0 * (1.0 + momentum)
    rate, curvature = training.learning_rate, training.curvature
    bound = f"lr * curvature < {limit:.3g} (momentum {momentum:g}; synchronous SGD: {usual:.3g})"
    if rate is not None and curvature is not None:
        if rate * curvature < limit:
            return False, []
        most = format(limit / curvature, ".3g") if curvature else "any"
        return True, [
            f"diverges: it is stable only while {bound}, and {rate:g} * {curvature:g} = "
            f"{rate * curvature:.3g}; take a learning rate below {most}"
        ]
    supposed = _MOMENTUM if training.momentum is None else momentum
    with_it = limit_at(supposed)
    if with_it > 2.0 * (1.0 + supposed) * (1.0 - 1e-6):
        return False, []
    if training.momentum is None:
        return False, [
            f"stable only while lr * curvature < {limit:.3g} without momentum, < {with_it:.3g} "
            f"with {supposed:g} (synchronous SGD: 2, {2.0 * (1.0 + supposed):.3g}): give "
            "--momentum, --learning-rate, --curvature"
        ]
    times = f"{usual / limit:.3g} times"
    text = f"stable only while {bound}: the largest learning rate is {times} smaller"
    if rate is not None and rate > 0.0:
        text += f"; at {rate:g} that is a curvature below {limit / rate:.3g}"
    return False, [text]


def _pipeline_rows(
    profile: ModelProfile, cluster: Cluster, training: Training, data_parallel_s: float
) -> tuple[list[Row], tuple[str, ...]]:
    """A row for each mode in which a pipeline beats data parallelism, or why there is none."""
    refused = None
    if cluster.workers == 1:
        refused = "there is one worker"
    elif cluster.speeds is not None and len(set(cluster.speeds)) > 1:
        refused = "its stages are for workers of one speed"
    elif not any(layer.activation_bytes for layer in profile.layers):
        refused = (
            "the profile has no activation_bytes, so nothing is known of the messages between "
            "stages; measure it with hvd-pipe profile models.py:make --input 32,3,224,224"
        )
    if refused:
        return [], (f"No pipeline: {refused}.",)
    rows: list[Row] = []
    reasons: list[str] = []
    plans: list[Partition] = []
    fitting = False
    for mode in _MODES:
        planner = Planner(profile, cluster, mode, training.optimizer_ratio)
        # Without a limit of memory, plans do not depend on the versions that a mode keeps.
        if mode == _MODES[0] or cluster.memory_bytes is not None:
            plans = planner.candidates(reasons)
        fitting = fitting or bool(plans)
        best = planner.fastest(plans, least_s=data_parallel_s / cluster.workers)
        if best is not None:
            rows.append(_pipeline_row(profile, cluster, best, training))
    if rows:
        return rows, ()
    if not fitting:
        return [], (f"No pipeline: {reasons[0]}.",)
    return [], (
        "No pipeline: data parallelism is PipeDream's best partition here, as no other is faster "
        f"than {format_seconds(data_parallel_s)} a step.",
    )


def _pipeline_row(
    profile: ModelProfile, cluster: Cluster, offer: Offer, training: Training
) -> Row:
    cost, plan, workers = offer.cost, offer.plan, cluster.workers
    name = STRAIGHT if max(plan.replicas) == 1 else plan.config
    cut = f", microbatches={cost.microbatches}" if cost.microbatches > 1 else ""
    cut += f", in_transit={plan.in_transit}" if plan.in_transit else ""
    pipeline = PipelinePlan(
        plan=name,
        replicas=plan.replicas,
        mode=cost.mode,
        microbatches=cost.microbatches,
        period_s=offer.period_s,
        memory_bytes=cost.memory_bytes,
        versions=tuple(held.versions for held in cost.held),
        staleness=tuple(held.staleness for held in cost.held),
        saved=cost.saved(cost.microbatches),
        paste=f'PipeDream(model, loss_fn, optimizer_fn, plan="{name}", mode="{cost.mode}"{cut})',
    )
    oldest = max(pipeline.staleness)
    time = _pipeline_time(f"{PIPEDREAM} {name} {cost.mode}", cluster, offer)
    unstable, warnings = _stability(partial(delayed_rate, oldest), training)
    weights = zip(cost.memory_bytes, cost.activation_bytes, strict=True)
    return Row(
        strategy=time.method,
        compression="hvd.Compression.none",
        codec="none",
        baseline=False,
        time=time,
        speedup=profile.compute_s / offer.period_s if offer.period_s else float(workers),
        samples_per_s=profile.batch / offer.period_s if profile.batch and offer.period_s else None,
        memory_bytes=round(max(whole - activations for whole, activations in weights)),
        staleness=oldest,
        identical=True,
        exact=mode_named(cost.mode).synchronous,
        batches=None,
        usable=not unstable,
        warnings=tuple(warnings),
        reason=_pipeline_reason(pipeline, cost, workers),
        pipeline=pipeline,
    )


def _pipeline_time(name: str, cluster: Cluster, offer: Offer) -> StepTime:
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


def _pipeline_reason(pipeline: PipelinePlan, cost: PipelineCost, workers: int) -> str:
    saved, count = pipeline.saved, pipeline.microbatches
    sends = f"{saved:.0%} less" if saved >= 0 else f"{-saved:.0%} more"
    text = (
        f"the busiest of {len(pipeline.replicas)} stages computes {cost.utilisation:.0%} of the "
        f"time; sends {sends} than data parallelism; by stage, updates late "
        f"{_listed(pipeline.staleness)}, versions of the weights {_listed(pipeline.versions)}, "
        f"memory with activations {_listed([*map(format_bytes, pipeline.memory_bytes)])}"
    )
    if count > 1:
        text += (
            f"; the loader's minibatch is {count} workers' batches, a microbatch each, where an "
            f"update of data parallelism has {workers}"
        )
    return text


def _listed(values: Sequence[object]) -> str:
    """A few values, or the first and the last.

    >>> _listed([3, 2, 1, 0]), _listed([1, 1]), _listed(range(16))
    ('3, 2, 1, 0', '1 each', '0 to 15')
    """
    if len(set(values)) == 1:
        return f"{values[0]} each"
    if len(values) > _MOST_LISTED:
        return f"{values[0]} to {values[-1]}"
    return ", ".join(map(str, values))


@dataclass(frozen=True)
class Advice:
    """Rows, fastest first, and which one to take.

    Args:
        rows, best, workers: all, with baselines; the one to take; workers of the cluster.
        reason: why this one, in a sentence.
        warnings, notes: what no strategy changes; why PipeDream is not among the rows.
    """

    rows: tuple[Row, ...]
    best: Row
    workers: int
    reason: str
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dict for ``json.dump``; times have ``exposed_s`` and ``of_limit`` as well."""

        def document(row: Row) -> dict[str, Any]:
            derived = {"exposed_s": row.time.exposed_s, "of_limit": row.time.of_limit}
            return {**asdict(row), "time": {**asdict(row.time), **derived}}

        return {
            "schema": SCHEMA,
            "workers": self.workers,
            "best": document(self.best),
            "reason": self.reason,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "rows": [*map(document, self.rows)],
        }


def advise(
    profile: ModelProfile,
    cluster: Cluster,
    methods: Sequence[Method | str] | None = None,
    codecs: Sequence[CodecCost | str] = ("none",),
    *,
    learning_rate: float | None = None,
    curvature: float | None = None,
    momentum: float | None = None,
    optimizer_ratio: float = 1.0,
    margin: float = MARGIN,
) -> Advice:
    """Rank strategies for a model on a cluster, and recommend one.

    An exact strategy (synchronous, uncompressed) is recommended unless another one is faster by
    more than ``margin``; what is known to diverge or not to fit is not.

    Args:
        profile: the model on one worker of speed 1.
        cluster: workers and network. Where speeds differ, CoCoD gets batches in proportion to
            them, and its ``weights``; other methods wait for the slowest worker.
        methods: what to choose from, each with every codec; None: hvd_pipe's strategies, as
            :func:`hvd_pipe.planning.choice.candidates` fits them, ``overlap=forward``, which must
            beat the default by more than ``margin``, and PipeDream ("pipedream"), uncompressed.
        codecs: costs, or names of :data:`hvd_pipe.planning.comm.CODECS`.
        learning_rate, curvature, momentum: where known; curvature is the largest eigenvalue of
            the loss's Hessian.
        optimizer_ratio: bytes of optimizer state a byte of weights: 1 with momentum, 2 with Adam.
        margin: at least 0.

    Returns:
        The advice; wfbp, single and stock Horovod are shown beside, uncompressed.

    Raises:
        TypeError, ValueError: an unknown method or codec, nothing to choose from, or a number out
            of its range.

    Example:
        >>> from hvd_pipe.planning.cluster import Link, Network
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model = ModelProfile((LayerProfile("fc", 50_000_000, 0.020, 0.010),), batch=32)
        >>> advice = advise(model, Cluster(8, Network(Link.of(bandwidth=3e9, latency=30e-6))))
        >>> advice.best.strategy, round(advice.best.samples_per_s)
        ('pipe-sgd', 8533)
        >>> print(advice.reason)
        pipe-sgd takes 30 ms a step, the fastest exact one (merged-gradient) 59.6 ms: 1.99 times.
    """
    numbers = {"learning_rate": learning_rate, "curvature": curvature, "margin": margin}
    for name, value in numbers.items():
        if value is not None:
            check_finite(name, value)
    if momentum is not None and not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum must be from 0 to below 1, got {momentum}")
    if not profile.gradient_bytes().size:
        raise ValueError("the profile has no layer with a gradient, so there is nothing to send")
    training = Training(learning_rate, curvature, momentum, optimizer_ratio)
    chosen = _chosen(profile, cluster, methods, training)
    costs = []
    for codec in codecs:
        if not isinstance(codec, CodecCost) and codec not in CODECS:
            known = ", ".join(map(repr, CODECS))
            raise ValueError(f"unknown codec {codec!r}: use one of {known}")
        costs.append(codec if isinstance(codec, CodecCost) else CODECS[codec])
    if not chosen or not costs:
        raise ValueError("nothing to choose from: give at least one method and one codec ('none')")
    pairs = dict.fromkeys((method, codec) for method in chosen for codec in costs)
    rows = [_row(profile, cluster, *pair, training, baseline=False) for pair in pairs]
    for pair in ((method, CODECS["none"]) for method in BASELINES):
        if pair not in pairs:
            rows.append(_row(profile, cluster, *pair, training, baseline=True))
    notes: tuple[str, ...] = ()
    if methods is None or PIPEDREAM in methods:
        least_s = min((x.time.total_s for x in rows if x.exact and x.usable), default=math.inf)
        pipelines, notes = _pipeline_rows(profile, cluster, training, least_s)
        rows += pipelines
    rows.sort(key=lambda row: row.time.total_s)
    candidates = [row for row in rows if not row.baseline]
    best, reason = _recommended(candidates, margin)
    warnings = []
    times = [row.time for row in candidates if row.pipeline is None]
    least = min(times, key=lambda time: time.exposed_s)
    stragglers = cluster.jitter and least.comm_s <= least.compute_s  # what waits is not for bytes
    if least.exposed_s > margin * least.compute_s and not stragglers:
        warnings.append(
            f"no strategy hides the communication: {least.method} leaves least, "
            f"{format_seconds(least.exposed_s)} a step of {format_seconds(least.total_s)}; "
            "compress, give cocod a longer period, or give each worker a larger batch"
        )
    return Advice(tuple(rows), best, cluster.workers, reason, tuple(warnings), notes)


def _chosen(
    profile: ModelProfile,
    cluster: Cluster,
    methods: Sequence[Method | str] | None,
    training: Training,
) -> tuple[Method, ...]:
    """The methods to choose from but PipeDream; beside that alone, merged-gradient."""
    if methods is not None:
        chosen = tuple(parse(method) for method in methods if method != PIPEDREAM)
        return chosen or ((MergedGradient(),) if methods else ())
    compute = profile.compute_s
    if cluster.speeds is not None:
        compute *= cluster.workers / sum(cluster.speeds)
    merged, pipe, rounds = choice.candidates(profile, cluster.comm(), compute)
    fitted = (merged, MergedGradient(overlap="forward"), pipe, rounds)
    unstable = [method for method in fitted if _method_stability(method, training)[0]]
    return fitted + tuple(other for method in unstable for other in _steadier(method, profile))


def _recommended(rows: Sequence[Row], margin: float) -> tuple[Row, str]:
    """The row to take, and why."""

    def name_of(row: Row) -> str:
        return row.strategy if row.codec == "none" else f"{row.strategy} with {row.codec}"

    usable = [row for row in rows if row.usable]
    fastest = (usable or list(rows))[0]
    exacts = [row for row in usable or rows if row.exact]
    exact = next(iter(exacts), None)
    barriers = [spell(MergedGradient(overlap=overlap)) for overlap in ("auto", "backward")]
    default = next((row for row in exacts if row.strategy in barriers), None)
    if default and default.time.total_s <= exacts[0].time.total_s * (1.0 + margin):
        exact = default
    name, seconds = name_of(fastest), format_seconds(fastest.time.total_s)
    tail = "" if usable else " None is usable as it is: see its warnings."
    if exact is None:
        return fastest, f"{name} is the fastest, at {seconds} a step.{tail}"
    if exact.time.total_s <= fastest.time.total_s * (1.0 + margin):
        reason = f"{name_of(exact)} is exact and takes {format_seconds(exact.time.total_s)} a step"
        if fastest is not exact:
            reason += (
                f"; the fastest, {name}, takes {seconds}, not more than {margin:.0%} less, "
                "and changes the mathematics"
            )
        return exact, f"{reason}.{tail}"
    return fastest, (
        f"{name} takes {seconds} a step, the fastest exact one ({name_of(exact)}) "
        f"{format_seconds(exact.time.total_s)}: "
        f"{exact.time.total_s / fastest.time.total_s:.2f} times.{tail}"
    )


def _row(
    profile: ModelProfile,
    cluster: Cluster,
    method: Method,
    codec: CodecCost,
    training: Training,
    baseline: bool,
) -> Row:
    method, batches = _balanced(method, profile, cluster)
    pace = float(pace_of(cluster, method).max())
    node = node_comm(method, cluster.network)
    time = step_time(method, _slowed(profile, pace), cluster.comm(), codec, node)
    if cluster.jitter:
        run = simulate(profile, cluster, method, codec, _SIMULATED_STEPS, trace_workers=())
        time = replace(time, total_s=max(run.step_s, time.limit_s))
    memory = memory_bytes(method, profile, codec, training.optimizer_ratio)
    unstable, warnings = _method_stability(method, training)
    if isinstance(method, CoCoD | LocalSGD) and not baseline:
        warnings.append(
            "replicas differ until synchronize(): a long period and unlike data on workers cost "
            "accuracy"
        )
    activations = sum(layer.activation_bytes for layer in profile.layers)
    fits = cluster.memory_bytes is None or memory + activations <= cluster.memory_bytes
    if not fits:
        warnings.append(
            f"needs {format_bytes(memory)} and {format_bytes(activations)} of activations, "
            f"more than a worker's {format_bytes(cluster.memory_bytes or 0)}"
        )
    if cluster.speeds is not None and pace * sum(cluster.speeds) > cluster.workers * (1 + 1e-6):
        warnings.append(_unbalanced(profile, cluster, pace))
    samples = None if profile.batch is None else cluster.workers * profile.batch
    total = time.total_s
    return Row(
        strategy=spell(method),
        compression=f"hvd.Compression.{codec.name}",
        codec=codec.name,
        baseline=baseline,
        time=time,
        speedup=cluster.workers * profile.compute_s / total if total else float(cluster.workers),
        samples_per_s=None if samples is None or not total else samples / total,
        memory_bytes=memory,
        staleness=_staleness(method),
        # With local prediction, each rank runs ahead by its own guess.
        identical=not isinstance(method, LocalSGD | CoCoD)
        and getattr(method, "prediction", "none") != "local",
        exact=codec.name == "none"
        and isinstance(method, MergedGradient | Conventional | HorovodFusion),
        batches=batches,
        usable=fits and not unstable,
        warnings=tuple(warnings),
        reason=_reason(time, method),
    )


def _staleness(method: Method) -> int:
    """How many updates old a worker's gradient is, at most, when all have it."""
    match method:
        case PipeSGD():
            return 1
        case WidePipeSGD():
            return method.width - 1
        case LocalSGD():
            return method.period - 1
        case CoCoD():  # a round's first gradient is in the next start, which arrives a turn later
            return method.period + method.turn - 1
    return 0


def _balanced(
    method: Method, profile: ModelProfile, cluster: Cluster
) -> tuple[Method, tuple[int, ...] | None]:
    """The method with weights where workers differ, and their batches."""
    speeds = cluster.speeds or (1.0,) * cluster.workers
    batches = None
    if isinstance(method, CoCoD) and method.weights is None and min(speeds) < max(speeds):
        weights = speeds
        if profile.batch is not None:
            weights = batches = tuple(split_batch(cluster.workers * profile.batch, speeds))
        method = replace(method, weights=weights)
    return method, batches


def _unbalanced(profile: ModelProfile, cluster: Cluster, pace: float) -> str:
    assert cluster.speeds is not None
    even = profile.compute_s * cluster.workers / sum(cluster.speeds)
    text = (
        f"waits for the slowest worker in every step, {format_seconds(profile.compute_s * pace)} "
        f"of computation where batches in proportion to speed take {format_seconds(even)}"
    )
    if profile.batch is not None and cluster.workers <= 16:
        split = split_batch(cluster.workers * profile.batch, cluster.speeds)
        text += f" ({'/'.join(map(str, split))}, with each loss scaled by its part of the batch)"
    return text


def _slowed(profile: ModelProfile, pace: float) -> ModelProfile:
    if pace == 1.0:
        return profile
    layers = tuple(
        replace(layer, forward_s=layer.forward_s * pace, backward_s=layer.backward_s * pace)
        for layer in profile.layers
    )
    return replace(profile, layers=layers, update_s=profile.update_s * pace)


def _steadier(method: Method, profile: ModelProfile) -> tuple[Method, ...]:
    """A method that would diverge, with each option that lets it bear larger learning rates."""
    if isinstance(method, PipeSGD):
        return (replace(method, prediction="local"),)
    if not isinstance(method, CoCoD):
        return ()
    most = min(method.period, profile.gradient_bytes().size)
    fragments = next(count for count in range(most, 0, -1) if method.period % count == 0)
    return replace(method, pull_back=_PULL_BACK), replace(method, fragments=fragments)


def _method_stability(method: Method, training: Training) -> tuple[bool, list[str]]:
    is_cut = isinstance(method, CoCoD) and method.fragments > 1
    share = _OF_A_FRAGMENT if is_cut else 1.0
    return _stability(lambda momentum: share * stable_rate(method, momentum), training)


def _reason(time: StepTime, method: Method) -> str:
    compute, comm = format_seconds(time.compute_s), format_seconds(time.comm_s)
    exposed, limit = format_seconds(time.exposed_s), format_seconds(time.limit_s)
    every = ""
    if isinstance(method, LocalSGD | CoCoD):
        every = f", one average in {method.period} steps"
    hidden = "all hidden" if time.exposed_s <= 1e-9 * time.compute_s else f"{exposed} exposed"
    count = f"{time.messages:.3g} message{'' if time.messages == 1 else 's'}"
    return (
        f"{compute} of computation and {comm} of communication a step ({count}{every}), {hidden}: "
        f"{time.of_limit:.1%} of what its limit of {limit} allows"
    )
