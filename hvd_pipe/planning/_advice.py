"""One row of the advice: a method with its predicted step, memory and stability."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hvd_pipe.planning.codec import NONE, CodecCost
from hvd_pipe.planning.methods import HorovodFusion, LocalSGD, Method, WidePipeSGD
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.timing import StepTime
from hvd_pipe.strategy import CoCoD, PipeSGD

__all__ = ["PipelinePlan", "Row", "Training", "memory_bytes", "stability"]


_MOMENTUM = 0.9  # where none is given, warn of what this would do


@dataclass(frozen=True)
class Training:
    """What is known of the training; `hvd_pipe.planning.advise.advise` says what each is."""

    learning_rate: float | None
    curvature: float | None
    momentum: float | None
    optimizer_ratio: float


@dataclass(frozen=True)
class PipelinePlan:
    """PipeDream's stages, and their price; tuples have an entry a stage.

    Args:
        plan: what ``plan=`` takes: "15-1", "straight".
        replicas: workers of each stage.
        mode: what ``mode=`` takes.
        microbatches: of a minibatch, each as large as a worker's batch; 1 where the mode has none.
        period_s: seconds in which the pipeline trains one worker's batch.
        memory_bytes: of a worker, its activations included.
        versions: of the weights that a worker holds.
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
        compression: what ``compression=`` takes.
        codec: its name.
        baseline: shown for comparison, not to be recommended.
        time: seconds of a step, its limit, messages; simulated where workers jitter.
        speedup: samples per second over those of one worker of speed 1 that computes alone.
        samples_per_s: of all workers; None where the profile has no batch.
        memory_bytes: of a worker, without activations (:mod:`hvd_pipe.planning._advice`).
        staleness: how many updates old a worker's gradient is, at most, when all have it.
        identical: whether replicas are equal after each step.
        exact: whether it computes what synchronous SGD without compression does.
        batches: samples per step of each worker, where that keeps unequal workers in step.
        usable: stable and within the memory, as far as is known.
        warnings: what to look out for.
        reason: what its time is made of, in a sentence.
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


def stability(limit_at: Callable[[float], float], training: Training) -> tuple[bool, list[str]]:
    """Whether a method is known to diverge, and what to say about it."""
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


def memory_bytes(
    method: Method, profile: ModelProfile, codec: CodecCost = NONE, optimizer_ratio: float = 1.0
) -> int:
    """Weights, gradients, optimizer state and the method's buffers on one worker.

    In copies of the model, besides weights and the optimizer's state::

        merged-gradient, conventional   1    gradients, which are views into the buckets
        horovod                         1    and the fusion buffer, as large as the threshold
        pipe-sgd                        2    two sets of buckets; prediction=previous: 3, of the
                                             true weights; local: 5, of own gradients as well
        wide-pipe-sgd                   K    a set of buckets for each step in flight
        local-sgd                       2    gradients, and the vector that travels
        cocod                           3    gradients, the vector, the models of the round's start
                                             (pull_back: no start, but 2 for the anchor where it
                                             has momentum; outer: 2 more; a codec: 1 for the last
                                             mean; averaged momentum: the vector and start of
                                             momenta, too)

    Args:
        method: any.
        profile: the model; its gradients are as large as its weights.
        codec: compression; its own small buffers are not counted.
        optimizer_ratio: bytes of optimizer state a byte of weights: 1 with momentum, 2 with Adam.

    Raises:
        ValueError: a negative ratio.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> model = ModelProfile((LayerProfile("fc", 1000, 0.1),))
        >>> memory_bytes(PipeSGD(), model), memory_bytes(CoCoD(), model, optimizer_ratio=2.0)
        (4000, 6000)
    """
    if not optimizer_ratio >= 0.0:
        raise ValueError(
            "the optimizer's bytes a byte of weights must be at least 0 (0 plain SGD, 1 momentum, "
            f"2 Adam), got {optimizer_ratio}"
        )
    copies, extra = 1.0, 0
    if isinstance(method, PipeSGD):
        copies = {"none": 2.0, "previous": 3.0, "local": 5.0}[method.prediction]
    elif isinstance(method, WidePipeSGD):
        copies = float(method.width)
    elif isinstance(method, LocalSGD):
        copies = 2.0
    elif isinstance(method, CoCoD):
        averaged = 2.0 if method.pull_back is None else 1.0  # the vector, and the start
        copies += averaged + (codec.ratio != 1.0) + _slow_copies(method)
        copies += averaged * optimizer_ratio if method.momentum == "average" else 0.0
    elif isinstance(method, HorovodFusion):
        extra = method.threshold_bytes
    model = int(profile.gradient_bytes().sum())
    return round(model * (1.0 + optimizer_ratio + copies)) + extra


def _slow_copies(method: CoCoD) -> float:
    """An anchor that has momentum, or an outer model, and its velocity."""
    return 2.0 if method.anchor_momentum or method.outer != "none" else 0.0
