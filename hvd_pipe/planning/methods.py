"""Every method whose speed can be predicted: hvd_pipe's strategies, and what they compare with.

=====================================  ==========================================================
written                                what it is
=====================================  ==========================================================
"merged-gradient", "pipe-sgd",         hvd_pipe's own (`hvd_pipe.strategy`), with their options
"cocod"
"greedy", "wfbp", "single"             short for merged-gradient with that plan: MG-WFBP as
                                       published, a message a tensor, one message (SyncEASGD)
"conventional"                         synchronous SGD without any overlap
"horovod"                              stock Horovod: tensor fusion at cycle ticks
"local-sgd"                            models are averaged every ``period`` steps, while all wait
"wide-pipe-sgd"                        Pipe-SGD with more than one step in flight
=====================================  ==========================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hvd_pipe import strategy, units
from hvd_pipe.errors import nearest, require_int
from hvd_pipe.planning.comm import NONE, CodecCost
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.strategy import CoCoD, MergedGradient, PipeSGD, parse_options

__all__ = [
    "BASELINES",
    "DEFAULT_BUCKET_BYTES",
    "Conventional",
    "HorovodFusion",
    "LocalSGD",
    "Method",
    "WidePipeSGD",
    "label",
    "parse",
    "spell",
]

FloatArray = npt.NDArray[np.float64]

DEFAULT_BUCKET_BYTES = 8 * 2**20
"""What the job fills Pipe-SGD's buckets to (``torch.strategies.settings`` has the same number)."""

_WIDEST = 64  # each step in flight holds a gradient, and is waited for in the simulation


@dataclass(frozen=True)
class Conventional:
    """Synchronous SGD without overlap: forward, backward, then one message a tensor, update."""

    name: ClassVar[str] = "conventional"


@dataclass(frozen=True)
class HorovodFusion:
    """Stock Horovod: a background loop wakes every cycle and fuses what is ready.

    Args:
        threshold_bytes: a fused message holds at most this much; a larger tensor goes alone, and
            0 fuses nothing. Horovod 0.28: 128 MiB (``HOROVOD_FUSION_THRESHOLD``).
        cycle_s: seconds between two looks at what is ready. Horovod 0.28: 1 ms
            (``HOROVOD_CYCLE_TIME``, there in milliseconds).

    Example:
        >>> parse("horovod:threshold=64MiB,cycle=5ms")
        HorovodFusion(threshold_bytes=67108864, cycle_s=0.005)

    Source: Sergeev, Del Balso: Horovod, arXiv 1802.05799; horovod/common/operations.cc.
    """

    name: ClassVar[str] = "horovod"
    threshold_bytes: int = field(default=128 * 2**20, metadata={"option": "threshold"})
    cycle_s: float = field(default=1e-3, metadata={"option": "cycle"})

    def __post_init__(self) -> None:
        require_int(self, "threshold_bytes", 0)
        if isinstance(self.cycle_s, bool) or not isinstance(self.cycle_s, int | float):
            raise TypeError(f"HorovodFusion: cycle_s must be seconds, got {self.cycle_s!r}.")
        if not 0.0 <= self.cycle_s < math.inf:
            raise ValueError(
                f"HorovodFusion: cycle_s must be finite and at least 0 seconds, got {self.cycle_s}"
            )


@dataclass(frozen=True)
class LocalSGD:
    """``period`` local steps, at least 1, then all wait while the models are averaged at once.

    Source: Stich: Local SGD converges fast and communicates little, arXiv 1805.09767.
    """

    name: ClassVar[str] = "local-sgd"
    period: int = 4

    def __post_init__(self) -> None:
        require_int(self, "period", 1)


@dataclass(frozen=True)
class WidePipeSGD:
    """Pipe-SGD of any width K: an update applies the average of K - 1 steps before.

    hvd_pipe's own ``pipe-sgd`` is width 2, as fast as any wider one while workers keep step; a
    wider one evens out stragglers, at more staleness. Width 1 is synchronous SGD, sent after
    backward.

    Args:
        width: the paper's K, from 1 to 64.
        bucket_bytes: buckets are filled up to this many bytes.

    Source: Li et al., "Pipe-SGD" (NeurIPS 2018), arXiv 1811.03619.
    """

    name: ClassVar[str] = "wide-pipe-sgd"
    width: int = 3
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    def __post_init__(self) -> None:
        require_int(self, "width", 1)
        if self.width > _WIDEST:
            raise ValueError(
                f"WidePipeSGD: width must be <= {_WIDEST}, got {self.width}: gradients that many "
                "steps old train nothing."
            )
        require_int(self, "bucket_bytes", 1)


