"""A rank of a Keras job is stopped, raises or leaves early.

The others end soon, and say why; nothing is left of the job.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from faults import NEVER_S, TIMEOUT_S, Job

SCRIPT = Path(__file__).with_name("workers_keras_faults.py")
N = 3
LOST = 1


def job(launcher: str, strategy: str, *words: str, timeout_s: float = NEVER_S) -> Job:
    return Job(launcher, strategy, *words, timeout_s=timeout_s, ranks=N, script=SCRIPT)


# nightly: the watch is the same for both frameworks, and test_faults.py has each kind of fault.
@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["merged-gradient", "cocod:period=2"])
def test_a_rank_is_stopped(strategy: str) -> None:
    """Open MPI would wait for ever; under cocod, it is a thread that waits."""
    with job("mpi", strategy, timeout_s=TIMEOUT_S) as one:
        one.train()
        os.kill(one.pid(LOST), signal.SIGSTOP)
        one.ended()
        assert one.launched.returncode != 0
        one.told_who_is_lost(LOST)
        assert "has been silent" in one.output


@pytest.mark.parametrize(
    ("launcher", "strategy"),
    [
        ("mpi", "cocod:period=2"),
        pytest.param("gloo", "merged-gradient", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_raises(launcher: str, strategy: str) -> None:
    with job(launcher, strategy, "raise") as one:
        one.started()
        one.ended()
        assert one.launched.returncode != 0
        told = rf"of another: rank {LOST} on .* raised ValueError: bad sample 17 \(\w+\.py:"
        assert re.search(told, one.output), one.output


def test_ranks_that_end_at_different_times_with_averages_in_flight_end_well() -> None:
    with job("mpi", "pipe-sgd+cocod:period=2", "exit") as one:
        one.started()
        one.ended()
        assert one.launched.returncode == 0, one.output
        assert all(f"rank {rank} leaves" in one.output for rank in range(N))
        assert "training ended with averages in flight" in one.output
        assert "Traceback" not in one.output
