"""A small process beside each rank that keeps its heartbeat, also while the rank runs no Python.

Some calls into C++ keep Python's interpreter lock while they wait. Horovod's do so with dynamic
process sets: its own thread holds the lock of the table of process sets while it asks all ranks
for new sets, and every call that sends something asks that table first. With one rank stopped,
another stands still in such a call, and no thread of its Python runs, however innocent it is::

    rank       main thread       allreduce_async() ... waits, and keeps the interpreter's lock
               reporter thread   "at train.py:57" ...  cannot run
                                        |
    this       looks at /proc           v              "it sleeps, and is not stopped"
    process    <----- connections of its own to the processes beside the other ranks ----->

So a rank that is stopped is told from one that is busy, and one that stands still for a lost rank
is ended. This process imports only the standard library, knows neither Horovod nor MPI, and ends
with its rank.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # started by this file's path: let the package be found, and that alone
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from hvd_pipe.runtime.watch.heartbeat import Heartbeat
from hvd_pipe.runtime.watch.link import Peer, Status
from hvd_pipe.runtime.watch.waits import Activity, activity

__all__ = ["READY", "Rank", "main"]

READY = b"\n"
"""What this process says first: from then on the others hear of its rank."""

MISSED = 3  # beats without a report: the rank runs no Python
_STOPPED = "Tt"
_BY_SIGNAL = "T"
_ASLEEP = "S"
_ASKING = 1  # ticks, of 10 ms, a beat


class Rank:
    """The rank that this process belongs to: a `hvd_pipe.runtime.watch.heartbeat.SeenProcess`.

    Args:
        control: The connection to the rank's reporter thread.
        number: The rank.
        pid: Its process.
        main: The number of its main thread, as Linux counts.
    """

    def __init__(self, control: socket.socket, number: int, pid: int, main: int) -> None:
        self.beat_s = 1.0
        self._control, self._number, self._pid, self._main = control, number, pid, main
        self._sending = threading.Lock()
        self._status = Status()
        self._reported = self._rested = time.monotonic()
        self._activity: Activity | None = None
        self._told_to_end = False

    def report(self, status: Status) -> None:
        """Take down what the rank says of itself."""
        self._status, self._reported = status, time.monotonic()

    def is_stopped(self) -> bool:
        """Whether nothing of the rank can run; where nobody knows, whether it does not report."""
        if os.getppid() != self._pid:  # it has ended; what it has forked keeps the connection open
            self._control.shutdown(socket.SHUT_RDWR)
        found = activity(self._pid, self._main)
        return not self._reports() if found is None else found.state in _STOPPED

    def status(self) -> Status:
        """Return what the rank has said last, or, where it runs no Python, what Linux says.

        A thread that was busy still counts: it may be what keeps the interpreter's lock.
        """
        now, found = time.monotonic(), activity(self._pid, self._main)
        asleep = _sleeps(self._activity, found)
        self._activity = found
        if self._reports():
            self._rested = now
            return self._status
        if not asleep:
            self._rested = now
        since = self._rested if asleep else self._reported
        return replace(self._status, waits=asleep, since_s=now - since, joined=False)

    def say(self, text: str) -> None:
        """Tell the user, by way of the rank where that is possible."""
        if not (self._reports() and self.send({"say": text})):
            with suppress(OSError, ValueError):  # nobody may be reading any more
                sys.stderr.write(f"hvd_pipe: {text}\n")
                sys.stderr.flush()

    def end(self, text: str) -> None:
        """Have the rank end itself; end it from here where it runs no Python."""
        if self._reports():
            if not self._told_to_end:
                self._told_to_end = self.send({"end": text})
            return
        self.say(f"rank {self._number} ends, as it waits for a rank that is lost: {text}")
        with suppress(ProcessLookupError):  # no other signal reaches a process that stands still
            os.kill(self._pid, signal.SIGKILL)

    def end_stopped(self, text: str) -> None:
        """End the rank where a signal has stopped it; one in a debugger is left to that."""
        found = activity(self._pid, self._main)
        if found is None or found.state != _BY_SIGNAL:
            return
        self.say(f"rank {self._number} is ended, as {text}")
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def send(self, message: dict[str, Any]) -> bool:
        """Tell the reporter thread; return whether that was possible."""
        with self._sending, suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")
            return True
        return False

    def _reports(self) -> bool:
        return time.monotonic() - self._reported <= MISSED * self.beat_s


def _sleeps(before: Activity | None, now: Activity | None) -> bool:
    """Whether a thread has done nothing between two beats."""
    if before is None or now is None or now.state != _ASLEEP:
        return False
    return now.ticks - before.ticks <= _ASKING


def main(control: socket.socket) -> None:
    """Keep the heartbeat until the rank ends or says that it needs it no more."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the rank decides what they do
        signal.signal(number, signal.SIG_IGN)
    lines = control.makefile("rb")
    words = json.loads(lines.readline())
    links = {int(rank): socket.socket(fileno=number) for rank, number in words["links"].items()}
    rank = Rank(control, words["me"], words["pid"], words["main"])
    peers = [Peer(*peer) for peer in words["peers"]]
    heart = Heartbeat(peers, words["me"], links, words["limit_s"], rank)
    rank.beat_s = heart.beat_s
    heart.start()
    with suppress(OSError):
        control.sendall(READY)
    try:
        for line in lines:
            _take(json.loads(line), rank, heart)
    except OSError:  # the rank has ended with something unread
        pass
    finally:
        heart.stop()


def _take(message: dict[str, Any], rank: Rank, heart: Heartbeat) -> None:
    if "status" in message:
        rank.report(Status(**message["status"]))
    elif "left" in message:
        heart.leave()
    elif "raised" in message:
        heart.raised(message["raised"])
    elif "cause" in message:  # which may take seconds

        def answer() -> None:
            rank.send({"cause": heart.cause(message["cause"])})

        threading.Thread(target=answer, daemon=True).start()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # threads and buffers have nothing more to do
