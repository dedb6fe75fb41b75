"""Clocks of different hosts: the bounds hold whatever the network does."""

from __future__ import annotations

import doctest
import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hvd_pipe.runtime import timeline
from hvd_pipe.runtime.timeline import Recorder, bound_offset

DELAYS = st.integers(0, 1000)


def test_a_halted_recorder_asks_no_more(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    recorder = Recorder(tmp_path / "rank0.json", 10_000, 0)
    recorder.launched("a message", 4, lambda: False)
    (thread,) = set(threading.enumerate()) - before
    recorder.halt()
    recorder.close()
    assert not thread.is_alive()


def test_doctests() -> None:
    assert doctest.testmod(timeline).failed == 0


@given(
    # small ones, too: those that the delays can explain are taken for none
    st.one_of(st.integers(-4000, 4000), st.integers(-(10**6), 10**6)),
    st.lists(st.tuples(DELAYS, DELAYS, DELAYS, DELAYS), min_size=1, max_size=12),
)
def test_the_true_offset_is_within_the_error(
    offset: int, rounds: list[tuple[int, int, int, int]]
) -> None:
    columns: list[list[int]] = [[], [], [], []]
    now = 0
    for late_here, late_there, leave_here, leave_there in rounds:
        entered_here, entered_there = now + late_here, now + late_there
        both = max(entered_here, entered_there)
        row = (
            entered_here + offset,
            both + leave_here + offset,
            entered_there,
            both + leave_there,
        )
        for column, moment in zip(columns, row, strict=True):
            column.append(moment)
        now = both + max(leave_here, leave_there)
    found, error = bound_offset(*columns)
    assert abs(found - offset) <= error + 1
    assert error <= 3000  # one rank waits for the other, and each leaves late
    if abs(offset) > 2000:
        assert found != 0
