"""Measure a running job: when each gradient becomes ready, and what an all-reduce costs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from horovod.torch.mpi_ops import ProcessSet, Sum, allreduce_async_, synchronize

from hvd_pipe.planning.comm import CommModel
from hvd_pipe.runtime import comm_probe
from hvd_pipe.runtime.agreement import allocated_everywhere
from hvd_pipe.runtime.comm_probe import BUDGET_S, Progress
from hvd_pipe.torch.agree import largest

__all__ = ["Clock", "Moment", "ReadyTimes", "measure_allreduce", "measure_comm"]

Moment = float | torch.cuda.Event
"""Seconds of the host's clock, or an event in the stream that computes."""


class Clock:
    """Reads moments without waiting for the device.

    On a CUDA device a moment is an event in its current stream, which gets its time when the
    stream comes to it; elsewhere it is the host's clock.
    """

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
    def passed(moment: Moment) -> bool:
        """Return whether the device has come to this moment."""
        return isinstance(moment, float) or bool(moment.query())  # type: ignore[no-untyped-call]

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


class ReadyTimes:
    """Moments at which gradients become ready, over some steps.

    On a CUDA device the host waits for them once a recorded step.
    """

    def __init__(self, places: int, device: torch.device) -> None:
        self._clock = Clock(device)
        self._seconds_by_step: list[list[float]] = []
        self._moments: list[Moment | None] = [None] * places
        self.steps = 0
        """Backward passes closed so far, the same on all ranks."""

    def mark(self, place: int) -> None:
        """Note that the gradient at ``place`` is ready now."""
        self._moments[place] = self._clock.now()

    def end_step(self) -> None:
        """Close one backward pass; a gradient that was not computed counts as ready now."""
        self.steps += 1
        if all(moment is None for moment in self._moments):
            return
        end = self._clock.now()
        Clock.wait(end)
        moments = [end if moment is None else moment for moment in self._moments]
        seconds = [Clock.seconds(moments[0], moment) for moment in moments]
        first = min(seconds)
        self._seconds_by_step.append([second - first for second in seconds])
        self._moments = [None] * len(moments)

    def seconds(self) -> list[float]:
        """Return the median over steps of each gradient's ready time, from the first one's."""
        if not self._seconds_by_step:
            return [0.0] * len(self._moments)
        medians: list[float] = np.median(np.array(self._seconds_by_step), axis=0).tolist()
        return medians


def measure_comm(
    largest_bytes: int, device: torch.device, process_set: ProcessSet, tag: str
) -> CommModel:
    """Time all-reduces as `hvd_pipe.runtime.comm_probe.measure_comm` does.

    Args:
        largest_bytes: The size of the largest message that matters, in bytes.
        device: Where the messages lie.
        process_set: The ranks that take part.
        tag: Begins the names of the messages.
    """
    return comm_probe.measure_comm(largest_bytes, _Sender(device, process_set, tag))


def measure_allreduce(
    sizes: Sequence[int],
    device: torch.device,
    process_set: ProcessSet,
    budget_s: float = BUDGET_S,
    progress: Progress | None = None,
    tag: str = "hvd_pipe.allreduce",
) -> tuple[tuple[list[int], list[float]], float]:
    """Time all-reduces as `hvd_pipe.runtime.comm_probe.measure_allreduce` does.

    Args:
        sizes, budget_s, progress: As there.
        device: Where the messages lie.
        process_set: The ranks that take part; at least two.
        tag: Begins the names of the messages; the same on all ranks.
    """
    sender = _Sender(device, process_set, tag)
    return comm_probe.measure_allreduce(sizes, sender, budget_s, progress)


class _Sender:
    """Sends messages through torch's Horovod; see `hvd_pipe.runtime.comm_probe.Sender`."""

    def __init__(self, device: torch.device, process_set: ProcessSet, tag: str) -> None:
        self._device, self._process_set, self._tag = device, process_set, tag
        self._buffer = torch.empty(0)

    def allocate(self, count: int) -> None:
        self._buffer = allocated_everywhere(
            lambda: torch.zeros(count, device=self._device),
            4 * count,
            self._process_set,
            self.largest,
        )

    def seconds(self, size: int, n: int) -> float:
        parts = torch.split(self._buffer[: n * size // 4], size // 4)
        return _time(parts, f"{self._tag}.{size}", self._process_set)

    def largest(self, values: Sequence[float]) -> list[float]:
        return largest(values, f"{self._tag}.largest", self._process_set)


def _time(messages: Sequence[torch.Tensor], name: str, process_set: ProcessSet) -> float:
    """Return the seconds until all messages, sent together, have been reduced."""
    cuda = messages[0].is_cuda
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    handles = [
        allreduce_async_(
            message,
            name=f"{name}.{i}",
            op=Sum,
            prescale_factor=1.0 + i,  # Horovod does not fuse messages that differ in this
            process_set=process_set,
        )
        for i, message in enumerate(messages)
    ]
    for handle in handles:
        synchronize(handle)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
