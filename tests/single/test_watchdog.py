"""What a rank says of itself: where its script is, and what it waits for."""

from __future__ import annotations

import doctest
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hvd_pipe.torch import watchdog


def test_doctests() -> None:
    assert doctest.testmod(watchdog).failed == 0


@pytest.mark.parametrize("text", ["-1", "inf", "nan", "two minutes"])
def test_a_limit_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="HVD_PIPE_TIMEOUT must be a number of seconds"):
        watchdog._limit(text)


def test_the_line_of_the_script_is_named_not_that_of_a_library() -> None:
    found: list[str] = []
    frame = sys._getframe()
    # `sorted` calls back through a library's function, as a hook of torch's would be called.
    sorted([1], key=lambda _: found.append(watchdog._line(sys._getframe())) or 0)
    assert found[0].startswith("test_watchdog.py:")
    assert watchdog._line(frame).startswith("test_watchdog.py:")


@contextmanager
def waiting(module: str, name: str, handle: int | None = None) -> Iterator[None]:
    """A thread that waits in a function of a module, as Horovod's functions do for a message."""
    go_on, there = threading.Event(), threading.Event()
    space = {"__name__": module, "go_on": go_on, "there": there}
    exec(f"def {name}(handle):\n    there.set()\n    go_on.wait()", space)
    function: Callable[[int | None], None] = space[name]  # type: ignore[assignment]
    thread = threading.Thread(target=function, args=(handle,))
    thread.start()
    there.wait()
    try:
        yield
    finally:
        go_on.set()
        thread.join()


def test_a_rank_waits_where_horovod_does() -> None:
    assert watchdog._waits_for(sys._current_frames()) is None
    with waiting("my_script", "synchronize"):
        assert watchdog._waits_for(sys._current_frames()) is None
    with waiting("horovod.torch.mpi_ops", "synchronize", handle=7):
        assert watchdog._waits_for(sys._current_frames())[1:] == ("synchronize", 7)  # type: ignore[index]


def test_the_time_is_that_of_one_message() -> None:
    """A job that waits for one message after the other gets on, however slow its links are."""
    process = watchdog._Process(0)
    with waiting("horovod.torch.mpi_ops", "synchronize", handle=7):
        process.look()
        before = process.look()
        assert before.waits
        assert before.since_s > 0
    with waiting("horovod.torch.mpi_ops", "synchronize", handle=8):
        assert process.look().since_s == 0
    with waiting("horovod.torch.mpi_ops", "join"):
        assert process.look().joined
    assert not process.look().waits
