"""A rank of a Keras job raises or leaves early.

The others end soon, and say why; nothing is left of the job.
"""

from __future__ import annotations

import re
from pathlib import Path

from faults import NEVER_S, Job

SCRIPT = Path(__file__).with_name("workers_keras_faults.py")
N = 3
LOST = 1


def job(strategy: str, word: str) -> Job:
    return Job("mpi", strategy, word, timeout_s=NEVER_S, ranks=N, script=SCRIPT)


def test_a_rank_raises() -> None:
    with job("cocod:period=2", "raise") as one:
        one.started()
        one.ended()
        assert one.launched.returncode != 0
        told = rf"of another: rank {LOST} on .* raised ValueError: bad sample 17 \(\w+\.py:"
        assert re.search(told, one.output), one.output


def test_ranks_that_end_at_different_times_with_averages_in_flight_end_well() -> None:
    with job("pipe-sgd+cocod:period=2", "exit") as one:
        one.started()
        one.ended()
        assert one.launched.returncode == 0, one.output
        assert all(f"rank {rank} leaves" in one.output for rank in range(N))
        assert "training ended with averages in flight" in one.output
        assert "Traceback" not in one.output
