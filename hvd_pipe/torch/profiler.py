"""Measure a running job: when each gradient becomes ready, and what an all-reduce costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch
from horovod.torch.mpi_ops import ProcessSet, Sum, allreduce_async_, synchronize

from hvd_pipe.planning.comm import CommModel, measured
from hvd_pipe.torch.agree import largest

__all__ = ["ReadyTimes", "measure_comm"]

BUDGET_S = 2.0
LARGEST = 32 * 2**20

_SMALLEST = 1024
_REPEATS = 5
_LEAST_S = 1e-6


class ReadyTimes:
    """Moments at which gradients become ready, over some steps.

    On a CUDA device the moments are events in the stream that computes the gradients; the host
    waits for them once a recorded step.
    """

    def __init__(self, places: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds_by_step: list[list[float]] = []
        self._moments: list[float | torch.cuda.Event | None] = [None] * places
        self.steps = 0
        """Backward passes closed so far, the same on all ranks."""

    def mark(self, place: int) -> None:
        """Note that the gradient at ``place`` is ready now."""
        self._moments[place] = self._now()

    def end_step(self) -> None:
        """Close one backward pass; a gradient that was not computed counts as ready now."""
        self.steps += 1
        if all(moment is None for moment in self._moments):
            return
        end = self._now()
        if self._cuda:
            torch.cuda.synchronize()
        moments = [end if moment is None else moment for moment in self._moments]
        seconds = [self._seconds(moments[0], moment) for moment in moments]
        first = min(seconds)
        self._seconds_by_step.append([second - first for second in seconds])
        self._moments = [None] * len(moments)

    def seconds(self) -> list[float]:
        """Return the median over steps of each gradient's ready time, from the first one's."""
        if not self._seconds_by_step:
            return [0.0] * len(self._moments)
        medians: list[float] = np.median(np.array(self._seconds_by_step), axis=0).tolist()
        return medians

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @staticmethod
    def _seconds(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
        if isinstance(start, float) and isinstance(end, float):
            return end - start
        return float(start.elapsed_time(end)) / 1e3  # type: ignore[union-attr, arg-type]


def measure_comm(
    largest_bytes: int, device: torch.device, process_set: ProcessSet, tag: str
) -> tuple[CommModel, float]:
    """Time all-reduces of growing messages; return what occupies the link, and the latency beside.

    Horovod gathers messages for a cycle (1 ms), and its caller polls for their end, so n messages
    that are sent together take ``latency + n T(bytes)``. A plan must not count the latency once a
    message: T is the difference between 2n messages and n, over n.

    Every rank takes part and gets the same answer: a sample is the slowest rank's time. Sizes grow
    fourfold from 1 KiB up to ``largest_bytes`` or `LARGEST`, or until ``BUDGET_S`` is used up.

    Args:
        largest_bytes: The size of the largest message that matters, in bytes.
        device: Where the messages lie.
        process_set: The ranks that take part.
        tag: Begins the names of the messages.

    Returns:
        T, the time that a message occupies the link by its size; and the latency in seconds.
    """
    sizes = _sizes(min(largest_bytes, LARGEST))
    # All memory at once, before the first message: a rank that has too little fails alone here.
    count = max(2 * _messages(size) * size // 4 for size in sizes)
    buffer = torch.zeros(count, device=device)
    occupied: list[float] = []
    latency = spent = 0.0
    for size in sizes:
        n = _messages(size)
        parts = list(torch.split(buffer[: 2 * n * size // 4], size // 4))
        mine = [
            _time(some, f"{tag}.{size}", process_set)
            for _ in range(_REPEATS + 1)  # the first is not counted
            for some in (parts[:n], parts)
        ]
        times = largest(mine, f"{tag}.largest", process_set)
        short, long = median(times[2::2]), median(times[3::2])
        occupied.append(max((long - short) / n, _LEAST_S))
        if not latency:
            latency = max(short - n * occupied[0], 0.0)
        spent += sum(times)
        if spent > BUDGET_S and len(occupied) > 1:
            break
    return measured(sizes[: len(occupied)], occupied), latency


def _messages(size: int) -> int:
    """Return how many messages of a size tell its time from the noise."""
    return 4 if size <= 2**16 else 1


def _sizes(largest_bytes: int) -> list[int]:
    sizes = [_SMALLEST]
    while sizes[-1] * 4 < largest_bytes:
        sizes.append(sizes[-1] * 4)
    return [*sizes, max(largest_bytes // 4 * 4, 2 * sizes[-1])]


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
