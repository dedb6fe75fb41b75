"""How long an all-reduce takes: a model of its time as a function of the message's size.

Three ways lead to a :class:`CommModel`: a formula (:func:`allreduce`), a line fitted to samples
(:func:`fit`), or the samples themselves as a monotone table (:meth:`CommModel.table`).
:func:`measured` chooses between the last two.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast, overload

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning._samples import by_size, check_samples, fit_line

__all__ = ["ALGORITHMS", "CommModel", "allreduce", "fit", "fit_error", "measured"]

FloatArray = npt.NDArray[np.float64]

ALGORITHMS = ("ring", "recursive-doubling", "halving-doubling", "double-binary-tree")

_HUBER = 1.345  # 95% efficiency on Gaussian noise
_ROUNDS = 20
_ROUNDING = 1e-12  # relative; segments that meet in theory may miss each other by this much


@dataclass(frozen=True)
class CommModel:
    """All-reduce time of one message, piecewise linear in its size and never decreasing.

    ``T(x) = intercepts[k] + slopes[k] * x`` for ``starts[k] <= x < starts[k+1]``; the last segment
    has no end. T may jump upwards at a start (networks change protocol there), never downwards.

    Args:
        starts: where each of the K segments begins, bytes; the first is 0, then increasing.
        intercepts: seconds, K of them. Only the first has to be non-negative.
        slopes: seconds per byte, K of them, none negative.

    Raises:
        ValueError: the segments do not make a non-negative, non-decreasing function.

    Example:
        >>> ethernet = CommModel.linear(alpha=1e-3, beta=2e-9)
        >>> ethernet(1_000_000)
        0.003
        >>> jump = CommModel(starts=(0, 8192), intercepts=(1e-4, 8e-4), slopes=(1e-8, 3e-9))
        >>> jump(np.array([0, 8192])).round(6).tolist()
        [0.0001, 0.000825]

    Source: MG-WFBP, arXiv 1912.09268 (the line, Table 2); the segments are ours.
    """

    starts: tuple[float, ...]
    intercepts: tuple[float, ...]
    slopes: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("starts", "intercepts", "slopes"):
            values = tuple(float(value) for value in getattr(self, name))
            if not all(math.isfinite(value) for value in values):
                raise ValueError(f"{name} must be finite numbers, got {values}")
            object.__setattr__(self, name, values)
        counts = len(self.starts), len(self.intercepts), len(self.slopes)
        if counts[0] == 0 or len(set(counts)) > 1:
            raise ValueError(
                "starts, intercepts and slopes must have one entry a segment, "
                f"got {counts[0]}, {counts[1]} and {counts[2]}"
            )
        if self.starts[0] != 0.0 or any(
            a >= b for a, b in zip(self.starts, self.starts[1:], strict=False)
        ):
            raise ValueError(f"starts must begin with 0 and increase, got {self.starts}")
        if self.intercepts[0] < 0.0:
            raise ValueError(
                f"the latency must not be negative, got intercepts[0] = {self.intercepts[0]} s; "
                "fit() finds the best line that has none"
            )
        if min(self.slopes) < 0.0:
            raise ValueError(
                f"slopes must not be negative, got {min(self.slopes)} s/byte; "
                "a longer message never takes less time: CommModel.table() smooths noise away"
            )
        for k, start in enumerate(self.starts[1:], 1):
            ends = [(self.intercepts[at], self.slopes[at] * start) for at in (k - 1, k)]
            left, right = (sum(end) for end in ends)
            # A steep segment far out is a small difference of large numbers: allow their rounding.
            if right < left - _ROUNDING * max(abs(term) for end in ends for term in end):
                raise ValueError(
                    f"the time must not drop, but at {start:g} bytes it falls from {left:g} s to "
                    f"{right:g} s; CommModel.table() smooths noise away"
                )

    @overload
    def __call__(self, bytes: float) -> float: ...
    @overload
    def __call__(self, bytes: npt.NDArray[Any]) -> FloatArray: ...
    def __call__(self, bytes: float | npt.NDArray[Any]) -> float | FloatArray:
        """Seconds that the all-reduce of a message takes.

        Args:
            bytes: size of one message, or an array of sizes of any shape; not negative.

        Returns:
            Seconds: a float for a number, a float64 array of the same shape for an array.

        Example:
            >>> CommModel.linear(1.0, 0.5)(np.array([[0, 2]])).tolist()
            [[1.0, 2.0]]
        """
        if isinstance(bytes, np.ndarray):
            if bytes.size and bytes.min() < 0:
                raise ValueError(f"a message has no negative size, got {bytes.min()} bytes")
            k = np.searchsorted(self.starts, bytes, side="right") - 1
            time = np.asarray(self.intercepts)[k] + np.asarray(self.slopes)[k] * bytes
            return cast(FloatArray, time)
        if bytes < 0:
            raise ValueError(f"a message has no negative size, got {bytes} bytes")
        segment = bisect_right(self.starts, bytes) - 1
        return self.intercepts[segment] + self.slopes[segment] * float(bytes)

    @property
    def latency(self) -> float:
        """Seconds that an empty message takes: the ``a`` of ``a + b * bytes``."""
        return self.intercepts[0]

    @classmethod
    def linear(cls, alpha: float, beta: float) -> CommModel:
        """The line ``T(x) = alpha + beta * x``, seconds and seconds per byte.

        Example:
            >>> CommModel.linear(9.72e-4, 1.97e-9).latency
            0.000972
        """
        return cls((0.0,), (alpha,), (beta,))

    @classmethod
    def table(cls, bytes: npt.ArrayLike, seconds: npt.ArrayLike) -> CommModel:
        """Measured points, made monotone, joined by straight lines.

        Several samples of a size count as their median. Where noise makes a longer message look
        faster, neighbours are pooled and share the median of all their samples (isotonic
        regression in the L1 norm, by pooling adjacent violators), so one outlier bends nothing.
        Below the first size the first line goes on, but to no negative latency. Above the last
        size the mean slope of the last factor of four in size goes on.

        Args:
            bytes: 1-D, N sizes, not negative; at least two of them differ.
            seconds: 1-D, N times, positive.

        Raises:
            ValueError: the samples are malformed or all of one size.

        Example:
            >>> model = CommModel.table([100, 200, 300], [3.0, 2.0, 4.0])
            >>> [model(size) for size in (0, 100, 200, 250, 300)]
            [2.5, 2.5, 2.5, 3.25, 4.0]

        Source: isotonic regression as in Barlow et al. 1972; the ends are ours.
        """
        sizes, samples = by_size(bytes, seconds)
        blocks: list[tuple[float, int, FloatArray]] = []  # median, how many sizes, their samples
        for sample in samples:
            block = (float(np.median(sample)), 1, sample)
            while blocks and blocks[-1][0] > block[0]:
                _, count, pooled = blocks.pop()
                pooled = np.concatenate((pooled, block[2]))
                block = (float(np.median(pooled)), count + block[1], pooled)
            blocks.append(block)
        times = np.repeat([block[0] for block in blocks], [block[1] for block in blocks])

        starts = sizes[:-1]
        slopes = np.diff(times) / np.diff(sizes)
        intercepts = times[:-1] - slopes * starts
        if intercepts[0] >= 0.0:
            starts = np.concatenate(([0.0], starts[1:]))
        else:
            starts = np.concatenate(([0.0], starts))
            intercepts = np.concatenate(([0.0], intercepts))
            slopes = np.concatenate(([times[0] / sizes[0]], slopes))
        tail = sizes >= min(sizes[-1] / 4, sizes[-2])
        x = sizes[tail] - sizes[tail].mean()
        slope = (x @ times[tail]) / (x @ x)
        slope = max(0.0, slope)  # the times rise, but their sum may round below 0
        return cls(
            (*starts, sizes[-1]), (*intercepts, times[-1] - slope * sizes[-1]), (*slopes, slope)
        )

    def to_json(self) -> dict[str, list[float]]:
        """A dict of lists for ``json.dump``; :meth:`from_json` reads it back exactly.

        Example:
            >>> CommModel.linear(1.0, 0.5).to_json()
            {'starts': [0.0], 'intercepts': [1.0], 'slopes': [0.5]}
        """
        return {name: list(values) for name, values in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Sequence[float]]) -> CommModel:
        """The model that :meth:`to_json` wrote; ValueError names keys that lack or are unknown."""
        keys = {"starts", "intercepts", "slopes"}
        if not isinstance(data, Mapping) or set(data) != keys:
            found = sorted(data) if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"a CommModel is an object of {sorted(keys)}, got {found}")
        try:
            return cls(tuple(data["starts"]), tuple(data["intercepts"]), tuple(data["slopes"]))
        except TypeError as error:
            raise ValueError(f"a CommModel holds lists of numbers: {error}") from error


def allreduce(
    workers: int, alpha: float, beta: float, gamma: float = 0.0, algorithm: str = "ring"
) -> CommModel:
    """All-reduce time from the cost of one hop, for p workers.

    ==================== ===================== =========================================
    algorithm            latency, s            seconds per byte
    ==================== ===================== =========================================
    ring                 ``2 (p-1) alpha``     ``2 (p-1)/p beta + (p-1)/p gamma``
    recursive-doubling   ``log2(p) alpha``     ``log2(p) (beta + gamma)``
    halving-doubling     ``2 log2(p) alpha``   ``2 (p-1)/p beta + (p-1)/p gamma``
    double-binary-tree   ``2 log2(p) alpha``   ``beta + gamma``
    ==================== ===================== =========================================

    ``log2(p)`` is rounded up where p is no power of two. One worker sends nothing: T = 0.

    Args:
        workers: p, at least 1.
        alpha: seconds to start one point-to-point message.
        beta: seconds to move one byte.
        gamma: seconds to add up one byte.
        algorithm: one of :data:`ALGORITHMS`.

    Raises:
        ValueError: no workers, or an unknown algorithm.

    Example:
        >>> allreduce(16, alpha=9.72e-4 / 30, beta=1e-9).latency
        0.000972

    Source: MG-WFBP, arXiv 1912.09268, table 2.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}")
    if workers == 1:
        return CommModel.linear(0.0, 0.0)
    steps = math.ceil(math.log2(workers))
    share = (workers - 1) / workers
    split = 2 * share * beta + share * gamma
    latency, per_byte = {
        "ring": (2 * (workers - 1) * alpha, split),
        "recursive-doubling": (steps * alpha, steps * (beta + gamma)),
        "halving-doubling": (2 * steps * alpha, split),
        "double-binary-tree": (2 * steps * alpha, beta + gamma),
    }[algorithm]
    return CommModel.linear(latency, per_byte)


