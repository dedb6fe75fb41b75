"""Which strategy, with which options, how fast, at what price, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvd_pipe.planning._advice import PipelinePlan, Row, Training, memory_bytes, stability
from hvd_pipe.planning.advise_pipeline import PIPEDREAM, pipeline_rows
from hvd_pipe.planning.balance import split_batch
from hvd_pipe.planning.choice import MARGIN, candidates
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.codec import CODECS, CodecCost
from hvd_pipe.planning.messages import node_comm
from hvd_pipe.planning.methods import (
    BASELINES,
    Conventional,
    HorovodFusion,
    LocalSGD,
    Method,
    WidePipeSGD,
    label,
    parse,
    spell,
)
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.simulate import simulate
from hvd_pipe.planning.stability import stable_rate
from hvd_pipe.planning.timing import StepTime, step_time
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD
from hvd_pipe.units import format_bytes, format_seconds

__all__ = ["MARGIN", "Advice", "PipelinePlan", "Row", "advise"]

SCHEMA = "hvd_pipe.advice/1"

_SIMULATED_STEPS = 200
_PULL_BACK = 0.6  # as published for Overlap-Local-SGD
_OF_A_FRAGMENT = 0.75  # of its limit is stable where curvature couples fragments, too


@dataclass(frozen=True)
class Advice:
    """Rows, fastest first, and which one to take.

    Args:
        rows: all of them, baselines as well.
        best: the one to take.
        workers: of the cluster.
        reason: why this one, in a sentence.
        warnings: what no strategy changes.
        notes: why PipeDream is not among the rows, where it was to be.
    """

    rows: tuple[Row, ...]
    best: Row
    workers: int
    reason: str
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A dict for ``json.dump``; times have ``exposed_s`` and ``of_limit`` as well."""

        def row(one: Row) -> dict[str, Any]:
            derived = {"exposed_s": one.time.exposed_s, "of_limit": one.time.of_limit}
            return {**asdict(one), "time": {**asdict(one.time), **derived}}

        return {
            "schema": SCHEMA,
            "workers": self.workers,
            "best": row(self.best),
            "reason": self.reason,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "rows": [row(one) for one in self.rows],
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
            :mod:`hvd_pipe.planning.choice` fits them, ``merged-gradient:overlap=forward``, which
            must beat the default by more than ``margin``, and PipeDream, uncompressed, as
            :mod:`hvd_pipe.planning.advise_pipeline` does, which "pipedream" asks for, too.
        codecs: costs, or names of :data:`hvd_pipe.planning.codec.CODECS`.
        learning_rate, curvature, momentum: of the training, as far as known; curvature is the
            largest eigenvalue of the loss's Hessian.
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
    _check_numbers(learning_rate, curvature, momentum, margin)
    if not profile.gradient_bytes().size:
        raise ValueError("the profile has no layer with a gradient, so there is nothing to send")
    pipelined = methods is None or PIPEDREAM in methods
    chosen = (
        _candidates(profile, cluster)
        if methods is None
        # PipeDream alone is weighed against data parallelism.
        else tuple(parse(one) for one in methods if one != PIPEDREAM)
        or ((MergedGradient(),) if pipelined else ())
    )
    training = Training(learning_rate, curvature, momentum, optimizer_ratio)
    if methods is None:
        unstable = [one for one in chosen if _stability(one, training)[0]]
        chosen += tuple(each for one in unstable for each in _steadier(one, profile))
    costs = [_codec(codec) for codec in codecs]
    if not chosen or not costs:
        raise ValueError("nothing to choose from: give at least one method and one codec ('none')")
    wanted = dict.fromkeys((method, codec) for method in chosen for codec in costs)
    beside = [(method, CODECS["none"]) for method in BASELINES]
    beside = [pair for pair in beside if pair not in wanted]
    rows = [_row(profile, cluster, *pair, training, baseline=False) for pair in wanted]
    rows += [_row(profile, cluster, *pair, training, baseline=True) for pair in beside]
    notes: tuple[str, ...] = ()
    if pipelined:
        copies_s = (row.time.total_s for row in rows if row.exact and row.usable)
        least_s = min(copies_s, default=math.inf)
        pipelines, notes = pipeline_rows(profile, cluster, training, least_s)
        rows += pipelines
    rows.sort(key=lambda row: row.time.total_s)
    candidates = [row for row in rows if not row.baseline]
    best, reason = _recommended(candidates, margin)
    warnings = []
    copies = [row for row in candidates if row.pipeline is None]
    least = min(copies, key=lambda row: row.time.exposed_s).time
    stragglers = cluster.jitter and least.comm_s <= least.compute_s  # what waits is not for bytes
    if least.exposed_s > margin * least.compute_s and not stragglers:
        warnings.append(
            f"no strategy hides the communication: {least.method} leaves least, "
            f"{format_seconds(least.exposed_s)} a step of {format_seconds(least.total_s)}; "
            "compress, give cocod a longer period, or give each worker a larger batch"
        )
    return Advice(tuple(rows), best, cluster.workers, reason, tuple(warnings), notes)


def _candidates(profile: ModelProfile, cluster: Cluster) -> tuple[Method, ...]:
    compute = profile.compute_s
    if cluster.speeds is not None:
        compute *= cluster.workers / sum(cluster.speeds)
    fitted = candidates(profile, cluster.comm(), compute)
    return (fitted[0], MergedGradient(overlap="forward"), *fitted[1:])


def _recommended(rows: Sequence[Row], margin: float) -> tuple[Row, str]:
    usable = [row for row in rows if row.usable]
    fastest = (usable or list(rows))[0]
    exact = _exact(usable or rows, margin)
    name, seconds = _name(fastest), format_seconds(fastest.time.total_s)
    tail = "" if usable else " None is usable as it is: see its warnings."
    if exact is None:
        return fastest, f"{name} is the fastest, at {seconds} a step.{tail}"
    if exact.time.total_s <= fastest.time.total_s * (1.0 + margin):
        reason = f"{_name(exact)} is exact and takes {format_seconds(exact.time.total_s)} a step"
        if fastest is not exact:
            reason += (
                f"; the fastest, {name}, takes {seconds}, not more than {margin:.0%} less, "
                "and changes the mathematics"
            )
        return exact, f"{reason}.{tail}"
    return fastest, (
        f"{name} takes {seconds} a step, the fastest exact one ({_name(exact)}) "
        f"{format_seconds(exact.time.total_s)}: "
        f"{exact.time.total_s / fastest.time.total_s:.2f} times.{tail}"
    )


def _exact(rows: Sequence[Row], margin: float) -> Row | None:
    """The fastest exact row; the default where no other is faster by more than the margin."""
    exact = [row for row in rows if row.exact]
    default = (row for row in exact if row.strategy == MergedGradient.name)
    found = next(default, None)
    if found and found.time.total_s <= exact[0].time.total_s * (1.0 + margin):
        return found
    return next(iter(exact), None)


def _name(row: Row) -> str:
    return row.strategy if row.codec == "none" else f"{row.strategy} with {row.codec}"


def _row(
    profile: ModelProfile,
    cluster: Cluster,
    method: Method,
    codec: CodecCost,
    training: Training,
    baseline: bool,
) -> Row:
    method, batches, pace = _balanced(method, profile, cluster)
    node = node_comm(method, cluster.network)
    time = step_time(method, _slowed(profile, pace), cluster.comm(), codec, node)
    if cluster.jitter:
        run = simulate(profile, cluster, method, codec, _SIMULATED_STEPS, trace_workers=())
        time = replace(time, total_s=max(run.step_s, time.limit_s))
    memory = memory_bytes(method, profile, codec, training.optimizer_ratio)
    unstable, warnings = _stability(method, training)
    if isinstance(method, CoCoD | LocalSGD) and not baseline:
        warnings.append(
            "replicas differ until synchronize(): a long period and unlike data on workers cost "
            "accuracy"
        )
    fits = True
    if cluster.memory_bytes is not None:
        activations = sum(layer.activation_bytes for layer in profile.layers)
        fits = memory + activations <= cluster.memory_bytes
        if not fits:
            warnings.append(
                f"needs {format_bytes(memory)} and {format_bytes(activations)} of activations, "
                f"more than a worker's {format_bytes(cluster.memory_bytes)}"
            )
    if cluster.speeds is not None and pace * sum(cluster.speeds) > cluster.workers * (1 + 1e-6):
        warnings.append(_unbalanced(profile, cluster, pace))
    samples = None if profile.batch is None else cluster.workers * profile.batch
    total = time.total_s
    return Row(
        strategy=label(method) if _foreign(method) else spell(method),
        compression=f"hvd.Compression.{codec.name}",
        codec=codec.name,
        baseline=baseline,
        time=time,
        speedup=cluster.workers * profile.compute_s / total if total else float(cluster.workers),
        samples_per_s=None if samples is None or not total else samples / total,
        memory_bytes=memory,
        staleness=_staleness(method),
        identical=_identical(method),
        exact=codec.name == "none" and isinstance(method, MergedGradient | _Synchronous),
        batches=batches,
        usable=fits and not unstable,
        warnings=tuple(warnings),
        reason=_reason(time, method),
    )


_Synchronous = Conventional | HorovodFusion


def _foreign(method: Method) -> bool:
    """Whether ``strategy=`` knows no such method."""
    return not isinstance(method, MergedGradient | PipeSGD | CoCoD)


def _staleness(method: Method) -> int:
    if isinstance(method, PipeSGD):
        return 1
    if isinstance(method, WidePipeSGD):
        return method.width - 1
    if isinstance(method, LocalSGD):
        return method.period - 1
    # A round's first gradient is in the next round's start, which arrives a turn later.
    return method.period + method.turn - 1 if isinstance(method, CoCoD) else 0


def _identical(method: Method) -> bool:
    if isinstance(method, PipeSGD):
        return method.prediction != "local"  # each rank runs ahead by its own guess
    return not isinstance(method, LocalSGD | CoCoD)


def _balanced(
    method: Method, profile: ModelProfile, cluster: Cluster
) -> tuple[Method, tuple[int, ...] | None, float]:
    """The method with weights where it has them, its batches, the slowest worker's pace."""
    speeds = cluster.speeds or (1.0,) * cluster.workers
    weights = method.weights if isinstance(method, CoCoD) else None
    if weights is not None and len(weights) != cluster.workers:
        raise ValueError(
            f"CoCoD's weights are one a worker: {len(weights)} weights, {cluster.workers} workers"
        )
    batches = None
    if isinstance(method, CoCoD) and weights is None and min(speeds) < max(speeds):
        weights = speeds
        if profile.batch is not None:
            weights = batches = tuple(split_batch(cluster.workers * profile.batch, speeds))
        method = replace(method, weights=weights)
    if weights is None:
        return method, None, 1.0 / min(speeds)
    mean = sum(weights) / len(weights)
    pace = max(weight / mean / speed for weight, speed in zip(weights, speeds, strict=True))
    return method, batches, pace


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


def _stability(method: Method, training: Training) -> tuple[bool, list[str]]:
    is_cut = isinstance(method, CoCoD) and method.fragments > 1
    share = _OF_A_FRAGMENT if is_cut else 1.0
    return stability(lambda momentum: share * stable_rate(method, momentum), training)


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


def _codec(codec: CodecCost | str) -> CodecCost:
    if isinstance(codec, CodecCost):
        return codec
    if codec not in CODECS:
        raise ValueError(f"unknown codec {codec!r}: use one of {', '.join(map(repr, CODECS))}")
    return CODECS[codec]


def _check_numbers(
    rate: float | None, curvature: float | None, momentum: float | None, margin: float
) -> None:
    numbers = {"learning_rate": rate, "curvature": curvature, "margin": margin}
    for name, value in numbers.items():
        if value is not None and not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{name} must be finite and at least 0, got {value}")
    if momentum is not None and not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum must be from 0 to below 1, got {momentum}")
