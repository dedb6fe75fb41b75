"""Who of a job is still there: a small message a second between the first rank and each other.

    rank 1  --- "I am here, at data.py:57" --->  rank 0  --- "rank 2 was killed" --->  rank 3

The kernel closes the connections of a process that dies, however it dies, so that is known at
once. A process that is stopped, a host that is down and a link that is cut are known as lost after
a limit. This module knows nothing of Horovod: it is given connected sockets. It runs in a process
of its own, `hvd_pipe.runtime.watch.child`.
"""

from __future__ import annotations

import errno
import heapq
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

from hvd_pipe.runtime.watch.link import Link, Peer, Status, encode

__all__ = [
    "FIRST",
    "AwakeClock",
    "Heartbeat",
    "Process",
    "SeenProcess",
    "beat_s",
]

FIRST = 0
"""The rank that all others are connected to."""
BEAT_S = 1.0
RANKS_A_SECOND = 100  # the first rank hears of so many at most: larger jobs beat more slowly
MOST_SILENT = 16  # of silent ranks, so many are named, and told to the others: the longest
WARN = 0.25  # of the limit: who has been silent for so long is named


class Process(Protocol):
    """What is asked of a process that is watched."""

    def status(self) -> Status:
        """Return what it is doing."""

    def say(self, text: str) -> None:
        """Tell the user."""

    def end(self, text: str) -> None:
        """End the process, which would wait for ever; ``text`` says for whom."""


class SeenProcess(Process, Protocol):
    """What the heartbeat asks of the process that it belongs to: it looks from outside."""

    def is_stopped(self) -> bool:
        """Whether it cannot run: a signal or a debugger has stopped it."""

    def end_stopped(self, text: str) -> None:
        """End a process that a signal has stopped; ``text`` says why nobody waits for it."""


