"""What the threads of this process do: which wait for other ranks, and which work.

Whoever waits says so, around the call that does::

    with waiting_for("gradients of bucket 3"):
        done.wait()

A rank ends itself for a lost one only while it waits, so a wait that is not registered lets a job
hang, and a computation that is registered may be ended. It costs two microseconds.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

QUIET_S = 5.0  # a thread that has not run for so long is idle: one of a pool, say

Wait = tuple[object, ...]
"""What one thread waits for; no two waits are equal."""

_numbers = itertools.count()
_waits: dict[int, Wait] = {}  # the innermost of each thread, which changes it alone


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Register that this thread waits for other ranks, and what for.

    >>> with waiting_for("an all-reduce"):
    ...     of_thread(threading.get_ident())[0]
    'an all-reduce'
    >>> of_thread(threading.get_ident()) is None
    True
    """
    thread = threading.get_ident()
    outer = _waits.get(thread)
    _waits[thread] = (what, next(_numbers))
    try:
        yield
    finally:
        if outer is None:
            del _waits[thread]
        else:
            _waits[thread] = outer


def of_thread(thread: int | None) -> Wait | None:
    """Return what a thread waits for: the innermost wait."""
    return _waits.get(thread or 0)


def sleep_between_polls(begun: float) -> None:
    """Leave the processor to others for a tenth of the wait so far, 20 us to 0.5 ms."""
    time.sleep(min(max(0.1 * (time.monotonic() - begun), 2e-5), 5e-4))


class Activity(NamedTuple):
    """What a thread does, its processor time, and how often it has gone to sleep.

    The state is a letter: R runs or is about to, D waits for a disk, S sleeps, T is stopped by a
    signal, t by a debugger.
    """

    state: str
    ticks: int
    pauses: int

    @property
    def works(self) -> bool:
        """Whether it runs, or would."""
        return self.state in "RD"


def activity(pid: int, thread: int) -> Activity | None:
    """Return what a thread of a process does; None where that is not known, or it has ended."""
    folder = Path(f"/proc/{pid}/task/{thread}")  # other systems have none
    with suppress(OSError, ValueError, IndexError):
        # The name comes before the last parenthesis, and may have any characters.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        status = (folder / "status").read_text()
        pauses = status.partition("\nvoluntary_ctxt_switches:")[2].partition("\n")[0]
        return Activity(fields[0], int(fields[11]) + int(fields[12]), int(pauses))
    return None


def threads(pid: int) -> set[int]:
    """Return the numbers of a process's threads; empty where they are not known."""
    with suppress(OSError):
        return {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()}
    return set()


class OtherThreads:
    """Threads that Python would wait for at its end, such as one that writes a checkpoint."""

    def __init__(self) -> None:
        self._last: dict[threading.Thread, tuple[Activity | None, float]] = {}

    def are_busy(self) -> bool:
        """Return whether any thread has run lately; an unknown state counts as running."""
        now, before = time.monotonic(), self._last
        self._last = {}
        for thread in threading.enumerate():
            # One that waits for other ranks, as all of ours do, has nothing to finish.
            waits = thread.name.startswith("hvd_pipe") or of_thread(thread.ident) is not None
            if not (thread.daemon or waits or thread is threading.main_thread()):
                current = activity(os.getpid(), thread.native_id or 0)
                last, ran = before.get(thread, (None, now))
                if current is None or current.works or current != last:
                    ran = now
                self._last[thread] = current, ran
        return any(now - ran < QUIET_S for _, ran in self._last.values())