Baseline = Conventional | HorovodFusion | LocalSGD | WidePipeSGD
Method = MergedGradient | PipeSGD | CoCoD | Baseline

BASELINES: tuple[Method, ...] = (
    MergedGradient(plan="wfbp"),
    MergedGradient(plan="single"),
    HorovodFusion(),
)
"""What advice shows beside the strategies."""

_SHORT = {plan: MergedGradient(plan=plan) for plan in ("greedy", "wfbp", "single")}
_CLASSES: dict[str, type[Baseline]] = {
    cls.name: cls for cls in (Conventional, HorovodFusion, LocalSGD, WidePipeSGD)
}
_OWN = (MergedGradient.name, PipeSGD.name, CoCoD.name)


def parse(text: str | Method) -> Method:
    """The method that a string names.

    Args:
        text: a name of the module's table, options behind a colon; a method is returned as it is.

    Raises:
        TypeError, ValueError: an unknown name or option; the message lists what there is.

    Example:
        >>> parse("wfbp")
        MergedGradient(plan='wfbp', bucket_bytes=None, overlap='auto')
        >>> parse("cocod:period=8").period
        8
    """
    if isinstance(text, Method):
        return text
    if not isinstance(text, str):
        raise TypeError(f"a method is a string such as 'pipe-sgd', got {text!r}")
    name, _, tail = text.strip().partition(":")
    name = name.strip().lower().replace("_", "-")
    if name in _SHORT and not tail.strip():
        return _SHORT[name]
    if name in _CLASSES:
        cls, said = _CLASSES[name], repr(text)
        return cls(**parse_options(cls, said, tail, partial(_value, said)))  # type: ignore[arg-type]
    if name in _OWN:
        method = strategy.parse(text)
        assert isinstance(method, MergedGradient | PipeSGD | CoCoD)
        return method
    known = (*_OWN, *_SHORT, *_CLASSES)
    if name in _SHORT:
        raise ValueError(
            f"{text!r}: {name!r} takes no options: write 'merged-gradient:plan={name}'"
        )
    raise ValueError(
        f"{text!r}: unknown method{nearest(name, known)}: use one of {', '.join(map(repr, known))}"
    )


def label(method: Method) -> str:
    """The method as :func:`parse` reads it, with the options that differ from their defaults.

    Example:
        >>> label(MergedGradient(plan="wfbp")), label(CoCoD(period=8)), label(PipeSGD())
        ('wfbp', 'cocod:period=8', 'pipe-sgd')
        >>> label(HorovodFusion(threshold_bytes=1024))
        'horovod:threshold=1024'
    """
    for short, meant in _SHORT.items():
        if method == meant:
            return short
    return spell(method)


def spell(method: Method | strategy.Method) -> str:
    """The method's full string: of hvd_pipe's own ones, what ``strategy=`` takes.

    Example:
        >>> spell(MergedGradient(plan="wfbp"))
        'merged-gradient:plan=wfbp'
        >>> spell(CoCoD(period=2, weights=(3, 1)))
        'cocod:period=2,weights=3/1'
    """
    options = []
    for option in fields(method):
        value = getattr(method, option.name)
        if value == option.default:
            continue
        key = option.metadata.get("option", option.name)
        if isinstance(value, tuple):
            value = "/".join(str(int(part) if part == int(part) else part) for part in value)
        elif option.name == "cycle_s":
            value = f"{value!r}s"
        options.append(f"{key}={value}")
    return f"{method.name}:{','.join(options)}" if options else method.name


def _value(text: str, field: str, value: str) -> float:
    try:
        if field.endswith("_bytes"):
            return units.parse_bytes(value)
        if field.endswith("_s"):
            return units.parse_seconds(value)
        return int(value)
    except ValueError as error:
        raise ValueError(f"{text}: {field}: {error}") from error


