"""A small process beside each rank: who of the job is still there, and is anybody lost?

Every second it tells the one beside rank 0 what its rank does, and rank 0's passes news on::

    rank 1  --- "I am here, and wait" --->  rank 0  --- "rank 2 was killed" --->  rank 3

The kernel closes the connections of a process that dies, however it dies, so that is known at
once. A process that is stopped, a host that is down and a link that is cut are lost after a limit.

It is a process because some calls into C++ keep Python's lock while they wait. Horovod's do so
with dynamic process sets: its own thread holds a lock while it asks all ranks for new sets, and
every call that sends takes that lock. With one rank stopped, no thread of the others runs Python.
This process still does: it sees in /proc that its rank sleeps and is not stopped, and ends it for
a lost one. It imports only the standard library, and ends with its rank.
"""

from __future__ import annotations

import json
import os
import resource
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # started by this file's path: let the package be found, and that alone
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from hvd_pipe.runtime.watch.rendezvous import accept, connect, listen
from hvd_pipe.runtime.watch.waits import Activity, activity

FIRST = 0
"""The rank that all others are connected to."""

END = b"e"
EXPLAINED = b"x"
"""What this process says to its rank while it watches."""

BEAT_S = 1.0
RANKS_A_SECOND = 100  # rank 0 hears of at most so many: larger jobs beat more slowly
WAITED = 0.25  # of the limit: a rank that has waited for so long may be ended
MISSED = 3  # beats without a report: a rank runs no Python, or is silent
LONGEST = 1 << 16  # bytes of a message
SAY_S = 1.0
SPARE_FILES = 64  # beside the connections to other ranks

_ASLEEP_TICKS = 1  # of 10 ms, that a sleeping thread takes in a beat to ask for Python's lock
_STOPPED = "it is stopped, by a signal (SIGSTOP, Ctrl-Z) or by a debugger."
_SILENT = "it is stopped, its host is down, or the link to it is cut."
_ENDED = (
    "{} ended without a word: it was killed (by hand, or for memory), it crashed, its host is "
    "down, or the link to it is cut."
)
_LEFT = (
    "{} has ended without an exception: its script was over, or called sys.exit() or "
    "hvd.shutdown() (unless it has said itself that it can no longer hear of others). Give every "
    "rank as many steps."
)


@dataclass(frozen=True)
class Status:
    """What a rank does."""

    waits: bool = False  # for other ranks
    since_s: float = 0.0  # it has waited for one message, or not waited
    busy: bool = False  # a thread that it would not end without works: it writes a checkpoint, say
    stopped: bool = False
    left: bool = False


Silence = tuple[float, int, bool]
"""For how many seconds a rank has not run, which, and whether its host says that it is stopped."""


class AwakeClock:
    """Seconds in which this process and its rank ran.

    Those in which one of them was stopped, or suspended with its machine, are left out: a job that
    is stopped as a whole, and continued, must find nobody silent.
    """

    def __init__(self, most_s: float) -> None:
        self.now = 0.0
        self._most, self._last = most_s, time.monotonic()

    def tick(self, counts: bool = True) -> None:
        """Look at the time; to be called more often than every ``most_s`` seconds."""
        last, self._last = self._last, time.monotonic()
        if counts:
            self.now += min(self._last - last, self._most)


def beat_s(ranks: int, limit_s: float) -> float:
    """Return the seconds between two messages of a rank.

    >>> beat_s(2, 120.0), beat_s(1000, 120.0), beat_s(2, 4.0)
    (1.0, 10.0, 0.5)
    """
    return min(max(BEAT_S, ranks / RANKS_A_SECOND), limit_s / 8)


def encode(message: object) -> bytes:
    """Return a message as it travels: once for all ranks that it goes to."""
    return json.dumps(message).encode() + b"\n"


def say(text: str) -> None:
    """Tell the user; not for longer than a moment, where a terminal is paused."""
    with suppress(OSError):  # nobody may be reading any more
        if select.select([], [2], [], SAY_S)[1]:
            os.write(2, f"hvd_pipe: {text}\n".encode()[: select.PIPE_BUF])


