"""Which method a running job goes on with, from its own times and its network's.

``strategy="auto"`` (`hvd_pipe.strategy.Auto`) asks here once the first steps have been measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_pipe.planning.advise import MARGIN
from hvd_pipe.planning.candidates import fitted_buckets, fitted_period
from hvd_pipe.planning.codec import NONE, CodecCost
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.methods import spell
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.timing import step_time
from hvd_pipe.strategy import CoCoD, MergedGradient, Method, PipeSGD

__all__ = ["Prediction", "choose", "least_of", "milliseconds", "predict", "report"]


@dataclass(frozen=True)
class Prediction:
    """A method, and the seconds of a step that it is expected to take."""

    method: Method
    seconds: float


def predict(
    method: Method, profile: ModelProfile, comm: CommModel, codec: CodecCost = NONE
) -> Prediction:
    """Return how long a step of a method will take, with the options that fit.

    Args:
        method: CoCoD's period and Pipe-SGD's buckets do not count: what hides them is found.
        profile: Of a worker's own work.
        comm: As it was measured on the running job.
        codec: What compression makes of a message.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile
        >>> profile = ModelProfile((LayerProfile("w", 10, backward_s=1.0, forward_s=1.0),))
        >>> net = CommModel((0.0,), (0.0,), (0.5,), delay=1.0)
        >>> for method in (MergedGradient(), PipeSGD(), CoCoD()):
        ...     found = predict(method, profile, net)
        ...     print(spell(found.method), found.seconds)
        merged-gradient 8.0
        pipe-sgd 5.0
        cocod:period=3 2.0
    """
    if isinstance(method, MergedGradient):  # with the plan in use, whose engine goes on
        return Prediction(MergedGradient(), step_time(method, profile, comm, codec).total_s)
    carried = comm.compressed(codec)
    if isinstance(method, CoCoD):
        period = fitted_period(profile, carried, profile.compute_s)
        method = dataclasses.replace(method, period=period)
    else:
        method = fitted_buckets(method, profile, carried)
    return Prediction(method, step_time(method, profile, comm, codec).total_s)


def choose(predictions: Sequence[Prediction]) -> Prediction:
    """Return the fastest; what changes the mathematics more must be faster by `MARGIN`.

    Example:
        >>> choose([Prediction(PipeSGD(), 0.96), Prediction(MergedGradient(), 1.0)]).method.name
        'merged-gradient'
    """
    first, *others = sorted(predictions, key=lambda found: _ORDER.index(found.method.name))
    best = first
    for other in others:
        if best.seconds > (1.0 + MARGIN) * other.seconds:
            best = other
    return best


_ORDER = (MergedGradient.name, PipeSGD.name, CoCoD.name)


def least_of(methods: Sequence[Method]) -> Method:
    """Return the method that changes the mathematics least.

    >>> least_of([CoCoD(), PipeSGD()]).name
    'pipe-sgd'
    """
    return min(methods, key=lambda one: _ORDER.index(one.name))


def report(best: Prediction, predictions: Sequence[Prediction]) -> str:
    """Return the line that says what was predicted and chosen.

    >>> found = [Prediction(PipeSGD(), 0.96), Prediction(MergedGradient(), 1.0)]
    >>> report(found[1], found)
    'chose merged-gradient: predicted 1000.0 ms a step (pipe-sgd 960.0 ms)'
    """
    others = [
        f"{spell(one.method)} {milliseconds(one.seconds)}"
        for one in sorted(predictions, key=lambda one: one.seconds)
        if one is not best
    ]
    return f"chose {spell(best.method)}: predicted {milliseconds(best.seconds)} a step" + (
        f" ({', '.join(others)})" if others else ""
    )


def milliseconds(seconds: float) -> str:
    """Return a time as the lines of the log have it."""
    return f"{1e3 * seconds:.1f} ms"
