"""What an all-reduce costs by its size, measured on the ranks at hand; knows no framework.

Horovod gathers messages for a cycle (1 ms), and its caller polls for their end, so n messages that
are sent together take ``delay + n T(bytes)``. A plan must not count the delay once a message: T is
the difference between 2n messages and n, over n.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

import numpy as np

from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.fit import measured

BUDGET_S = 4.0
LARGEST = 64 * 2**20

_SMALLEST = 1024
_GROWTH = 8
_CERTAIN = 2**20
_REPEATS = 5
_LEAST_S = 1e-6
_MOST_MESSAGES = 8
_CLEAR_S = 0.05  # of messages: delays of some milliseconds no longer blur it

_log = logging.getLogger("hvd_pipe")

Progress = Callable[[int, float], None]
"""Called with a message's size in bytes and its seconds."""


class Sender(Protocol):
    """A framework's Horovod, as far as it is needed here."""

    def allocate(self, count: int) -> None:
        """Make room for so many float32 on all ranks, or raise on all."""

    def seconds(self, size: int, n: int) -> float:
        """Return the seconds until n messages of a size, sent together, have been reduced."""

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return, place by place, the largest of all ranks' values."""

    def is_beside_negotiation(self) -> bool:
        """Return whether these messages travel beside the thread that negotiates, as NCCL's do."""


def measure_comm(largest_bytes: int, sender: Sender) -> CommModel:
    """Time all-reduces of growing messages through Horovod, as the job's own travel.

    Sizes grow eightfold from 1 KiB up to ``largest_bytes`` or `LARGEST`. What `BUDGET_S` leaves no
    time for is extrapolated from the two largest that were measured.
    """
    sizes = _sizes(min(largest_bytes, LARGEST))
    (sizes, seconds), delay = measure_allreduce(sizes, sender)
    [blocking] = sender.largest([float(not sender.is_beside_negotiation())])
    comm = replace(measured(sizes, seconds), delay=delay, blocking=bool(blocking))
    if comm.error is not None:
        _log.info(
            "all-reduce: %d sizes up to %d bytes, delay %.3f ms, mean error of the model %.1f%%",
            len(sizes),
            sizes[-1],
            1e3 * delay,
            100 * comm.error,
        )
    return comm


def measure_allreduce(
    sizes: Sequence[int],
    sender: Sender,
    budget_s: float = BUDGET_S,
    progress: Progress | None = None,
) -> tuple[tuple[list[int], list[float]], float]:
    """Time all-reduces through Horovod, as the job's own messages travel.

    Every rank takes part and gets the same answer: a sample is the slowest rank's time. Where
    delays are long, some sizes are left out, up to 1 MiB; above it a size that would not fit into
    the budget ends the measurement.
    """
    sizes = list(sizes)
    if not sizes or sizes[0] < 4 or sizes != sorted(set(sizes)) or any(s % 4 for s in sizes):
        raise ValueError(
            f"sizes must grow and be multiples of 4 bytes (a float32), from 4 on; got {sizes}."
        )
    # All memory at once, before the first message.
    sender.allocate(max(2 * _messages(size) * size // 4 for size in [*sizes, _CERTAIN]))
    done: list[int] = []
    occupied: list[float] = []
    delay = spent = 0.0

    def rounds(size: int, n: int, count: int) -> list[float]:
        """The slowest rank's times of n messages and of 2n, in turn."""
        seconds = [sender.seconds(size, messages) for _ in range(count) for messages in (n, 2 * n)]
        return sender.largest(seconds)

    while sizes:
        size = sizes.pop(0)
        if len(done) > 1:
            # At most: delays do not grow. A large message is one, beside two.
            grown = 3 * occupied[-1] * size / done[-1]
            expected = 2 * (2 * delay + grown) if size > _CERTAIN else 0.0
            if spent + expected > budget_s:
                if done[-1] >= _CERTAIN // 2:
                    break
                # Times of small messages are latency, and say little of large ones.
                sizes.insert(0, size)
                size = _CERTAIN
        n = _messages(size, occupied[-1] * size / done[-1] if done else 0.0)
        first = rounds(size, n, 1)  # not counted, but it says how many the budget has room for
        if not done:
            sizes = _spread(sizes, int(budget_s / (2 * sum(first))) - 1)
        spent += sum(first)
        room = int((budget_s - spent) / (1 + len(sizes)) / sum(first))
        times = rounds(size, n, min(max(room, 1), _REPEATS))
        spent += sum(times)
        short, long = median(times[0::2]), median(times[1::2])
        done.append(size)
        occupied.append(max(_occupied(short, long, n, delay if len(done) > 1 else None), _LEAST_S))
        if len(done) == 1:
            delay = max(short - n * occupied[0], 0.0)
        if progress is not None:
            progress(size, occupied[-1])
    return (done, occupied), delay


def _spread(sizes: list[int], count: int) -> list[int]:
    """Return so many of the sizes, two at least, from the first to the last.

    >>> _spread([1, 2, 3, 4, 5], 3), _spread([1, 2, 3], 0), _spread([1, 2, 3], 9)
    ([1, 3, 5], [1, 3], [1, 2, 3])
    """
    if len(sizes) <= max(count, 2):
        return sizes
    return [sizes[round(at)] for at in np.linspace(0, len(sizes) - 1, max(count, 2))]


def _messages(size: int, seconds: float = 0.0) -> int:
    """Return how many messages of a size tell its time from the noise, and from what buffers hide.

    >>> _messages(1024), _messages(1024, 0.02), _messages(2**20), _messages(2**22)
    (8, 3, 2, 1)
    """
    by_time = math.ceil(_CLEAR_S / seconds) if seconds else _MOST_MESSAGES
    return max(1, min(_MOST_MESSAGES, 2**21 // size, by_time))


def _occupied(short: float, long: float, n: int, delay: float | None) -> float:
    """Return T from the times of n messages and of 2n.

    One hiccup can halve their difference: it must not be far from what one time alone says.

    >>> [_occupied(short, 2.0, 1, 0.0) for short in (1.0, 1.5)], _occupied(1.5, 2.0, 1, None)
    ([1.0, 0.95], 0.5)
    >>> _occupied(1.0, 3.0, 1, 0.0)
    1.15
    """
    difference = (long - short) / n
    if delay is None or short <= 4 * delay:
        return difference
    first, alone = (short - delay) / n, (long - delay) / (2 * n)
    if alone > 1.25 * first:
        alone = first
    return min(max(difference, 0.95 * alone), 1.15 * alone)


def _sizes(largest_bytes: int) -> list[int]:
    sizes = [_SMALLEST]
    while sizes[-1] * _GROWTH < largest_bytes:
        sizes.append(sizes[-1] * _GROWTH)
    return [*sizes, max(largest_bytes // 4 * 4, 2 * sizes[-1])]