class AwakeClock:
    """Seconds in which this process and the rank that it belongs to ran.

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


class Silence(NamedTuple):
    """How long a rank has not run, as far as others know, and where its script was then."""

    seconds: float
    where: str
    stopped: bool
    """Whether its host is there, and says that the process is stopped."""


class Heartbeat:
    """One process's side: a thread that hears of the others, and tells them of this one.

    Args:
        peers: All ranks, in their order.
        me: This process's rank.
        links: Connected sockets by rank: to all others on the first rank, to that one elsewhere.
        limit_s: How long a rank may be silent.
        process: This process.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        me: int,
        links: Mapping[int, socket.socket],
        limit_s: float,
        process: SeenProcess,
    ) -> None:
        self.peers, self.me, self.limit_s, self._process = peers, me, limit_s, process
        self._status = Status()
        self.beat_s = beat_s(len(peers), limit_s)
        self._is_stopped = False
        self._first_is_busy = False
        self._may_end: float | None = None
        self._clock = AwakeClock(2 * self.beat_s)
        self._sockets = list(links.values())
        self._links = {rank: Link(rank, one, self._clock.now) for rank, one in links.items()}
        self._silent: dict[int, Silence] = {}
        self._left: dict[int, None] = {}  # as a set that keeps its order
        self._lost: dict[int, str] = {}  # the first is the cause of what follows
        self._news = b""  # what the first rank has heard and not passed on yet
        self._kept_waiting: set[int] = set()
        self._all_wait = False
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="hvd_pipe heartbeat", daemon=True)
        self._selector = selectors.DefaultSelector()
        for link in self._links.values():
            self._selector.register(link.socket, selectors.EVENT_READ, link)

    def start(self) -> None:
        """Begin to tell and to hear."""
        self._thread.start()

    def stop(self) -> None:
        """Tell and hear nothing more; the others take it that this rank has left, or is lost.

        Connections are shut down, as a process that the rank has forked may hold them open.
        """
        self._stopped = True  # first: what this side closes must not look like a rank that is lost
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # which wakes the thread up

    # What the process says of itself.

    def leave(self) -> None:
        """Tell the others that this rank goes, and that nothing is wrong."""
        self._tell({"left": self.me})

    def raised(self, what: str) -> None:
        """Tell the others that this rank ends by an exception."""
        self._tell({"lost": self.me, "how": f"{self.peers[self.me]} raised {what}"})

    def cause(self, patience_s: float) -> str | None:
        """Return what has become of another rank, when communication has failed; None: nothing."""
        with self._changed:
            self._changed.wait_for(lambda: self._loss(self.limit_s) or self._left, patience_s)
            found = self._loss(0.0)
            if found is not None:
                return found[1]
            if self.me in self._lost:
                return f"the others have given this rank up: {self._lost[self.me]}"
            for rank in self._left:  # the first
                return (
                    f"{self.peers[rank]} has ended without an exception: its script was "
                    "over, or called sys.exit() or hvd.shutdown() (unless it has said itself that "
                    "it can no longer hear of others). Give every rank as many steps."
                )
            return None

    # Within; all of it in the thread.

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # a mistake in here must not look like a rank that is lost
            self.leave()
            self._process.say(f"{self.peers[self.me]} can no longer hear of others: {error!r}")

    def _loop(self) -> None:
        due = 0.0
        while not self._stopped:
            due = due if due > 0 else self.beat_s
            begun = time.monotonic()
            events = self._selector.select(due)
            due -= time.monotonic() - begun
            self._clock.tick(counts=not self._is_stopped)
            if self._stopped:
                return
            for key, _ in events:
                self._hear(key.data)
            self._pass_on()
            if due > 0:
                continue
            self._is_stopped = self._process.is_stopped()
            if self._is_stopped:
                self._send({"stopped": True})
                if self.me in self._lost and not self._links:
                    # No launcher ends it where Gloo's ssh has ended before it.
                    self._process.end_stopped(f"the others have ended: {self._lost[self.me]}")
            else:
                self._beat()
                self._judge()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._send_all(encode(message))

    def _send_all(self, messages: bytes) -> None:
        for link in list(self._links.values()):
            link.send(messages)

    def _beat(self) -> None:
        self._status = self._process.status()
        message: dict[str, Any] = {"status": asdict(self._status)}
        silent = {
            link.rank: Silence(
                round(self._clock.now - link.heard, 1), link.status.where, link.stopped
            )
            for link in self._links.values()
            if self._clock.now - link.heard > 3 * self.beat_s and link.rank not in self._left
        }
        if self.me == FIRST:
            # Where a network has been cut into halves, half of all ranks are silent.
            message["silent"] = heapq.nlargest(MOST_SILENT, silent.items(), lambda one: one[1])
            message["busy"] = self._someone_is_busy()
        if self.me == FIRST or silent:
            self._silent = silent
        self._send(message)

    def _hear(self, link: Link) -> None:
        try:
            messages = link.receive()
        except (OSError, ValueError) as error:
            self._selector.unregister(link.socket)
            del self._links[link.rank]
            if link.rank not in self._left:
                cut = isinstance(error, OSError) and error.errno in _CUT
                how = (_UNREACHABLE if cut else _ENDED).format(self.peers[link.rank])
                self._note({"lost": link.rank, "how": how})
            return
        for message in messages:
            link.stopped = "stopped" in message
            if not link.stopped:
                link.heard, link.warned = self._clock.now, False
            if "status" in message:
                link.status = Status(**message["status"])
            if "silent" in message:
                silent = {rank: Silence(*silence) for rank, silence in message["silent"]}
                self._silent = {rank: one for rank, one in silent.items() if rank != self.me}
                self._first_is_busy = message["busy"]
            self._note(message)

    def _note(self, message: Mapping[str, Any]) -> None:
        """Take down what has become of a rank; the first rank is to pass it on."""
        with self._changed:
            left = "left" in message and message["left"] not in self._left
            lost = "lost" in message and message["lost"] not in self._lost
            if left:
                self._left[message["left"]] = None
            if lost:
                self._lost[message["lost"]] = message["how"]
            if not (left or lost):
                return
            self._changed.notify_all()
            if self.me == FIRST:
                self._news += encode(message)

    def _pass_on(self) -> None:
        """Tell the others what the first rank has heard; what came at once goes in one sending."""
        with self._changed:
            news, self._news = self._news, b""
        if news:
            self._send_all(news)

    def _tell(self, message: Mapping[str, Any]) -> None:
        """Take down what has become of this rank; from any thread, as it may be the last word."""
        self._note(message)
        if self.me == FIRST:
            self._pass_on()
        else:
            self._send(message)

    def _judge(self) -> None:
        self._warn()
        loss = self._loss(self.limit_s)
        if loss is None:
            self._may_end = None
        if loss and self._status.waits and self._status.since_s > WARN * self.limit_s:
            lost, how = loss
            if self._holds_on(how):
                return
            # Or the others would take this rank's end, and the next one's, for the cause.
            self._tell({"left": self.me, "lost": lost, "how": how})
            self._process.end(how)
        if self.me == FIRST:
            self._name_the_slow()

    def _warn(self) -> None:
        """Name ranks that have been silent for long, each once; of many, some."""
        late = WARN * self.limit_s
        links = [
            link
            for link in self._links.values()
            if not link.warned and link.rank in self._silent
            if self._silent[link.rank].seconds > late
        ]
        for at, link in enumerate(links):
            link.warned = True
            if at < MOST_SILENT:
                self._process.say(
                    f"{self._describe(link.rank, self._silent[link.rank])} Ranks that wait for it "
                    f"end after {self.limit_s:.0f} s (HVD_PIPE_TIMEOUT sets that; 0: never)."
                )
        if len(links) > MOST_SILENT:
            self._process.say(f"{len(links) - MOST_SILENT} more ranks are as silent.")

    def _someone_is_busy(self) -> bool:
        """Whether a rank has a thread at work: the launcher ends all with the first that ends."""
        heard = {rank: link for rank, link in self._links.items() if rank not in self._silent}
        if self._first_is_busy and FIRST in heard:
            return True
        return any(one.busy for one in (self._status, *(link.status for link in heard.values())))

    def _holds_on(self, how: str) -> bool:
        """Whether this rank lets threads finish before it ends; not for longer than the limit."""
        if self._may_end is None:
            if not self._someone_is_busy():
                return False
            self._may_end = self._clock.now + self.limit_s
            self._process.say(
                f"rank {self.me} waits for a rank that is lost: {how} It ends when other threads, "
                f"here or on other ranks, have finished their work, in {self.limit_s:.0f} s at "
                "the latest (HVD_PIPE_TIMEOUT)."
            )
        return self._someone_is_busy() and self._clock.now < self._may_end

    def _name_the_slow(self) -> None:
        """Say whom all others wait for, when they have done so for long."""
        statuses = {link.rank: link.status for link in self._links.values()} | {
            self.me: self._status
        }
        # Whoever does not run may be what the slow ones stand still for, too.
        if self._silent or any(one.joined for one in statuses.values()):
            return
        long = {rank: one for rank, one in statuses.items() if one.since_s > self.limit_s / 2}
        slow = {rank for rank, one in long.items() if not one.waits}
        self._kept_waiting &= slow
        places = {rank: one.where or "an unknown line" for rank, one in sorted(long.items())}
        before, self._all_wait = self._all_wait, len(long) == len(statuses) and not slow
        if self._all_wait and not before and len(set(places.values())) > 1:
            some = ", ".join(
                f"rank {at} at {line}" for at, line in [*places.items()][:MOST_SILENT]
            )
            self._process.say(
                f"all ranks have waited for {self.limit_s / 2:.0f} s, at unlike lines: {some}. A "
                "rank that reads a gradient waits for step() of the others: leave what they are "
                "in for after step(), or read on all ranks."
            )
        if len(slow) == len(long) or len(long) < len(statuses):
            return
        for rank in sorted(slow - self._kept_waiting):
            self._kept_waiting.add(rank)
            self._process.say(
                f"{self.peers[rank]} has kept {len(long) - len(slow)} other ranks waiting for "
                f"{self.limit_s / 2:.0f} s: it is at {statuses[rank].where or 'an unknown line'}."
            )

    def _loss(self, silence_s: float) -> tuple[int, str] | None:
        """Return the rank that was lost first, or silent for longer, and what has become of it."""
        with self._changed:
            for rank, how in self._lost.items():
                if rank != self.me:
                    return rank, how
        silent = self._silent
        rank = max(silent, key=lambda one: silent[one].seconds, default=self.me)
        if rank == self.me or silent[rank].seconds <= silence_s:
            return None
        return rank, self._describe(rank, silent[rank])

    def _describe(self, rank: int, silence: Silence) -> str:
        last = f", last seen at {silence.where}" if silence.where else ""
        why = _STOPPED if silence.stopped else _SILENT
        return f"{self.peers[rank]} has been silent for {silence.seconds:.0f} s{last}: {why}"


_STOPPED = "it is stopped, by a signal (SIGSTOP, Ctrl-Z) or by a debugger."
_SILENT = "it is stopped, its host is down, or the link to it is cut."
_ENDED = "{} ended without a word: it was killed (by hand, or for memory), or crashed."
_UNREACHABLE = (
    "{} cannot be reached: its host is down or the link is cut. Try to ping it; how long TCP "
    "itself tries is set by sysctl net.ipv4.tcp_retries2."
)
_CUT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
