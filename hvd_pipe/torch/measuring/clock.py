"""One clock for the timelines of all ranks and of their devices.

`hvd_pipe.runtime.timeline.clock` has the ranks' part, by way of torch's Horovod; CUDA's is here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from horovod.torch.mpi_ops import ProcessSet, Sum, allreduce_

from hvd_pipe.runtime.timeline import clock
from hvd_pipe.runtime.timeline.clock import Clock, bound_offset, own_clock
from hvd_pipe.torch.agree import gather

__all__ = ["Clock", "DeviceClock", "Moment", "agree_on_clock", "bound_offset", "own_clock"]

Moment = float | torch.cuda.Event
"""Seconds of the host since a timeline's zero, or an event on a CUDA stream."""

Found = Callable[[float, float | None], None]

_ANCHOR_S = 10.0


def agree_on_clock(process_set: ProcessSet) -> Clock:
    """Return the zero of the process set's first rank."""
    name = f"hvd_pipe.{process_set.process_set_id}.clock"

    def meet() -> None:
        allreduce_(torch.zeros(1), name=name, op=Sum, process_set=process_set)

    return clock.agree_on_clock(meet, gather, name, process_set)


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
