"""From measured samples to a CommModel: a line, a few lines with jumps, or the table itself.

Networks change their protocol with the size of a message, and time jumps there: one line may be
far off (:func:`fit`), a few are not (:func:`fit_segments`), and they bend to no noise as a table
(:meth:`hvd_pipe.planning.comm.CommModel.table`) does. :func:`measured` chooses.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning.comm import CommModel, by_size, check_samples, fit_line, medians, monotone

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]

_HUBER = 1.345  # 95% efficiency on Gaussian noise
_ROUNDS = 20
_ROUNDING = 1e-12  # relative
_LEAST = 3  # sizes of a segment: two points always lie on a line
_TAIL = 2  # the last line goes on for ever: it must hold for that factor in size at least
_PRECISION = 1e-3  # relative; nobody needs a segment for less


def fit(
    bytes: npt.ArrayLike, seconds: npt.ArrayLike, weights: npt.ArrayLike | None = None
) -> CommModel:
    """The line ``alpha + beta * x`` with the least weighted squared error, neither part negative.

    Samples of one size are reduced to their median; there are at least two sizes. By default a
    size weighs ``samples / seconds**2``: then the error is relative, and the latency, which only
    small messages show, counts as much as the bandwidth. Huber weights on the relative residuals,
    scaled by their median, keep outliers from bending the line.

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
    return _with_error(CommModel.linear(alpha, beta), sizes, times)