def memory_bytes(
    method: Method, profile: ModelProfile, codec: CodecCost = NONE, optimizer_ratio: float = 1.0
) -> int:
    """Weights, gradients, optimizer state and the method's buffers on one worker.

    In copies of the model, besides weights and the optimizer's state::

        merged-gradient, conventional   1    gradients, which are views into the buckets
        horovod                         1    and the fusion buffer, as large as the threshold
        pipe-sgd                        2    two sets of buckets; more with a prediction
        wide-pipe-sgd                   K    a set of buckets for each step in flight
        local-sgd                       2    gradients, and the vector that travels
        cocod                           3    gradients, the vector, the models of the round's start
    """
    if not optimizer_ratio >= 0.0:
        raise ValueError(
            "the optimizer's bytes a byte of weights must be at least 0 (0 plain SGD, 1 momentum, "
            f"2 Adam), got {optimizer_ratio}"
        )
    copies, extra = 1.0, 0
    if isinstance(method, PipeSGD):
        # Of the true weights; of the worker's gradients as well.
        copies = {"none": 2.0, "previous": 3.0, "local": 5.0}[method.prediction]
    elif isinstance(method, WidePipeSGD):
        copies = float(method.width)
    elif isinstance(method, LocalSGD):
        copies = 2.0
    elif isinstance(method, CoCoD):
        averaged = 2.0 if method.pull_back is None else 1.0  # the vector, and the start
        copies += averaged + (codec.ratio != 1.0)  # which keeps the last mean
        # An anchor that has momentum, or an outer model, and its velocity.
        copies += 2.0 if method.anchor_momentum or method.outer != "none" else 0.0
        copies += averaged * optimizer_ratio if method.momentum == "average" else 0.0
    elif isinstance(method, HorovodFusion):
        extra = method.threshold_bytes
    model = int(profile.gradient_bytes().sum())
    return round(model * (1.0 + optimizer_ratio + copies)) + extra


_RATES = [0.02 * count for count in range(1, 201)]
_STEPS = 50
_ROUNDING = 1e-9  # a deviation that is only turned around neither grows nor decays


def stable_rate(method: Method, momentum: float = 0.0) -> float:
    """The largest ``learning rate * curvature`` at which a method does not diverge.

    With PyTorch's heavy ball, ``v = mu v + g; w -= lr v``, on a quadratic of curvature L::

        gradients of the same step                          2 (1 + mu)
        pipe-sgd                                            1 - mu
        pipe-sgd:prediction=local (several workers)         1
        pipe-sgd:prediction=previous, wide-pipe-sgd, cocod  where the largest eigenvalue of the
                                                            step's matrix leaves the unit circle

    CoCoD's mean is as stable as synchronous SGD, but what a replica differs from it is not:
    ``mean + (end - start)`` takes a deviation d to ``(A - 1) d``, A being what k local steps do to
    it, and with momentum these overshoot. Unlike data on workers can make Local SGD and CoCoD
    diverge earlier. A momentum that is not from 0 to below 1 is a ValueError.

    Example:
        >>> [round(stable_rate(PipeSGD(prediction="previous"), mu), 3) for mu in (0, 0.5, 0.9)]
        [0.618, 0.522, 0.5]
        >>> [round(stable_rate(CoCoD(period=4), mu), 2) for mu in (0, 0.5, 0.9)]
        [2.0, 0.28, 0.28]

    Source: derived, and measured on real ranks by tests/parallel/test_prediction.py.
    """
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum must be from 0 to below 1, got {momentum}")
    if isinstance(method, PipeSGD):
        if method.prediction == "none":
            return 1.0 - momentum
        if method.prediction == "local":
            return 1.0
        return _largest(lambda rate: _previous(rate, momentum))
    if isinstance(method, WidePipeSGD) and method.width > 1:
        return delayed_rate(method.width - 1, momentum)
    if isinstance(method, CoCoD):
        deviation = _largest(lambda rate: _round(method, rate, momentum)[0])
        return min(deviation, _largest(lambda rate: _round(method, rate, momentum)[1]))
    return 2.0 * (1.0 + momentum)