class Link:
    """A connection to the process beside another rank, or to this process's own rank."""

    def __init__(self, rank: int, connected: socket.socket) -> None:
        self.rank, self.socket = rank, connected
        self.status, self.heard_at = Status(), 0.0
        self._rest = self._unsent = b""
        connected.setblocking(False)

    def send(self, message: bytes) -> None:
        """Send as much as the network takes now; the rest goes with the next message."""
        if len(self._unsent) < LONGEST:  # a link that is cut takes nothing: do not queue
            self._unsent += message
        with suppress(OSError):  # `receive` meets it, too
            self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def receive(self) -> list[dict[str, Any]]:
        """Return what has come; OSError where the connection is closed."""
        try:
            data = self.socket.recv(LONGEST)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Rank:
    """The rank that this process belongs to, as it looks from outside."""

    def __init__(self, control: socket.socket, number: int, pid: int, main: int) -> None:
        self.control, self.beat_s = Link(number, control), BEAT_S
        self._pid, self._main = pid, main
        self._status = Status()
        self._reported = self._rested = time.monotonic()
        self._activity: Activity | None = None
        self._told_to_end = False

    def report(self, status: Status) -> None:
        """Take down what the rank says of itself."""
        self._status, self._reported = status, time.monotonic()

    def status(self) -> Status:
        """Return what it has said last, or, where it runs no Python, what Linux says.

        A thread that was busy still counts: it may be what keeps the interpreter's lock.
        """
        now, before = time.monotonic(), self._activity
        current = self._activity = activity(self._pid, self._main)
        reports = now - self._reported <= MISSED * self.beat_s
        if current is None or current.state in "Tt":
            return replace(self._status, stopped=current is not None or not reports)
        asleep = (
            before is not None
            and current.state == "S"
            and current.ticks - before.ticks <= _ASLEEP_TICKS
        )
        if reports or not asleep:
            self._rested = now
        if reports:
            return self._status
        since = self._rested if asleep else self._reported
        return replace(self._status, waits=asleep, since_s=now - since)

    def is_gone(self) -> bool:
        """Whether it has ended: a process that it has forked may keep the connection open."""
        return os.getppid() != self._pid

    def end(self, text: str) -> None:
        """Have the rank end itself; end it from here where it has not done so by the next beat."""
        if self._told_to_end:
            self._kill()
            return
        self._told_to_end = True
        say(f"rank {self.control.rank} ends, as it waits for a rank that is lost: {text}")
        self.control.send(END)

    def end_stopped(self, text: str) -> None:
        """End the rank where a signal has stopped it; one in a debugger is left to that."""
        if self._activity is not None and self._activity.state == "T":
            say(f"rank {self.control.rank} is ended, as the others have ended: {text}")
            self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # no other signal reaches a process that stands still
            os.kill(self._pid, signal.SIGKILL)


