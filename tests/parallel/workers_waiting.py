"""What the ranks of `test_waiting` do."""

from __future__ import annotations

import resource
import time

import torch

import hvd_pipe.torch as hvd

LATE_S = 1.5


def wait_for_a_late_rank() -> tuple[float, float, int]:
    """Take a step in which rank 1 is late."""
    hvd.init()
    model = torch.nn.Linear(8, 8)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )

    def step(late_s: float) -> None:
        model(torch.ones(4, 8)).sum().backward()
        time.sleep(late_s)
        optimizer.step()
        optimizer.zero_grad()

    step(0.0)
    start = time.perf_counter()  # before any rank can have left the barrier
    hvd.barrier()
    used, pauses = time.thread_time(), _pauses()
    step(LATE_S if hvd.rank() == 1 else 0.0)
    return time.perf_counter() - start, time.thread_time() - used, _pauses() - pauses


def _pauses() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
