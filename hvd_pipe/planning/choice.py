"""Which strategy fits a model and a network, with which options, and which a running job takes.

:func:`candidates` fits the options of each strategy to a profile and a network. A job with
``strategy="auto"`` (`hvd_pipe.strategy.Auto`) measures its own times (:class:`OwnTimes`), makes a
profile of them, predicts each strategy's step and takes the fastest (:func:`choose`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvd_pipe.planning.comm import NONE, CodecCost, CommModel
from hvd_pipe.planning.methods import DEFAULT_BUCKET_BYTES, spell
from hvd_pipe.planning.profile import FORWARD, LayerProfile, ModelProfile
from hvd_pipe.planning.timing import step_time
from hvd_pipe.strategy import CoCoD, MergedGradient, Method, PipeSGD

MARGIN = 0.05
"""What changes the mathematics, or asks more of a script, has to be faster by this part."""


@dataclass(frozen=True)
class OwnTimes:
    """Medians over steps, in seconds."""

    before_s: float  # from the end of a step to the first gradient of the next one
    ready_s: Sequence[float]  # from there to each one; one that was not computed: to the last
    update_s: float  # of the user's optimizer


def profile_of(times: OwnTimes, names: Sequence[str], sizes: Sequence[int]) -> ModelProfile:
    """Return a profile with a layer a parameter, in the reverse of the order of readiness.

    Its first layer, ``(forward)``, has all that comes before the first gradient, which is thus
    ready as backward starts.

    Example:
        >>> profile = profile_of(OwnTimes(0.5, [0.25, 0.0], 0.125), ["a", "b"], [8, 4])
        >>> profile.gradient_order(), profile.ready_times().tolist(), profile.compute_s
        (('b', 'a'), [0.0, 0.25], 0.875)
    """
    order = sorted(range(len(names)), key=lambda index: (times.ready_s[index], -index))
    layers, last = [], 0.0
    for index in order:
        seconds = max(0.0, times.ready_s[index] - last)
        layers.append(LayerProfile(names[index], sizes[index], seconds))
        last += seconds
    forward = LayerProfile(FORWARD, 0, 0.0, times.before_s, 0, "all before the first gradient")
    return ModelProfile((forward, *reversed(layers)), update_s=times.update_s)


WORTH = 0.01
"""Larger buckets have to save this part of a step, as they cost a user an option."""


def candidates(
    profile: ModelProfile, comm: CommModel, compute_s: float | None = None
) -> tuple[MergedGradient, PipeSGD, CoCoD]:
    """One of each strategy, with the options that fit."""
    period = fitted_period(profile, comm, profile.compute_s if compute_s is None else compute_s)
    return MergedGradient(), PipeSGD(), CoCoD(period=period)


def fitted_period(profile: ModelProfile, comm: CommModel, compute_s: float) -> int:
    """CoCoD's period that just hides its all-reduce: ``max(2, ceil((m + delay) / c))``."""
    average = step_time(CoCoD(period=1), profile, comm).comm_s + comm.delay
    # Rounding must not make a step of what is a whole number of them.
    return max(2, math.ceil(average / compute_s - 1e-9)) if compute_s > 0.0 else 2


def fitted_buckets(method: PipeSGD, profile: ModelProfile, comm: CommModel) -> PipeSGD:
    """The least doubling of Pipe-SGD's usual buckets that hides all messages of a running job.

    Where none does, it is the last that gains a part of `WORTH`.
    """
    best, least = method, step_time(_usual_buckets(method), profile, comm)
    size, total = DEFAULT_BUCKET_BYTES, int(profile.gradient_bytes().sum())
    while least.exposed_s > 0.0 and size < total:
        size *= 2
        wider = replace(method, bucket_bytes=size)
        time = step_time(wider, profile, comm)
        if time.total_s < (1.0 - WORTH) * least.total_s:
            best, least = wider, time
    return best


def _usual_buckets(method: PipeSGD) -> PipeSGD:
    return replace(method, bucket_bytes=method.bucket_bytes or DEFAULT_BUCKET_BYTES)


@dataclass(frozen=True)
class Prediction:
    """A method, and the seconds of a step that it is expected to take."""

    method: Method
    seconds: float


def predict(
    method: Method, profile: ModelProfile, comm: CommModel, codec: CodecCost = NONE
) -> Prediction:
    """Return how long a step of a method will take, with the options that fit.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> profile = ModelProfile((LayerProfile("w", 10, backward_s=1.0, forward_s=1.0),))
        >>> net = CommModel((0.0,), (0.0,), (0.5,), delay=1.0)
        >>> for method in (MergedGradient(), PipeSGD(), CoCoD()):
        ...     step = predict(method, profile, net)
        ...     print(spell(step.method), step.seconds)
        merged-gradient 8.0
        pipe-sgd 5.0
        cocod:period=3 2.0
    """
    if isinstance(method, MergedGradient):  # with the plan in use, whose engine goes on
        default = MergedGradient(overlap=method.overlap)
        return Prediction(default, step_time(method, profile, comm, codec).total_s)
    carried = comm.compressed(codec)
    timed: Method
    if isinstance(method, PipeSGD):
        method = fitted_buckets(method, profile, carried)
        timed = _usual_buckets(method)
    else:
        assert isinstance(method, CoCoD)
        period = fitted_period(profile, carried, profile.compute_s)
        method = timed = replace(method, period=period)
    return Prediction(method, step_time(timed, profile, comm, codec).total_s)


def choose(predictions: Sequence[Prediction]) -> Prediction:
    """Return the fastest; what changes the mathematics more must be faster by `MARGIN`.

    So must ``overlap=forward``, beside plain merged-gradient: it asks more of a script. A method
    that is not exact must be faster than both, whichever of them is chosen.
    """
    best, *others = sorted(
        predictions, key=lambda prediction: _ORDER.index(kind_of(prediction.method))
    )
    least = best.seconds
    for other in others:
        if least > (1.0 + MARGIN) * other.seconds:
            best, least = other, other.seconds
        elif isinstance(other.method, MergedGradient):
            least = min(least, other.seconds)
    return best


def kind_of(method: Method) -> str:
    """Return the name by which `Auto` allows a method; other options do not count."""
    is_forward = isinstance(method, MergedGradient) and method.overlaps_forward
    return spell(_EXACT[1]) if is_forward else method.name


_EXACT = (MergedGradient(), MergedGradient(overlap="forward"))
_ORDER = tuple(kind_of(method) for method in (*_EXACT, PipeSGD(), CoCoD()))


def least_of(methods: Sequence[Method]) -> Method:
    """Return the method that changes the mathematics least."""
    return min(methods, key=lambda method: _ORDER.index(kind_of(method)))


def report(best: Prediction, predictions: Sequence[Prediction]) -> str:
    """Return the line that says what was predicted and chosen."""
    others = [
        f"{spell(other.method)} {milliseconds(other.seconds)}"
        for other in sorted(predictions, key=lambda other: other.seconds)
        if other is not best
    ]
    return f"chose {spell(best.method)}: predicted {milliseconds(best.seconds)} a step" + (
        f" ({', '.join(others)})" if others else ""
    )


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, for the log."""
    return f"{1e3 * seconds:.1f} ms"
