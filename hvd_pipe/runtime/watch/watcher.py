"""A small process beside each rank: who of the job is still there, and is anybody lost?

Every second it tells the one beside rank 0 what its rank does, and rank 0's passes news on::

    rank 1  --- "I am here, at data.py:57" --->  rank 0  --- "rank 2 was killed" --->  rank 3

The kernel closes the connections of a process that dies, however it dies, so that is known at
once. A process that is stopped, a host that is down and a link that is cut are lost after a limit.

It is a process because some calls into C++ keep Python's lock while they wait. Horovod's do so
with dynamic process sets: its own thread holds a lock while it asks all ranks for new sets, and
every call that sends takes that lock. With one rank stopped, no thread of the others runs Python.
This process still does: it sees in /proc that its rank sleeps and is not stopped, and ends it for
a lost one. It imports only the standard library, and ends with its rank.
"""

from __future__ import annotations

import heapq
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # started by this file's path: let the package be found, and that alone
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from hvd_pipe.runtime.watch.waits import Activity, activity

READY = b"\n"
"""What this process says first: from then on the others hear of its rank."""

FIRST = 0
"""The rank that all others are connected to."""

BEAT_S = 1.0
RANKS_A_SECOND = 100  # rank 0 hears of at most so many: larger jobs beat more slowly
MOST_SILENT = 16  # so many silent ranks are told to the others: the longest silent
WAITED = 0.25  # of the limit: a rank that has waited for so long may be ended
MISSED = 3  # beats without a report: the rank runs no Python
LONGEST = 1 << 16  # bytes of a message
SAY_S = 1.0

_ASLEEP_TICKS = 1  # of 10 ms, that a sleeping thread takes in a beat to ask for Python's lock
_STOPPED = "it is stopped, by a signal (SIGSTOP, Ctrl-Z) or by a debugger."
_SILENT = "it is stopped, its host is down, or the link to it is cut."
_ENDED = (
    "{} ended without a word: it was killed (by hand, or for memory), it crashed, its host is "
    "down, or the link to it is cut."
)


@dataclass(frozen=True)
class Peer:
    """A rank, as messages name it."""

    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


@dataclass(frozen=True)
class Status:
    """What a rank does: the line that its script is at, and whether it waits for other ranks.

    ``since_s`` is for how long it has waited for one message, or not waited. ``busy`` says that a
    thread that it would not end without, such as one that writes a checkpoint, is at work.
    """

    where: str = ""
    waits: bool = False
    since_s: float = 0.0
    busy: bool = False


class Silence(NamedTuple):
    """How long a rank has not run, where its script was then, and whether its host says why."""

    seconds: float
    where: str
    stopped: bool


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


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as it travels: once for all ranks that it goes to."""
    return json.dumps(message).encode() + b"\n"


class Link:
    """A connection to the process beside another rank, or to this process's own rank."""

    def __init__(self, rank: int, connected: socket.socket, now: float = 0.0) -> None:
        self.rank, self.socket = rank, connected
        self.heard_at = now
        self.status = Status()
        self.stopped = False
        self._rest = self._unsent = b""
        connected.setblocking(False)

    def send(self, messages: bytes) -> None:
        """Send as much as the network takes now; the rest goes with the next messages."""
        if len(self._unsent) < LONGEST:  # a link that is cut takes nothing: do not queue
            self._unsent += messages
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
        return [json.loads(line) for line in lines if line]


class Rank:
    """The rank that this process belongs to, as it looks from outside."""

    def __init__(self, control: socket.socket, number: int, pid: int, main: int) -> None:
        self.control = Link(number, control)
        self.beat_s = BEAT_S
        self._pid, self._main = pid, main
        self._status = Status()
        self._reported = self._rested = time.monotonic()
        self._activity: Activity | None = None
        self._told_to_end = False

    def report(self, status: Status) -> None:
        """Take down what the rank says of itself."""
        self._status, self._reported = status, time.monotonic()

    def is_gone(self) -> bool:
        """Whether it has ended: what it has forked may keep the connection open."""
        return os.getppid() != self._pid

    def is_stopped(self) -> bool:
        """Whether nothing of it can run; where nobody knows, whether it does not report."""
        current = activity(self._pid, self._main)
        return not self._reports() if current is None else current.state in "Tt"

    def status(self) -> Status:
        """Return what it has said last, or, where it runs no Python, what Linux says.

        A thread that was busy still counts: it may be what keeps the interpreter's lock.
        """
        now, before = time.monotonic(), self._activity
        seen = self._activity = activity(self._pid, self._main)
        asleep = (
            before is not None
            and seen is not None
            and seen.state == "S"
            and seen.ticks - before.ticks <= _ASLEEP_TICKS
        )
        if self._reports() or not asleep:
            self._rested = now
        if self._reports():
            return self._status
        since = self._rested if asleep else self._reported
        return replace(self._status, waits=asleep, since_s=now - since)

    def say(self, text: str) -> None:
        """Tell the user; not for longer than a moment, where a terminal is paused."""
        writer = threading.Thread(target=_write, args=(f"hvd_pipe: {text}\n",), daemon=True)
        writer.start()
        writer.join(SAY_S)

    def end(self, text: str) -> None:
        """Have the rank end itself; end it from here where it runs no Python."""
        if not self._reports():
            self.say(f"rank {self.control.rank} ends, as it waits for a rank that is lost: {text}")
            self._kill()
        elif not self._told_to_end:
            self._told_to_end = True
            self.control.send(encode({"end": text}))

    def end_stopped(self, text: str) -> None:
        """End the rank where a signal has stopped it; one in a debugger is left to that."""
        current = activity(self._pid, self._main)
        if current is not None and current.state == "T":
            self.say(f"rank {self.control.rank} is ended, as {text}")
            self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # no other signal reaches a process that stands still
            os.kill(self._pid, signal.SIGKILL)

    def _reports(self) -> bool:
        return time.monotonic() - self._reported <= MISSED * self.beat_s


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody may be reading any more
        sys.stderr.write(text)
        sys.stderr.flush()


