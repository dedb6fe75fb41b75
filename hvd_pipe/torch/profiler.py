"""Measure a running job: when each gradient becomes ready, and what an all-reduce costs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from horovod.torch.mpi_ops import ProcessSet, Sum, allreduce_

from hvd_pipe.planning.comm import CommModel, measured
from hvd_pipe.torch.agree import largest

__all__ = ["ReadyTimes", "measure_comm"]


class ReadyTimes:
    """Moments at which gradients become ready, over some steps.

    On a CUDA device the moments are events in the stream that computes the gradients; they cost no
    synchronisation before `seconds` is asked for.
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
    largest_bytes: int,
    device: torch.device,
    process_set: ProcessSet,
    tag: str,
    *,
    repeats: int = 5,
    budget_s: float = 2.0,
) -> CommModel:
    """Time all-reduces of growing messages and return the model that fits them.

    Every rank takes part and gets the same model: a sample is the slowest rank's time. Sizes grow
    fourfold from 1 KiB; they stop at ``largest_bytes`` or when ``budget_s`` is used up.

    Args:
        largest_bytes: The size of the largest message that matters, in bytes.
        device: Where the messages lie.
        process_set: The ranks that take part.
        tag: Begins the names of the messages.
        repeats: Timed all-reduces a size, after one that is not timed.
        budget_s: Seconds to spend at most, give or take one size.

    Returns:
        All-reduce time by message size.
    """
    sizes: list[int] = []
    seconds: list[float] = []
    spent = 0.0
    for size in _sizes(largest_bytes):
        message = torch.zeros(max(1, size // 4), dtype=torch.float32, device=device)
        times = [_time(message, f"{tag}.{size}", process_set) for _ in range(repeats + 1)]
        times = largest(times, f"{tag}.largest", process_set)
        sizes += [message.numel() * 4] * repeats
        seconds += times[1:]
        spent += sum(times)
        if spent > budget_s and len(set(sizes)) > 1:
            break
    return measured(np.array(sizes, dtype=np.float64), np.array(seconds))


def _sizes(largest_bytes: int) -> Sequence[int]:
    sizes = [1024]
    while sizes[-1] * 4 < largest_bytes:
        sizes.append(sizes[-1] * 4)
    return [*sizes, max(largest_bytes, 2 * sizes[-1])]


def _time(message: torch.Tensor, name: str, process_set: ProcessSet) -> float:
    cuda = message.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    allreduce_(message, name=name, op=Sum, process_set=process_set)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
