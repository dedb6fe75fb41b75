"""What Linux says of a process and of its threads; nothing on other systems."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Activity", "activity", "threads"]

_PROC = Path("/proc")


class Activity(NamedTuple):
    """What a thread does, and what changes whenever it has run.

    Args:
        state: One letter: R runs or is about to, D waits for a disk, S sleeps, T is stopped by a
            signal, t by a debugger.
        ticks: The processor time that it has had.
        pauses: How often it has gone to sleep.
    """

    state: str
    ticks: int
    pauses: int


def activity(pid: int, thread: int) -> Activity | None:
    """Return what a thread of a process does; None where that is not known, or it has ended."""
    folder = _PROC / str(pid) / "task" / str(thread)
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
        return {int(each.name) for each in (_PROC / str(pid) / "task").iterdir()}
    return set()
