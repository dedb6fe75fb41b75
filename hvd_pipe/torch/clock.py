"""One clock for the timelines of all ranks and of their devices.

On one host all processes read the same clock. Between hosts, some all-reduces bound the
difference of two clocks: none can end on a rank before it has begun on every other. While that
leaves room for synchronised clocks (NTP, PTP), the clocks are believed; else they are put right by
the middle of the bounds.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from horovod.torch.mpi_ops import ProcessSet, Sum, allreduce_

from hvd_pipe.torch.agree import gather

__all__ = ["Clock", "DeviceClock", "Moment", "agree_on_clock", "bound_offset", "own_clock"]

Moment = float | torch.cuda.Event
"""Seconds of the host since a timeline's zero, or an event on a CUDA stream."""

Found = Callable[[float, float | None], None]

_ROUNDS = 12
_ANCHOR_S = 10.0


@dataclass(frozen=True)
class Clock:
    """Zero by this process's ``perf_counter``, in Unix time, and how far off that may be."""

    zero: float
    zero_unix_ns: int
    error_s: float | None
    """None where it was compared with no other rank's."""


def agree_on_clock(process_set: ProcessSet) -> Clock:
    """Return the zero of the process set's first rank."""
    name = f"hvd_pipe.{process_set.process_set_id}.clock"
    entered, left = [], []
    for _ in range(_ROUNDS if process_set.size() > 1 else 0):
        entered.append(time.time_ns())
        allreduce_(torch.zeros(1), name=name, op=Sum, process_set=process_set)
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


class DeviceClock:
    """Turns CUDA events into the host's seconds, once they have passed; nobody waits for them.

    Args:
        now: Returns the host's seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._pending: list[tuple[Moment, Moment | None, Found]] = []
        self._lock = threading.Lock()
        self._anchor()

    @staticmethod
    def mark() -> torch.cuda.Event:
        """Return the moment at which the current stream will have done what it has been given."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def take(self, start: Moment, end: Moment | None, found: Found) -> None:
        """Have `settle` call ``found`` with the seconds of two moments, when they have passed."""
        with self._lock:
            self._pending.append((start, end, found))

    def settle(self) -> None:
        """Tell of what has passed; now and then, tie the two clocks together anew."""
        with self._lock:
            pending, self._pending = self._pending, []
        left = []
        for start, end, found in pending:
            if _has_passed(start) and _has_passed(end):
                found(self._seconds(start), None if end is None else self._seconds(end))
            else:
                left.append((start, end, found))
        with self._lock:
            self._pending = left + self._pending
        if self._now() - self._anchored_s > _ANCHOR_S:
            self._anchor()

    def _anchor(self) -> None:
        # The one time that the host waits for the device: the clocks drift apart, by up to some
        # milliseconds a minute.
        self._base = self.mark()
        self._base.synchronize()
        self._anchored_s = self._now()

    def _seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment
        return self._anchored_s + float(self._base.elapsed_time(moment)) / 1e3


def _has_passed(moment: Moment | None) -> bool:
    if not isinstance(moment, torch.cuda.Event):
        return True
    return bool(moment.query())  # type: ignore[no-untyped-call]