class Watcher:
    """Exchanges heartbeats for its rank; a rank that is silent for the limit counts as lost.

    Each message has all that its sender knows, so a later one replaces an earlier one.
    """

    def __init__(
        self, names: Sequence[str], links: Mapping[int, socket.socket], limit_s: float, rank: Rank
    ) -> None:
        self.names, self.me, self.limit_s = names, rank.control.rank, limit_s
        self.beat_s = rank.beat_s = beat_s(len(names), limit_s)
        self.clock = AwakeClock(2 * self.beat_s)
        self._rank, self._status, self._leaves = rank, Status(), False
        self._links = {one: Link(one, link) for one, link in links.items()}
        self._loss: tuple[int, str] | None = None  # the first: the cause of what follows
        self._left: int | None = None  # the first that has left, and was not lost
        self._silence: Silence | None = None  # the longest
        self._may_end: float | None = None
        self._explain_at: float | None = None
        self._selector = selectors.DefaultSelector()
        for link in (rank.control, *self._links.values()):
            self._selector.register(link.socket, selectors.EVENT_READ, link)

    def run(self) -> None:
        """Watch until the rank ends or says that it needs this no more."""
        try:
            self._loop()
        except Exception as error:  # a mistake in here must not look like a rank that is lost
            self._leaves = True
            self._send()
            say(f"{self.names[self.me]} can no longer hear of others: {error!r}")

    def _loop(self) -> None:
        due = time.monotonic() + self.beat_s
        while True:
            until = due if self._explain_at is None else min(due, self._explain_at)
            events = self._selector.select(max(until - time.monotonic(), 0.0))
            self.clock.tick(counts=not self._status.stopped)
            known = self._loss, self._left
            for key, _ in events:
                if key.data is not self._rank.control:
                    self._hear(key.data)
                elif not self._obey():
                    return
            if self.me == FIRST and (self._loss, self._left) != known:
                self._send()  # once, where many leave
            self._explain()
            if time.monotonic() >= due:
                if self._rank.is_gone():
                    return
                due = time.monotonic() + self.beat_s
                self._beat()
                self._judge()

    # The rank.

    def _obey(self) -> bool:
        """Do as the rank says; return whether it is still there."""
        try:
            messages = self._rank.control.receive()
        except OSError:
            return False
        for message in messages:
            if "status" in message:
                self._rank.report(Status(**message["status"]))
            elif "explain" in message:
                self._explain_at = time.monotonic() + message["explain"]
            else:  # at once: the process may end next
                self._leaves = "left" in message
                if "raised" in message:
                    self._lose(self.me, f"{self.names[self.me]} raised {message['raised']}")
                self._send()
        return True

    def _explain(self) -> None:
        """Say what has become of another rank, if that is asked for and known, or time is up."""
        if self._explain_at is None:
            return
        is_known = self._left is not None or self._find_loss(self.limit_s) is not None
        if not is_known and time.monotonic() < self._explain_at:
            return
        cause = None
        if loss := self._find_loss(0.0):
            cause = loss[1]
        elif self._loss is not None:
            cause = f"the others have given this rank up: {self._loss[1]}"
        elif self._left is not None:
            cause = _LEFT.format(self.names[self._left])
        if cause is not None:
            say(f"rank {self.me} failed because of another: {cause}")
        self._rank.control.send(EXPLAINED)
        self._explain_at = None

    # The others.

    def _send(self) -> None:
        """Tell the others all that this process knows."""
        # The first rank is busy for all: a launcher ends all ranks with the first that ends.
        busy = self._is_busy() if self.me == FIRST else self._status.busy
        message = {
            "status": asdict(replace(self._status, busy=busy, left=self._leaves)),
            "loss": self._loss,
            "left": self._left,
            "silence": self._silence,
        }
        data = encode(message)
        for link in self._links.values():
            link.send(data)

    def _beat(self) -> None:
        self._status = self._rank.status()
        silences = [
            (self.clock.now - link.heard_at, link.rank, link.status.stopped)
            for link in self._links.values()
            if not (self._hears(link) or link.status.left)
        ]
        if self.me == FIRST or silences:
            self._silence = max(silences, default=None)
        self._send()

    def _hears(self, link: Link) -> bool:
        return self.clock.now - link.heard_at <= MISSED * self.beat_s

    def _is_busy(self) -> bool:
        """Whether a rank, of those that this one hears of, has a thread at work."""
        heard = (link.status.busy and self._hears(link) for link in self._links.values())
        return self._status.busy or any(heard)

    def _hear(self, link: Link) -> None:
        try:
            messages = link.receive()
        except (OSError, ValueError):
            self._selector.unregister(link.socket)
            del self._links[link.rank]
            if not link.status.left:
                self._lose(link.rank, _ENDED.format(self.names[link.rank]))
            return
        for message in messages:
            link.status = Status(**message["status"])
            if not link.status.stopped:
                link.heard_at = self.clock.now
            if message["loss"]:
                self._lose(*message["loss"])
            left = link.rank if link.status.left else message["left"]
            if self._left is None and left != self.me:
                self._left = left
            if link.rank == FIRST and not link.status.stopped:  # or it would hide its own
                silence = message["silence"]
                self._silence = silence if silence and silence[1] != self.me else None

    def _lose(self, rank: int, how: str) -> None:
        self._loss = self._loss or (rank, how)

    # Is anybody lost?

    def _judge(self) -> None:
        waits = self._status.waits and self._status.since_s > WAITED * self.limit_s
        loss = self._find_loss(self.limit_s)
        if self._status.stopped:
            if self._loss is not None and self._loss[0] == self.me and not self._links:
                # No launcher ends it where Gloo's ssh has ended before it.
                self._rank.end_stopped(self._loss[1])
        elif loss is None:
            self._may_end = None
        elif waits and not self._delays_exit(loss[1]):
            # Or the others would take this rank's end, and the next one's, for the cause.
            self._lose(*loss)
            self._send()
            self._rank.end(loss[1])

    def _find_loss(self, silence_s: float) -> tuple[int, str] | None:
        """Return the rank that was lost first, or silent for longer, and what has become of it."""
        if self._loss is not None and self._loss[0] != self.me:
            return self._loss
        seconds, rank, stopped = self._silence or (0.0, FIRST, False)
        if seconds <= silence_s:
            return None
        why = _STOPPED if stopped else _SILENT
        return rank, f"{self.names[rank]} has been silent for {seconds:.0f} s: {why}"

    def _delays_exit(self, how: str) -> bool:
        """Whether this rank lets threads finish before it ends; not for longer than the limit."""
        if not self._is_busy():
            return False
        if self._may_end is None:
            self._may_end = self.clock.now + self.limit_s
            say(
                f"rank {self.me} waits for a rank that is lost: {how} It ends when other threads, "
                f"here or on other ranks, have finished their work, in {self.limit_s:.0f} s at "
                "the latest (HVD_PIPE_TIMEOUT)."
            )
        return self.clock.now < self._may_end


def main(control: socket.socket) -> None:
    """Connect to the others, and watch them, for the rank that has started this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the rank decides what they do
        signal.signal(number, signal.SIG_IGN)
    lines = control.makefile("rb")
    words = json.loads(lines.readline())
    own, secret = words["rank"], words["secret"]
    if own == FIRST:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        listening = listen(words["address"])
        lacks_files = 0 <= most < words["ranks"] + SPARE_FILES
        control.sendall(encode(None if lacks_files else listening.getsockname()[1]))
        links = accept(listening, secret, control)
    else:
        link = connect(words["addresses"], secret, own)
        control.sendall(encode(link is not None))
        links = {} if link is None else {FIRST: link}
    line = lines.readline()
    if line:
        names = json.loads(line)
        for rank in [rank for rank in links if not names[rank]]:
            links.pop(rank).close()  # it had given up before it was let in
        seen = Rank(control, own, words["pid"], words["main"])
        watcher = Watcher(names, links, words["limit_s"], seen)
        seen.control.send(encode(True))
        watcher.run()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # buffers have nothing more to do