def fit(
    bytes: npt.ArrayLike, seconds: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> CommModel:
    """The line ``alpha + beta * x`` with the least weighted squared error, neither part negative.

    Samples of one size are reduced to their median. By default a size weighs
    ``samples / seconds**2``: then the error is relative, and the latency, which only small
    messages show, counts as much as the bandwidth. Huber weights on the relative residuals, scaled
    by their median, keep outliers from bending the line.

    Args:
        bytes: 1-D, N sizes, not negative; at least two of them differ.
        seconds: 1-D, N times, positive.
        weights: 1-D, N weights, positive, in place of the default; a size weighs their sum.

    Returns:
        A model of one segment.

    Raises:
        ValueError: the samples are malformed or all of one size.

    Example:
        >>> model = fit([1e4, 1e5, 1e6, 1e6], [1.1e-3, 2e-3, 11e-3, 11e-3])
        >>> f"{model.latency:.2e} s + {model.slopes[0]:.2e} s/byte"
        '1.00e-03 s + 1.00e-08 s/byte'

    Source: the model of MG-WFBP, arXiv 1912.09268; the estimator is ours.
    """
    sizes, samples = by_size(bytes, seconds)
    times = np.array([np.median(sample) for sample in samples])
    if weights is None:
        base = np.array([len(sample) for sample in samples]) / times**2
    else:
        _, grouped = by_size(bytes, weights, "weights")
        base = np.array([group.sum() for group in grouped])
    huber = np.ones_like(base)
    for _ in range(_ROUNDS):
        alpha, beta = fit_line(sizes, times, base * huber)
        residual = np.abs(alpha + beta * sizes - times) / times
        # The floor keeps exact data (median residual 0) at equal weights.
        limit = max(_HUBER * 1.4826 * float(np.median(residual)), _ROUNDING)
        huber = limit / np.maximum(residual, limit)
    return CommModel.linear(alpha, beta)


def fit_error(model: CommModel, bytes: npt.ArrayLike, seconds: npt.ArrayLike) -> float:
    """Mean relative error of a model: the mean of ``|T(x) - t| / t`` over the samples.

    Example:
        >>> fit_error(CommModel.linear(1.0, 0.0), [10, 20], [1.0, 2.0])
        0.25
    """
    sizes, times = check_samples(bytes, seconds)
    return float(np.mean(np.abs(model(sizes) - times) / times))


def measured(bytes: npt.ArrayLike, seconds: npt.ArrayLike, tolerance: float = 0.10) -> CommModel:
    """The model for measured samples: a line where a line will do, else the table.

    Args:
        bytes: 1-D, N sizes, not negative; at least two of them differ.
        seconds: 1-D, N times, positive.
        tolerance: mean relative error, over the medians of the sizes, up to which a line will do.

    Raises:
        ValueError: the samples are malformed or all of one size.

    Example:
        >>> len(measured([1, 2, 3, 4], [2.0, 3.0, 4.0, 5.0]).starts)
        1
        >>> len(measured([1, 2, 3, 4], [2.0, 2.0, 9.0, 9.0]).starts)
        4
    """
    line = fit(bytes, seconds)
    sizes, samples = by_size(bytes, seconds)
    medians = np.array([np.median(sample) for sample in samples])
    if fit_error(line, sizes, medians) <= tolerance:
        return line
    return CommModel.table(bytes, seconds)