def fit_segments(bytes: npt.ArrayLike, seconds: npt.ArrayLike, max_segments: int = 6) -> CommModel:
    """A few lines with jumps between them, as many as the samples tell apart.

    Of all ways to cut the n sizes into k runs of at least three, a dynamic program takes the one
    with the least squared relative error of its lines, among those in which the time never drops
    from one line to the next and the last run, whose line goes on beyond all samples, covers at
    least a factor of two in size. Of all k, that with the least

        ``n log(sum e**2 / n + 1e-6) + 3 k log(n)``

    is returned (the Bayesian information criterion; a line and its start are three parameters, and
    errors below 0.1% earn none). The samples are made monotone first, so outliers do no harm.
    O(k n^2 log n): 0.05 s for 266 sizes.

    Source: segmented least squares (Bellman 1961); monotone, and on relative errors, ours.
    """
    if max_segments < 1:
        raise ValueError(f"max_segments must be at least 1, got {max_segments}")
    sizes, times = monotone(bytes, seconds)
    counts = np.array([len(sample) for sample in by_size(bytes, seconds)[1]], dtype=np.float64)
    n = sizes.size
    cost, alpha, beta = _lines(sizes, times, counts / times**2)
    cuts = _cuts(sizes, cost, alpha, beta, min(max_segments, max(1, n // _LEAST)))
    total = counts.sum()
    scores = [
        n * np.log(squares / total + _PRECISION**2) + 3 * k * np.log(n)
        for k, (squares, _) in enumerate(cuts, 1)
    ]
    runs = cuts[int(np.argmin(scores))][1]
    pieces = list(zip(runs, [*runs[1:], n], strict=True))
    model = CommModel(
        (0.0, *(float(sizes[i]) for i in runs[1:])),
        tuple(float(alpha[i, j]) for i, j in pieces),
        tuple(float(beta[i, j]) for i, j in pieces),
    )
    return _with_error(model, *medians(bytes, seconds))


def fit_error(model: CommModel, bytes: npt.ArrayLike, seconds: npt.ArrayLike) -> float:
    """Mean relative error of a model: the mean of ``|T(x) - t| / t`` over the samples."""
    sizes, times = check_samples(bytes, seconds)
    return float(np.mean(np.abs(model(sizes) - times) / times))


def measured(bytes: npt.ArrayLike, seconds: npt.ArrayLike, tolerance: float = 0.10) -> CommModel:
    """The simplest model whose mean relative error is within the tolerance.

    That is one line, or a few, or the table.

    Example:
        >>> len(measured([1, 2, 3, 4, 6, 8], [2.0, 2.0, 2.0, 9.0, 9.0, 9.0]).starts)
        2
    """
    for model in (fit(bytes, seconds), fit_segments(bytes, seconds)):
        if model.error is not None and model.error <= tolerance:
            return model
    return CommModel.table(bytes, seconds)


def _with_error(model: CommModel, sizes: FloatArray, times: FloatArray) -> CommModel:
    return replace(model, error=fit_error(model, sizes, times))


def _lines(
    sizes: FloatArray, times: FloatArray, weights: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The best line of every run ``i:j`` of sizes: cost, alpha and beta, (n + 1, n + 1) each."""
    n = sizes.size
    cost = np.full((n + 1, n + 1), np.inf)
    alpha, beta = np.zeros_like(cost), np.zeros_like(cost)
    for i in range(n):
        x, y, w = sizes[i:] - sizes[i], times[i:] - times[i], weights[i:]
        # Sums over i:j for all j at once, from the run's first point to keep digits.
        s, sx, sy = np.cumsum(w), np.cumsum(w * x), np.cumsum(w * y)
        sxx, sxy, syy = np.cumsum(w * x * x), np.cumsum(w * x * y), np.cumsum(w * y * y)
        spread = sxx - sx * sx / s
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.where(spread > 0.0, np.maximum(0.0, (sxy - sx * sy / s) / spread), 0.0)
        level = (sy - slope * sx) / s + times[i] - slope * sizes[i]
        if i == 0:
            # Both parts are not negative, so where the free line starts below 0, it starts at 0.
            through = np.cumsum(w * sizes * times) / np.maximum(
                np.cumsum(w * sizes * sizes), np.finfo(float).tiny
            )
            below = level < 0.0
            slope, level = np.where(below, through, slope), np.where(below, 0.0, level)
        at = level + slope * sizes[i] - times[i]
        squares = (
            syy + slope * slope * sxx + at * at * s
            - 2 * slope * sxy - 2 * at * sy + 2 * slope * at * sx
        )  # fmt: skip
        allowed = np.arange(1, n - i + 1) >= min(_LEAST, n)
        allowed[-1] &= i == 0 or sizes[i] <= sizes[-1] / _TAIL
        cost[i, i + 1 :] = np.where(allowed, np.maximum(squares, 0.0), np.inf)
        alpha[i, i + 1 :], beta[i, i + 1 :] = level, slope
    return cost, alpha, beta


def _cuts(
    sizes: FloatArray, cost: FloatArray, alpha: FloatArray, beta: FloatArray, most: int
) -> list[tuple[float, list[int]]]:
    """For k = 1, 2, ... most: the least cost of k runs that never drop, and where they begin."""
    n = sizes.size
    best = np.full_like(cost, np.inf)
    best[0] = cost[0]
    back: list[IntArray] = []
    divisions = [(float(best[0, n]), [0])]
    for _ in range(1, most):
        after, previous = np.full_like(cost, np.inf), np.zeros(cost.shape, dtype=np.intp)
        for i in range(_LEAST, n - _LEAST + 1):
            left = alpha[:i, i] + beta[:i, i] * sizes[i]
            order = np.argsort(left, kind="stable")
            reached = best[order, i]
            low = np.minimum.accumulate(reached)
            # Where the running minimum was last lowered: the run that attains it.
            lowered = np.concatenate(([True], reached[1:] < low[:-1]))
            which = order[np.maximum.accumulate(np.where(lowered, np.arange(i), 0))]
            right = alpha[i, i:] + beta[i, i:] * sizes[i]
            place = np.searchsorted(left[order], right, side="right") - 1
            fits = place >= 0
            after[i, i:] = np.where(fits, low[place] + cost[i, i:], np.inf)
            previous[i, i:] = which[place]
        best = after
        back.append(previous)
        last = int(np.argmin(best[:, n]))
        runs = [last]
        for step in reversed(back):
            end = n if len(runs) == 1 else runs[-2]
            runs.append(int(step[runs[-1], end]))
        divisions.append((float(best[last, n]), runs[::-1]))
    return divisions
