"""One clock for the timelines of all ranks; knows no framework.

On one host all processes read the same clock. Between hosts, some all-reduces bound the
difference of two clocks: none can end on a rank before it has begun on every other. While that
leaves room for synchronised clocks (NTP, PTP), the clocks are believed; else they are put right by
the middle of the bounds.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod.common.process_sets import ProcessSet

from hvd_pipe.runtime.consensus import members

__all__ = ["Clock", "agree_on_clock", "bound_offset", "own_clock"]

Gather = Callable[[Any, str, ProcessSet], list[Any]]

_ROUNDS = 12


@dataclass(frozen=True)
class Clock:
    """Zero by this process's ``perf_counter``, in Unix time, and how far off that may be."""

    zero: float
    zero_unix_ns: int
    error_s: float | None
    """None where it was compared with no other rank's."""


def agree_on_clock(
    meet: Callable[[], object], gather: Gather, name: str, process_set: ProcessSet
) -> Clock:
    """Return the zero of the process set's first rank."""
    entered, left = [], []
    for _ in range(_ROUNDS if len(members(process_set)) > 1 else 0):
        entered.append(time.time_ns())
        meet()
        left.append(time.time_ns())
    mine = [_host(), time.time_ns(), entered, left]
    everyone = gather(mine, f"{name}.gather", process_set)
    host, zero_unix_ns, first_entered, first_left = everyone[0]
    offset_ns, error_ns = 0, 0
    if host != mine[0]:
        offset_ns, error_ns = bound_offset(entered, left, first_entered, first_left)
    wall_ns, here = _both_clocks()
    zero = here - (wall_ns - offset_ns - zero_unix_ns) / 1e9
    return Clock(zero, zero_unix_ns, error_ns / 1e9)


def own_clock() -> Clock:
    """Return a zero of this rank alone: now, by its host's clock."""
    wall_ns, here = _both_clocks()
    return Clock(here, wall_ns, None)


def _host() -> str:
    """Return what tells this host from others, also where containers bear one name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


def bound_offset(
    entered: Sequence[int], left: Sequence[int], others: Sequence[int], others_left: Sequence[int]
) -> tuple[int, int]:
    """Return by how much this clock is ahead of another, and how far off that can be.

    Nobody leaves an all-reduce before all have entered it.

    Args:
        entered: When this rank entered each of some all-reduces, by its clock, in nanoseconds.
        left: When it left.
        others: When the other rank entered, by its own clock.
        others_left: When that left.

    Example:
        >>> bound_offset([100, 200], [130, 240], [110, 190], [140, 230])  # may well be equal
        (0, 30)
        >>> bound_offset([1100, 1200], [1130, 1240], [110, 190], [140, 230])  # cannot be
        (995, 25)
    """
    low = max(a - b for a, b in zip(entered, others_left, strict=True))
    high = min(a - b for a, b in zip(left, others, strict=True))
    if low <= 0 <= high:
        return 0, max(high, -low)
    return (low + high) // 2, abs(high - low) // 2


def _both_clocks() -> tuple[int, float]:
    """Read both of the host's clocks at one moment, as nearly as can be."""
    readings = []
    for _ in range(5):
        before = time.perf_counter()
        wall_ns = time.time_ns()
        after = time.perf_counter()
        readings.append((after - before, wall_ns, (before + after) / 2))
    _, wall_ns, here = min(readings)
    return wall_ns, here