class Watcher:
    """Hears of the other ranks, and tells them of its own; a rank may be silent for a limit."""

    def __init__(
        self, peers: Sequence[Peer], links: Mapping[int, socket.socket], limit_s: float, rank: Rank
    ) -> None:
        self.peers, self.me, self.limit_s = peers, rank.control.rank, limit_s
        self.beat_s = rank.beat_s = beat_s(len(peers), limit_s)
        self.clock = AwakeClock(2 * self.beat_s)
        self._rank = rank
        self._status = Status()
        self._is_stopped = self._first_is_busy = False
        self._links = {one: Link(one, link, self.clock.now) for one, link in links.items()}
        self._silent: dict[int, Silence] = {}
        self._left: dict[int, None] = {}  # as a set that keeps its order
        self._lost: dict[int, str] = {}  # the first is the cause of what follows
        self._news = b""  # what the first rank has heard and not passed on yet
        self._may_end: float | None = None
        self._asked_until: float | None = None
        self._selector = selectors.DefaultSelector()
        for link in (rank.control, *self._links.values()):
            self._selector.register(link.socket, selectors.EVENT_READ, link)

    def run(self) -> None:
        """Watch until the rank ends or says that it needs this no more."""
        links = list(self._links.values())
        try:
            self._loop()
        except Exception as error:  # a mistake in here must not look like a rank that is lost
            self._tell({"left": self.me})
            self._rank.say(f"{self.peers[self.me]} can no longer hear of others: {error!r}")
        finally:
            for link in links:  # a process that the rank has forked may hold them open
                with suppress(OSError):
                    link.socket.shutdown(socket.SHUT_RDWR)

    def _loop(self) -> None:
        due = self.beat_s
        while True:
            begun = time.monotonic()
            wait_s = due
            if self._asked_until is not None:
                wait_s = min(due, max(self._asked_until - begun, 0.0))
            events = self._selector.select(wait_s)
            due -= time.monotonic() - begun
            self.clock.tick(counts=not self._is_stopped)
            for key, _ in events:
                if key.data is not self._rank.control:
                    self._hear(key.data)
                elif not self._obey():
                    return
            self._pass_on()
            self._answer()
            if due > 0:
                continue
            due = self.beat_s
            if self._rank.is_gone():
                return
            self._is_stopped = self._rank.is_stopped()
            if not self._is_stopped:
                self._beat()
                self._judge()
                continue
            self._send(encode({"stopped": True}))
            if self.me in self._lost and not self._links:
                # No launcher ends it where Gloo's ssh has ended before it.
                self._rank.end_stopped(f"the others have ended: {self._lost[self.me]}")

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
            elif "left" in message:
                self._tell({"left": self.me})
            elif "raised" in message:
                how = f"{self.peers[self.me]} raised {message['raised']}"
                self._tell({"lost": self.me, "how": how})
            elif "cause" in message:
                self._asked_until = time.monotonic() + message["cause"]
        return True

    def _answer(self) -> None:
        """Say what has become of another rank, if that is asked for and known, or time is up."""
        if self._asked_until is None:
            return
        if self._loss(self.limit_s) or self._left or time.monotonic() >= self._asked_until:
            self._asked_until = None
            self._rank.control.send(encode({"cause": self._cause()}))

    def _cause(self) -> str | None:
        loss = self._loss(0.0)
        if loss is not None:
            return loss[1]
        if self.me in self._lost:
            return f"the others have given this rank up: {self._lost[self.me]}"
        for rank in self._left:  # the first
            return (
                f"{self.peers[rank]} has ended without an exception: its script was "
                "over, or called sys.exit() or hvd.shutdown() (unless it has said itself that "
                "it can no longer hear of others). Give every rank as many steps."
            )
        return None

    # The others.

    def _send(self, messages: bytes) -> None:
        for link in self._links.values():
            link.send(messages)

    def _beat(self) -> None:
        self._status = self._rank.status()
        message: dict[str, Any] = {"status": asdict(self._status)}
        silent = {
            link.rank: Silence(
                round(self.clock.now - link.heard_at, 1), link.status.where, link.stopped
            )
            for link in self._links.values()
            if self.clock.now - link.heard_at > 3 * self.beat_s and link.rank not in self._left
        }
        if self.me == FIRST:
            # Where a network has been cut into halves, half of all ranks are silent.
            message["silent"] = heapq.nlargest(MOST_SILENT, silent.items(), lambda one: one[1])
            message["busy"] = self._someone_is_busy()
        if self.me == FIRST or silent:
            self._silent = silent
        self._send(encode(message))

    def _hear(self, link: Link) -> None:
        try:
            messages = link.receive()
        except (OSError, ValueError):
            self._selector.unregister(link.socket)
            del self._links[link.rank]
            if link.rank not in self._left:
                self._record({"lost": link.rank, "how": _ENDED.format(self.peers[link.rank])})
            return
        for message in messages:
            link.stopped = "stopped" in message
            if not link.stopped:
                link.heard_at = self.clock.now
            if "status" in message:
                link.status = Status(**message["status"])
            if "silent" in message:
                silent = {rank: Silence(*silence) for rank, silence in message["silent"]}
                self._silent = {rank: one for rank, one in silent.items() if rank != self.me}
                self._first_is_busy = message["busy"]
            self._record(message)

    def _record(self, message: Mapping[str, Any]) -> None:
        """Record the loss or the exit of a rank; the first rank queues it for the others."""
        left = "left" in message and message["left"] not in self._left
        lost = "lost" in message and message["lost"] not in self._lost
        if left:
            self._left[message["left"]] = None
        if lost:
            self._lost[message["lost"]] = message["how"]
        if (left or lost) and self.me == FIRST:
            self._news += encode(message)

    def _pass_on(self) -> None:
        """Send the first rank's queued news to the others, all in one message."""
        news, self._news = self._news, b""
        if news:
            self._send(news)

    def _tell(self, message: Mapping[str, Any]) -> None:
        """Record the fate of this rank, and send it at once: the process may end next."""
        self._record(message)
        if self.me == FIRST:
            self._pass_on()
        else:
            self._send(encode(message))

    # Is anybody lost?

    def _judge(self) -> None:
        loss = self._loss(self.limit_s)
        if loss is None:
            self._may_end = None
        elif self._status.waits and self._status.since_s > WAITED * self.limit_s:
            lost, how = loss
            if self._delays_exit(how):
                return
            # Or the others would take this rank's end, and the next one's, for the cause.
            self._tell({"left": self.me, "lost": lost, "how": how})
            self._rank.end(how)

    def _loss(self, silence_s: float) -> tuple[int, str] | None:
        """Return the rank that was lost first, or silent for longer, and what has become of it."""
        for rank, how in self._lost.items():
            if rank != self.me:
                return rank, how
        if not self._silent:
            return None
        rank = max(self._silent, key=lambda one: self._silent[one].seconds)
        return (rank, self._describe(rank)) if self._silent[rank].seconds > silence_s else None

    def _describe(self, rank: int) -> str:
        seconds, where, stopped = self._silent[rank]
        last = f", last seen at {where}" if where else ""
        why = _STOPPED if stopped else _SILENT
        return f"{self.peers[rank]} has been silent for {seconds:.0f} s{last}: {why}"

    def _someone_is_busy(self) -> bool:
        """Whether a rank has a thread at work: the launcher ends all with the first that ends."""
        talking = {rank: link for rank, link in self._links.items() if rank not in self._silent}
        if self._first_is_busy and FIRST in talking:
            return True
        return any(one.busy for one in (self._status, *(link.status for link in talking.values())))

    def _delays_exit(self, how: str) -> bool:
        """Whether this rank lets threads finish before it ends; not for longer than the limit."""
        if self._may_end is None:
            if not self._someone_is_busy():
                return False
            self._may_end = self.clock.now + self.limit_s
            self._rank.say(
                f"rank {self.me} waits for a rank that is lost: {how} It ends when other threads, "
                f"here or on other ranks, have finished their work, in {self.limit_s:.0f} s at "
                "the latest (HVD_PIPE_TIMEOUT)."
            )
        return self._someone_is_busy() and self.clock.now < self._may_end


def main(control: socket.socket) -> None:
    """Watch for the rank that has started this process, and that says what there is to watch."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the rank decides what they do
        signal.signal(number, signal.SIG_IGN)
    words = json.loads(control.makefile("rb").readline())
    links = {int(rank): socket.socket(fileno=number) for rank, number in words["links"].items()}
    rank = Rank(control, words["me"], words["pid"], words["main"])
    watcher = Watcher([Peer(*peer) for peer in words["peers"]], links, words["limit_s"], rank)
    rank.control.send(READY)
    watcher.run()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # buffers have nothing more to do
