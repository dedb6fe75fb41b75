"""How long an all-reduce takes: a model of its time as a function of the message's size.

Three ways lead to a :class:`CommModel`: a formula (:mod:`hvd_pipe.planning.cluster`), lines
fitted to samples (:mod:`hvd_pipe.planning.fit`), or the samples themselves as a monotone table
(:meth:`CommModel.table`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast, overload

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning._checks import check_keys

__all__ = ["CommModel", "blocked_ends"]


@dataclass(frozen=True)
class CodecCost:
    """A codec as a plan sees it: smaller messages, and some time to make them.

    Source: Pipe-SGD (Li et al., NeurIPS 2018) has the ratio and the time in its timing model.
    """

    name: str
    ratio: float  # bytes on the wire over bytes of gradients, positive
    seconds_per_byte: float = 0.0  # of gradients, for all their encoding and decoding
    phases: int = 1  # messages of an all-reduce: 2 where Horovod cannot sum what travels

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and self.ratio > 0.0):
            raise ValueError(
                f"codec {self.name!r}: ratio is bytes on the wire over bytes of gradients, a "
                f"positive number (0.5 for 16 of 32 bits), got {self.ratio}"
            )
        if not (math.isfinite(self.seconds_per_byte) and self.seconds_per_byte >= 0.0):
            raise ValueError(
                f"codec {self.name!r}: seconds_per_byte must be finite and not negative, got "
                f"{self.seconds_per_byte}"
            )
        if self.phases not in (1, 2):
            raise ValueError(f"codec {self.name!r}: phases must be 1 or 2, got {self.phases}")

    def of_encoded(self) -> CodecCost:
        """The same costs, where sizes count bytes after encoding."""
        return replace(self, ratio=1.0, seconds_per_byte=self.seconds_per_byte / self.ratio)


NONE = CodecCost("none", 1.0)
"""Gradients travel as they are."""


def _in_two_phases(name: str, ratio: float, encode_s: float, decode_s: float) -> CodecCost:
    """A codec whose bytes cannot be summed: ``1 + 1/n`` encodings, two decodings (n = 4 here)."""
    return CodecCost(name, ratio, (1.25 * encode_s + 2.0 * decode_s) / _MEASURED_BYTES, phases=2)


_MEASURED_BYTES = 64 * 2**20  # float32, one CPU thread

CODECS = MappingProxyType(
    {
        codec.name: codec
        for codec in (
            NONE,
            # Horovod casts into new tensors, whose memory costs more than the cast.
            CodecCost("fp16", 0.5, 45e-3 / _MEASURED_BYTES),
            _in_two_phases("bf16", 0.5, encode_s=6.6e-3, decode_s=9.6e-3),
            # 256 values share a float32 scale: 260 bytes for 1024.
            _in_two_phases("int8", 260 / 1024, encode_s=20.9e-3, decode_s=13.3e-3),
        )
    }
)
"""The codecs of :mod:`hvd_pipe.torch.compression` for float32 gradients, by name.

