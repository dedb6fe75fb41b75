"""Moments of the host and of a CUDA device.

A `Stopwatch` measures intervals. A `DeviceClock` places events of a stream on the host's clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

Moment = float | torch.cuda.Event
"""Seconds by the host's clock, or an event on a CUDA stream."""

Found = Callable[[float, float | None], None]

_ANCHOR_S = 10.0


class Stopwatch:
    """Reads moments: an event in a CUDA device's current stream, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def now(self) -> Moment:
        """Return this moment."""
        return time.perf_counter() if self._device is None else _recorded_event(self._device)

    @staticmethod
    def passed(moment: Moment | None) -> bool:
        """Return whether the device has come to this moment; True for None."""
        if not isinstance(moment, torch.cuda.Event):
            return True
        return bool(moment.query())  # type: ignore[no-untyped-call]

    @staticmethod
    def wait(moment: Moment) -> None:
        """Block until the device has come to this moment."""
        if not isinstance(moment, float):
            moment.synchronize()

    @staticmethod
    def seconds(start: Moment, end: Moment) -> float:
        """Return the seconds from one moment to another; both have passed."""
        if isinstance(start, float) and isinstance(end, float):
            return end - start
        return float(start.elapsed_time(end)) / 1e3  # type: ignore[union-attr, arg-type]


def _recorded_event(device: torch.device | None = None) -> torch.cuda.Event:
    """Record an event in the device's current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


class DeviceClock:
    """Turns CUDA events into the host's seconds (``now``) once they have passed; never waits."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._pending: list[tuple[Moment, Moment | None, Found]] = []
        self._lock = threading.Lock()
        self._anchor()

    @staticmethod
    def mark() -> torch.cuda.Event:
        """Return the moment at which the current stream will have done what it has been given."""
        return _recorded_event()

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
            if Stopwatch.passed(start) and Stopwatch.passed(end):
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
