"""How fast each worker is: the user's own step, timed on all ranks at the same time.

speeds = hvd.worker_speeds(step)
batches = hvd.split_batch(256, speeds)
strategy = hvd.CoCoD(period=8, weights=tuple(batches))
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from horovod.torch.mpi_ops import ProcessSet, barrier, global_process_set

from hvd_pipe.torch.agree import gather

__all__ = ["worker_speeds"]

LEAST_ROUNDS = 3

_NAME = "hvd_pipe.worker_speeds"


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
    if process_set.size() > 1:
        barrier(process_set=process_set)
    failure: Exception | None = None
    mine = 0.0
    try:
        mine = _median_seconds(step, seconds)
    except Exception as error:  # the others wait in gather, and must hear of it
        failure = error
    times = gather(mine, _NAME, process_set)
    if failure is not None:
        raise failure
    if min(times) <= 0:
        raise RuntimeError(
            f"the step failed on rank {times.index(min(times))} of the process set: see its error."
        )
    speeds = [1.0 / each for each in times]
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
