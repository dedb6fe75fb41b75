"""A rank that waits for another leaves the processor alone."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from workers_waiting import LATE_S, wait_for_a_late_rank


@pytest.mark.parametrize("launcher", ["mpi", "gloo"])
def test_waiting_takes_no_processor(launcher: str) -> None:
    """Horovod's own wait asks again at once, for as long as it takes.

    On a busy machine other processes take that time, and only the count of pauses shows it.
    """
    seconds, used, pauses = run_ranks(2, wait_for_a_late_rank, launcher=launcher)[0]
    assert seconds > 0.9 * LATE_S
    assert used < 0.2 * seconds
    assert 100 < pauses < 4000 * seconds  # 2 in a millisecond, and more in the first one
