"""Moments of the host, or of a CUDA device's stream, and the seconds between them."""

from __future__ import annotations

import time

import torch

Moment = float | torch.cuda.Event
"""Seconds by the host's clock, or an event on a CUDA stream."""


class Stopwatch:
    """Reads moments: an event in a CUDA device's current stream, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    def now(self) -> Moment:
        """Return this moment."""
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

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
