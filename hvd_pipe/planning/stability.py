"""How large a learning rate each method bears, on a quadratic, with heavy-ball momentum."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning.methods import Method, WidePipeSGD
from hvd_pipe.strategy import CoCoD, PipeSGD

FloatArray = npt.NDArray[np.float64]

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
    it, and with momentum these overshoot. ``synchronize()`` hides that, as it leaves the mean.
    With fragments a mean is taken in after ``period / fragments`` steps, and bears more.
    Unlike data on workers can make Local SGD and CoCoD diverge earlier, which no curvature tells.

    Raises:
        ValueError: a momentum mu that is not from 0 to below 1.

    Example:
        >>> from hvd_pipe.strategy import MergedGradient
        >>> stable_rate(MergedGradient(), 0.9), round(stable_rate(PipeSGD(), 0.9), 3)
        (3.8, 0.1)
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

    Raises:
        ValueError: a delay below 0, or a momentum that is not from 0 to below 1.

    Example:
        >>> [round(delayed_rate(delay), 3) for delay in (0, 1, 2, 3, 7)]
        [2.0, 1.0, 0.618, 0.445, 0.209]
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
    """A round on the mean and what goes along with it, with local steps behind it."""
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
