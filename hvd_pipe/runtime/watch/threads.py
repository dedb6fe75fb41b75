"""Threads that Python would wait for at its end, such as one that writes a checkpoint."""

from __future__ import annotations

import os
import threading
import time

from hvd_pipe.runtime.watch.proc import Activity, activity
from hvd_pipe.runtime.watch.waits import of_thread

__all__ = ["OtherThreads"]

QUIET_S = 5.0  # a thread that has not run for so long is idle: one of a pool, say
_AT_WORK = "RD"  # runs or is about to, and waits for a disk
_OURS = "hvd_pipe"  # what our own threads' names begin with: they wait for other ranks


class OtherThreads:
    """Tells whether they get something done; to be asked often."""

    def __init__(self) -> None:
        self._seen: dict[threading.Thread, tuple[Activity, float]] = {}

    def are_busy(self) -> bool:
        """Return whether one of them has run of late; where nobody knows, whether there is one."""
        now, seen, busy = time.monotonic(), self._seen, False
        self._seen = {}
        for thread in threading.enumerate():
            if not _counts(thread):
                continue
            found = activity(os.getpid(), thread.native_id or 0)
            if found is None:
                busy = True
                continue
            last, ran = seen.get(thread, (None, now))
            if found != last or found.state in _AT_WORK:
                ran = now
            self._seen[thread] = found, ran
            busy = busy or now - ran < QUIET_S
        return busy


def _counts(thread: threading.Thread) -> bool:
    return not (
        thread.daemon
        or thread is threading.main_thread()
        or thread.name.startswith(_OURS)
        or of_thread(thread.ident or 0) is not None
    )
