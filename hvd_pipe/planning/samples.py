"""Measured times of messages: checked, grouped by size, made monotone, and fitted by a line."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["FloatArray", "by_size", "check_samples", "fit_line", "medians", "monotone"]

FloatArray = npt.NDArray[np.float64]


def fit_line(x: FloatArray, y: FloatArray, weights: FloatArray) -> tuple[float, float]:
    """Weighted least squares of ``y = alpha + beta * x`` over ``alpha, beta >= 0``, exactly.

    The problem is convex: if the free minimum is not allowed, the answer lies on an edge.
    """
    total = weights.sum()
    x_mean, y_mean = (weights @ x) / total, (weights @ y) / total
    beta = (weights @ ((x - x_mean) * (y - y_mean))) / (weights @ (x - x_mean) ** 2)
    alpha = y_mean - beta * x_mean
    if alpha >= 0.0 and beta >= 0.0:
        return float(alpha), float(beta)
    edges = [(0.0, float((weights @ (x * y)) / (weights @ x**2))), (float(y_mean), 0.0)]
    return min(edges, key=lambda edge: float(weights @ (edge[0] + edge[1] * x - y) ** 2))


def check_samples(
    bytes: npt.ArrayLike, values: npt.ArrayLike, name: str = "seconds"
) -> tuple[FloatArray, FloatArray]:
    """Sizes and values as float64, or ValueError with the first one that cannot be."""
    x, y = np.asarray(bytes, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or x.size == 0:
        raise ValueError(
            f"bytes and {name} must be 1-D, of one length and not empty, "
            f"got shapes {x.shape} and {y.shape}"
        )
    bad = x[~(np.isfinite(x) & (x >= 0.0))]
    if bad.size:
        raise ValueError(f"bytes must be finite and not negative, got {bad[0]:g}")
    bad = y[~(np.isfinite(y) & (y > 0.0))]
    if bad.size:
        raise ValueError(f"{name} must be finite and positive, got {bad[0]:g}; drop that sample")
    return x, y


def by_size(
    bytes: npt.ArrayLike, values: npt.ArrayLike, name: str = "seconds"
) -> tuple[FloatArray, list[FloatArray]]:
    """The different sizes, increasing, and the samples of each."""
    x, y = check_samples(bytes, values, name)
    order = np.argsort(x, kind="stable")
    sizes, first = np.unique(x[order], return_index=True)
    if sizes.size < 2:
        raise ValueError(
            f"latency and bandwidth need messages of at least 2 sizes, got only {sizes[0]:g} "
            "bytes; measure a small and a large one"
        )
    return sizes, np.split(y[order], first[1:])


def medians(bytes: npt.ArrayLike, seconds: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """The different sizes, increasing, and the median time of each."""
    sizes, samples = by_size(bytes, seconds)
    return sizes, np.array([np.median(sample) for sample in samples])


def monotone(bytes: npt.ArrayLike, seconds: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """The different sizes, increasing, and times that never drop: L1 isotonic regression.

    Neighbours that violate the order are pooled and share the median of all their samples, so one
    outlier bends nothing.
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
    return sizes, np.repeat([block[0] for block in blocks], [block[1] for block in blocks])
