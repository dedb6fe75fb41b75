"""A rank that waits for another leaves the processor alone."""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path

import pytest
import torch
from on_ranks import on_ranks

import hvd_pipe.torch as hvd

LATE_S = 1.5


def pauses() -> int:
    """Return how often this thread went to sleep."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(launcher, marks=on_ranks(2, launcher=launcher, init=hvd.init))
        for launcher in ("mpi", "gloo")
    ],
)
def test_waiting_takes_no_processor(launcher: str) -> None:
    """Rank 1 is late. Horovod's own wait asks again at once, for as long as it takes.

    On a busy machine other processes take that time, and only the count of pauses shows it.
    """
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
    used, slept = time.thread_time(), pauses()
    step(LATE_S if hvd.rank() == 1 else 0.0)
    seconds = time.perf_counter() - start
    used, slept = time.thread_time() - used, pauses() - slept
    if hvd.rank() == 0:
        assert seconds > 0.9 * LATE_S
        assert used < 0.2 * seconds
        if optimizer._hvd_pipe.reduction.group is None:  # else the thread sleeps at once
            assert 100 < slept < 4000 * seconds  # 2 in a millisecond, and more in the first one


@on_ranks(2, launcher="gloo", init=hvd.init)
def test_an_idle_job_takes_no_processor() -> None:
    """Horovod's loop woke two threads of each rank a thousand times a second."""

    def switches() -> int:
        status = [(task / "status").read_text() for task in Path("/proc/self/task").iterdir()]
        counts = [re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.M) for text in status]
        return sum(int(count) for [count] in counts)

    hvd.barrier()
    before, start = switches(), time.perf_counter()
    time.sleep(1.0)
    slept, seconds = switches() - before, time.perf_counter() - start
    hvd.barrier()
    assert slept < 2000 * seconds