def delayed_rate(delay: int, momentum: float = 0.0) -> float:
    """The largest ``learning rate * curvature`` that gradients ``delay`` updates old bear.

    That of a pipeline's first stage, whose gradients are the oldest, binds: n - 1 updates with n
    stages of one worker and a version of the weights for each minibatch in flight.

    Example:
        >>> [round(delayed_rate(delay, 0.9), 3) for delay in (0, 1, 2, 3, 7)]
        [3.8, 0.1, 0.051, 0.035, 0.016]
    """
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"momentum must be from 0 to below 1, got {momentum}")
    if delay < 0:
        raise ValueError(f"delay must be at least 0 updates, got {delay}")
    if delay == 0:
        return 2.0 * (1.0 + momentum)
    return _largest(lambda rate: _delayed(rate, momentum, delay))


def _largest(matrix: Callable[[float], FloatArray]) -> float:
    """The first rate at which the spectral radius of a step reaches 1; it may fall again after."""

    def stable(rate: float) -> bool:
        return bool(np.abs(np.linalg.eigvals(matrix(rate))).max() <= 1.0 + _ROUNDING)

    high = next((rate for rate in _RATES if not stable(rate)), _RATES[-1])
    low = high - _RATES[0]
    for _ in range(_STEPS):
        rate = (low + high) / 2
        low, high = (rate, high) if stable(rate) else (low, rate)
    return low


def _round(method: CoCoD, rate: float, momentum: float) -> tuple[FloatArray, FloatArray]:
    """A round on the (weights, velocity) that a replica differs by, and on those of the mean."""
    step = np.array([[1.0 - rate, -momentum], [rate, momentum]])
    steps = np.linalg.matrix_power(step, method.turn)
    rest = np.linalg.matrix_power(step, method.period - method.turn)
    averaged = np.eye(2) if method.momentum == "average" else np.diag([1.0, 0.0])
    if method.outer != "none":
        return rest @ (steps - averaged), _followed_by(rest, _outer_round(method, steps))
    if method.pull_back is None:
        return rest @ (steps - averaged), rest @ steps
    alpha, beta = method.pull_back, method.anchor_momentum
    pulled = (np.eye(2) - alpha * averaged) @ steps
    none = np.zeros((2, 2))
    velocity = np.hstack([averaged, -averaged, beta * np.eye(2)])
    anchor = averaged @ (np.hstack([none, np.eye(2), none]) + velocity)
    models = np.hstack([pulled, none, none]) + alpha * anchor
    return rest @ pulled, _followed_by(rest, np.vstack([models, anchor, velocity]))


def _followed_by(rest: FloatArray, mean: FloatArray) -> FloatArray:
    """A round on the mean and its anchor or outer model, followed by local steps."""
    return np.vstack([rest @ mean[:2], mean[2:]])


def _outer_round(method: CoCoD, steps: FloatArray) -> FloatArray:
    """A round on the mean (weights, velocity), the outer model g and its velocity u."""
    lr, mu = method.outer_lr, method.outer_momentum
    weight, g, u = np.eye(4)[0], np.eye(4)[2], np.eye(4)[3]
    change = g - weight
    velocity = mu * u + change
    outer = g - lr * (change + mu * velocity)
    mean = np.hstack([steps, np.zeros((2, 2))])
    mean[0] += outer - weight
    return np.vstack([mean, outer, velocity])


def _delayed(rate: float, momentum: float, delay: int) -> FloatArray:
    """A step on (lr v, w, w one step ago, ...): ``v' = mu v + L w[t - delay]; w' = w - lr v'``."""
    step = np.zeros((delay + 2, delay + 2))
    step[0, 0], step[0, 1 + delay] = momentum, rate
    step[1] = -step[0]
    step[1, 1] += 1.0
    for age in range(delay):
        step[2 + age, 1 + age] = 1.0
    return step


def _previous(rate: float, momentum: float) -> FloatArray:
    """A step on (lr v, w, lr g, lr g one step ago), gradients g taken at predicted weights."""
    velocity = np.array([momentum, 0.0, 0.0, 1.0])
    weights = np.array([0.0, 1.0, 0.0, 0.0]) - velocity
    ahead = weights - momentum * velocity - np.array([0.0, 0.0, 0.0, 1.0])
    return np.stack([velocity, weights, rate * ahead, np.array([0.0, 0.0, 1.0, 0.0])])