Times were measured on one CPU thread (64 MiB of float32; encode, decode: bf16 6.6, 9.6 ms; int8
20.9, 13.3 ms; both, of fp16, which is Horovod's own cast: 45 ms). A GPU takes far less: use
``CodecCost(name, ratio, phases=2)`` there, or measure.
"""


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


_ROUNDING = 1e-12  # relative; segments that meet in theory may miss each other by this much


@dataclass(frozen=True)
class CommModel:
    """All-reduce time of one message, piecewise linear in its size and never decreasing.

    ``T(x) = intercepts[k] + slopes[k] * x`` for ``starts[k] <= x < starts[k+1]``; the last segment
    has no end. T may jump upwards at a start (networks change protocol there), never downwards.

    Args:
        starts: where each of the K segments begins, bytes; the first is 0, then increasing.
        intercepts, slopes: seconds, of which the first is not negative; seconds per byte, none
            negative; K of each.
        delay: seconds that a message takes beside, until it is known to have arrived, in which the
            link is free for others: messages sent together have it once.
        error: mean relative error on the medians of the samples that it was fitted to, or None. It
            plays no part in ``==``.
        blocking: whether one thread negotiates and carries, as Horovod's does over Gloo and MPI:
            the delay then passes before messages, and keeps the link idle (`blocked_ends`).

    Raises:
        ValueError: the segments do not make a non-negative, non-decreasing function.

    Example:
        >>> CommModel.linear(alpha=1e-3, beta=2e-9)(1_000_000)
        0.003
        >>> jump = CommModel(starts=(0, 8192), intercepts=(1e-4, 8e-4), slopes=(1e-8, 3e-9))
        >>> jump(np.array([0, 8192])).round(6).tolist()
        [0.0001, 0.000825]

    Source: MG-WFBP, arXiv 1912.09268 (the line, Table 2); the segments are ours.
    """

    starts: tuple[float, ...]
    intercepts: tuple[float, ...]
    slopes: tuple[float, ...]
    delay: float = 0.0
    error: float | None = field(default=None, compare=False)
    blocking: bool = False

    def __post_init__(self) -> None:
        for name in ("starts", "intercepts", "slopes"):
            values = tuple(float(value) for value in getattr(self, name))
            if not all(math.isfinite(value) for value in values):
                raise ValueError(f"{name} must be finite numbers, got {values}")
            object.__setattr__(self, name, values)
        if not (math.isfinite(self.delay) and self.delay >= 0.0):
            raise ValueError(f"delay must be finite and not negative, got {self.delay} s")
        if self.error is not None and not (math.isfinite(self.error) and self.error >= 0.0):
            raise ValueError(f"error must be finite and not negative, or None, got {self.error}")
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
                "fit.fit() finds the best line that has none"
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
        """Seconds for a message of so many bytes, or a float64 array of them for an array."""
        if isinstance(bytes, np.ndarray):
            if bytes.size and bytes.min() < 0:
                raise ValueError(f"a message has no negative size, got {bytes.min()} bytes")
            k = np.searchsorted(self.starts, bytes, side="right") - 1
            time = np.asarray(self.intercepts)[k] + np.asarray(self.slopes)[k] * bytes
            return cast(FloatArray, time)
        if bytes < 0:
            raise ValueError(f"a message has no negative size, got {bytes} bytes")
        segment = self._segment(bytes)
        return self.intercepts[segment] + self.slopes[segment] * float(bytes)

    @property
    def latency(self) -> float:
        """Seconds that an empty message takes: the ``a`` of ``a + b * bytes``."""
        return self.intercepts[0]

    @classmethod
    def linear(cls, alpha: float, beta: float) -> CommModel:
        """The line ``T(x) = alpha + beta * x``, seconds and seconds per byte."""
        return cls((0.0,), (alpha,), (beta,))

    @classmethod
    def table(cls, bytes: npt.ArrayLike, seconds: npt.ArrayLike) -> CommModel:
        """Measured points, made monotone, joined by straight lines.

        Where noise makes a longer message look faster, neighbours are pooled and share the median
        of all their samples (isotonic regression in the L1 norm). Below the first size the first
        line goes on, but to no negative latency; above the last, the mean slope of the last factor
        of four in size.

        Args:
            bytes, seconds: 1-D, N sizes of which at least two differ, and N positive times.

        Raises:
            ValueError: the samples are malformed or all of one size.

        Example:
            >>> model = CommModel.table([100, 200, 300], [3.0, 2.0, 4.0])
            >>> [model(size) for size in (0, 100, 200, 250, 300)]
            [2.5, 2.5, 2.5, 3.25, 4.0]

        Source: isotonic regression as in Barlow et al. 1972; the ends are ours.
        """
        sizes, times = monotone(bytes, seconds)
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
        middle = medians(bytes, seconds)[1]
        return cls(
            (*starts, sizes[-1]),
            (*intercepts, times[-1] - slope * sizes[-1]),
            (*slopes, slope),
            error=float(np.mean(np.abs(times - middle) / middle)),
        )

    def scaled(self, bytes_factor: float, seconds_factor: float = 1.0) -> CommModel:
        """The model ``T'(x) = seconds_factor * T(bytes_factor * x)``; its starts move along.

        The delay and the relative error stay what they were. The first factor is positive, the
        second not negative.

        Example:
            >>> jump = CommModel(starts=(0, 8192), intercepts=(1e-4, 8e-4), slopes=(1e-8, 3e-9))
            >>> half = jump.scaled(0.5)
            >>> half.starts, half(20_000) == jump(10_000)
            ((0.0, 16384.0), True)
        """
        if not (math.isfinite(bytes_factor) and bytes_factor > 0.0):
            raise ValueError(f"bytes_factor must be finite and positive, got {bytes_factor}")
        if not (math.isfinite(seconds_factor) and seconds_factor >= 0.0):
            raise ValueError(f"seconds_factor must be finite, not negative, got {seconds_factor}")
        return replace(
            self,
            starts=tuple(start / bytes_factor for start in self.starts),
            intercepts=tuple(seconds_factor * value for value in self.intercepts),
            slopes=tuple(seconds_factor * bytes_factor * value for value in self.slopes),
        )

    def __add__(self, other: CommModel) -> CommModel:
        """One after the other: the sum of both times and delays; ``error`` is None."""
        if not isinstance(other, CommModel):
            return NotImplemented
        starts = sorted({*self.starts, *other.starts})
        pieces = [(self._segment(start), other._segment(start)) for start in starts]
        return CommModel(
            tuple(starts),
            tuple(self.intercepts[i] + other.intercepts[j] for i, j in pieces),
            tuple(self.slopes[i] + other.slopes[j] for i, j in pieces),
            self.delay + other.delay,
            blocking=self.blocking or other.blocking,
        )

    def compressed(self, codec: CodecCost) -> CommModel:
        """The model for gradients that travel encoded: ``T(ratio x) + seconds_per_byte x``.

        Here x counts bytes before encoding, and one thread codes and sends. Of p phases each
        carries a p-th of the bytes and has latency and delay of its own:
        ``p T(ratio x / p) + seconds_per_byte x``.

        Example:
            >>> half = CodecCost("half", ratio=0.5, seconds_per_byte=1e-9)
            >>> round(CommModel.linear(1.0, 1e-8).compressed(half)(1e8), 9)
            1.6

        Source: Pipe-SGD, Li et al., NeurIPS 2018: bytes over the ratio, plus time for each byte.
        """
        smaller, phases = self, codec.phases
        if codec.ratio != 1.0 or phases > 1:
            smaller = self.scaled(codec.ratio / phases, phases)
            smaller = replace(smaller, delay=phases * self.delay)
        if codec.seconds_per_byte == 0.0:
            return smaller
        return smaller + CommModel.linear(0.0, codec.seconds_per_byte)

    @property
    def delay_behind(self) -> float:
        """Seconds of the delay that pass after the last message; 0 where they pass before it."""
        return 0.0 if self.blocking else self.delay

    def each_alone(self) -> CommModel:
        """Where it is ``blocking``, the model in which every message has the delay by itself.

        No message ends earlier in it: those that are negotiated together have the delay once.
        """
        if not self.blocking:
            return self
        return replace(self, delay=0.0, blocking=False) + CommModel.linear(self.delay, 0.0)

    def _segment(self, bytes: float) -> int:
        return bisect_right(self.starts, bytes) - 1

    def to_json(self) -> dict[str, Any]:
        """A dict for ``json.dump``; :meth:`from_json` reads it back exactly."""
        data: dict[str, Any] = {name: list(getattr(self, name)) for name in _LISTS}
        if self.delay:
            data["delay"] = self.delay
        if self.blocking:
            data["blocking"] = True
        if self.error is not None:
            data["error"] = self.error
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CommModel:
        """The model that :meth:`to_json` wrote; ValueError names keys that lack or are unknown."""
        check_keys(data, _LISTS, "a CommModel", optional={"delay", "error", "blocking"})
        error, blocking = data.get("error"), data.get("blocking", False)
        if not isinstance(blocking, bool):
            raise ValueError(f"a CommModel's blocking is true or false, got {blocking!r}")
        try:
            delay = float(data.get("delay", 0.0))
            starts, intercepts, slopes = (tuple(map(float, data[name])) for name in _LISTS)
            error = None if error is None else float(error)
            return cls(starts, intercepts, slopes, delay, error, blocking)
        except TypeError as problem:
            raise ValueError(f"a CommModel holds lists of numbers: {problem}") from problem


def blocked_ends(
    ready: Sequence[float], seconds: Sequence[float], delay: float, free: float = 0.0
) -> list[float]:
    """When each message ends where one thread negotiates and carries, first in, first out.

    Whenever the thread is free, it negotiates what is ready by then, for the ``delay``, and
    carries it. So a message that is ready by itself has the delay, and a burst has it once::

        ready   1      2  3
        link    d 1111 d 2222 3333

    Args:
        ready, seconds: When each may leave, not decreasing, and how long the link carries it.
        delay, free: Of a negotiation, in which the link is idle; when the thread is free.

    Example:
        >>> blocked_ends([0.0, 2.0, 4.5], [4.0, 4.0, 4.0], delay=1.0)
        [5.0, 10.0, 14.0]
    """
    ends: list[float] = []
    while len(ends) < len(ready):
        looks = max(free, ready[len(ends)])
        free = looks + delay
        while len(ends) < len(ready) and ready[len(ends)] <= looks:
            free += seconds[len(ends)]
            ends.append(free)
    return ends


_LISTS = ("starts", "intercepts", "slopes")
