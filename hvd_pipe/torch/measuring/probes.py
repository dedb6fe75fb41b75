"""Measure what the job runs on: what an all-reduce costs, and how fast each worker is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from horovod.torch.mpi_ops import (
    ProcessSet,
    Sum,
    allreduce_async_,
    barrier,
    global_process_set,
    nccl_built,
    synchronize,
)

from hvd_pipe.planning.comm import CommModel
from hvd_pipe.runtime import comm_probe
from hvd_pipe.runtime.comm_probe import BUDGET_S, Progress
from hvd_pipe.runtime.consensus import allocated_everywhere, members
from hvd_pipe.torch.agree import gather, largest
from hvd_pipe.torch.messages.group import Group

LEAST_ROUNDS = 3

_NAME = "hvd_pipe.worker_speeds"


def measure_comm(
    largest_bytes: int,
    device: torch.device,
    process_set: ProcessSet,
    tag: str,
    group: Group | None = None,
) -> CommModel:
    """Time all-reduces as `hvd_pipe.runtime.comm_probe.measure_comm`; a ``group`` may carry."""
    return comm_probe.measure_comm(largest_bytes, _Sender(device, process_set, tag, group))


def measure_allreduce(
    sizes: Sequence[int],
    device: torch.device,
    process_set: ProcessSet,
    budget_s: float = BUDGET_S,
    progress: Progress | None = None,
    tag: str = "hvd_pipe.allreduce",
    group: Group | None = None,
) -> tuple[tuple[list[int], list[float]], float]:
    """Time all-reduces as `hvd_pipe.runtime.comm_probe.measure_allreduce` does."""
    sender = _Sender(device, process_set, tag, group)
    return comm_probe.measure_allreduce(sizes, sender, budget_s, progress)


def uses_nccl(device: torch.device) -> bool:
    """Return whether NCCL carries such messages, while Horovod's thread negotiates others."""
    return device.type == "cuda" and bool(nccl_built())


class _Sender:
    """Sends messages of torch's; see `hvd_pipe.runtime.comm_probe.Sender`."""

    def __init__(
        self, device: torch.device, process_set: ProcessSet, tag: str, group: Group | None
    ) -> None:
        self._device, self._process_set, self._tag = device, process_set, tag
        self._group = group
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
        name = f"{self._tag}.{size}"
        if self._group is not None:
            return _time_by(self._group, parts, name)
        return _time(parts, name, self._process_set)

    def largest(self, values: Sequence[float]) -> list[float]:
        return largest(values, f"{self._tag}.largest", self._process_set)

    def is_beside_negotiation(self) -> bool:
        return self._group is not None or uses_nccl(self._device)


def _time_by(group: Group, messages: Sequence[torch.Tensor], name: str) -> float:
    start = time.perf_counter()
    for posted in [group.launch(message, name) for message in messages]:
        posted.wait()
    return time.perf_counter() - start


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


def worker_speeds(
    step: Callable[[], object],
    seconds: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[float]:
    """Time a step on every rank and return how fast the ranks are, the same list everywhere.

    With t_i the median time of rank i's step, its speed is ``(1 / t_i) / mean_j (1 / t_j)``. All
    ranks begin together, as they will compute together.

    Args:
        step: Computes what a training step does, on a batch of the same size on all ranks:
            forward, backward, and no communication, which would make all ranks equally slow.
        seconds: How long to repeat it; three times at least, of which the first does not count.
        process_set: The workers that take part; all of them call this.

    Returns:
        Relative speeds, one a rank of the process set in its order; their mean is 1.

    Raises:
        ValueError: ``seconds`` is negative, or the step took no time.
        RuntimeError: The step has failed on another rank, which raises its own error.

    Example:
        >>> import hvd_pipe.torch as hvd
        >>> hvd.init()
        >>> model, images = torch.nn.Linear(8, 8), torch.randn(64, 8)
        >>> speeds = worker_speeds(lambda: model(images).sum().backward(), seconds=0.0)
        >>> [round(speed, 3) for speed in speeds] if hvd.size() == 1 else [1.0]
        [1.0]

    Source: Shen et al., "CoCoD-SGD" (IJCAI 2019), proportional sampling.
    """
    if not seconds >= 0:
        raise ValueError(f"seconds must be 0 or more, got {seconds!r}.")
    if len(members(process_set)) > 1:
        barrier(process_set=process_set)
    failure: Exception | None = None
    step_s = 0.0
    try:
        step_s = _median_seconds(step, seconds)
    except Exception as error:  # the others wait in gather, and must not wait for ever
        failure = error
    times = gather(step_s, _NAME, process_set)
    if failure is not None:
        raise failure
    if min(times) <= 0:
        raise RuntimeError(
            f"the step failed on rank {times.index(min(times))} of the process set: see its error."
        )
    speeds = [1.0 / t for t in times]
    return [speed / statistics.fmean(speeds) for speed in speeds]


def _median_seconds(step: Callable[[], object], seconds: float) -> float:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < LEAST_ROUNDS or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # else only the launch of its kernels would be timed
        times.append(time.perf_counter() - start)
    median = statistics.median(times[1:])
    if median <= 0:
        raise ValueError("the step took no time: it must compute what a training step does.")
    return median
