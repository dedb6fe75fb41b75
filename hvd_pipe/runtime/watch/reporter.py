"""A rank's side of the process that keeps its heartbeat: it reports, and does as it is told."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvd_pipe.runtime.watch import child
from hvd_pipe.runtime.watch.heartbeat import Process, beat_s
from hvd_pipe.runtime.watch.link import Peer

__all__ = ["Reporter"]

START_S = 60.0  # for a process to start, on a machine that is very busy
ANSWER_S = 5.0  # for an answer, or to take a message, of a process that does little else


class Reporter:
    """Starts `hvd_pipe.runtime.watch.child` and a thread that reports to it.

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
        process: Process,
    ) -> None:
        self.peers, self.me, self.limit_s, self.links = peers, me, limit_s, links
        self._process = process
        self._beat_s = beat_s(len(peers), limit_s)
        self._control: socket.socket | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._sending = threading.Lock()
        self._answered = threading.Condition()
        self._answers: list[str | None] = []
        self._stopped = False

    def start(self) -> None:
        """Begin to report, and to hear of the others."""
        try:
            self._control = self._start_child()
        except OSError as error:
            self._give_up(repr(error))
            return
        self._thread = threading.Thread(target=self._run, name="hvd_pipe reporter", daemon=True)
        self._thread.start()

    def _start_child(self) -> socket.socket:
        mine, its = socket.socketpair()
        numbers = {rank: link.fileno() for rank, link in self.links.items()}
        try:
            with its:
                # Not a fork of this process: that has threads, and MPI's memory.
                self._child = subprocess.Popen(
                    [sys.executable, "-S", str(Path(child.__file__).resolve()), str(its.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    pass_fds=(its.fileno(), *numbers.values()),
                    start_new_session=True,  # Ctrl-Z stops the rank alone
                )
            mine.settimeout(START_S)
            words = {
                "me": self.me,
                "pid": os.getpid(),
                "main": threading.main_thread().native_id,
                "limit_s": self.limit_s,
                "links": numbers,
                "peers": [(peer.rank, peer.host, peer.pid) for peer in self.peers],
            }
            mine.sendall(json.dumps(words).encode() + b"\n")
            # Training waits for this, or a rank would look silent while its process starts.
            if mine.recv(len(child.READY)) != child.READY:
                raise ConnectionResetError("its process for that has ended at its start")
            mine.settimeout(ANSWER_S)
        except OSError:
            mine.close()
            raise
        return mine

    def stop(self) -> None:
        """Report nothing more; the others take it that this rank has left, or is lost."""
        self._stopped = True
        if self._control is not None:
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)  # which ends the child and the thread
        if self._thread is not None:
            self._thread.join(ANSWER_S)
        if self._child is not None:
            try:
                self._child.wait(ANSWER_S)
            except subprocess.TimeoutExpired:  # it is stopped, say
                self._child.kill()
                self._child.wait()
        self.close()

    def close(self) -> None:
        """Close the sockets of this process: a forked child must not keep a dead rank's open."""
        if self._control is not None:
            self._control.close()
        for link in self.links.values():
            link.close()

    def leave(self) -> None:
        """Tell the others that this rank goes, and that nothing is wrong."""
        self._send({"left": True})

    def raised(self, what: str) -> None:
        """Tell the others that this rank ends by an exception."""
        self._send({"raised": what})

    def cause(self, patience_s: float) -> str | None:
        """Return what has become of another rank, when communication has failed; None: nothing."""
        with self._answered:
            self._answers.clear()
            if not self._send({"cause": patience_s}):
                return None
            self._answered.wait_for(lambda: self._answers, patience_s + ANSWER_S)
            return self._answers[0] if self._answers else None

    def _send(self, message: Mapping[str, Any]) -> bool:
        if self._control is None:
            return False
        with self._sending, suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")
            return True
        return False

    def _give_up(self, why: str) -> None:
        """Go without: that must not look like a rank that is lost."""
        left = b"\n" + json.dumps({"left": self.me}).encode() + b"\n"
        for link in self.links.values():
            with suppress(OSError):
                link.send(left)
        if self._control is not None:
            with suppress(OSError):
                self._control.shutdown(socket.SHUT_RDWR)
        self._process.say(f"{self.peers[self.me]} can no longer hear of others: {why}")

    # The thread.

    def _run(self) -> None:
        try:
            self._loop()
            why = "its process for that has ended"
        except Exception as error:  # a mistake in here must not look like a rank that is lost
            why = repr(error)
        if not self._stopped:
            self._give_up(why)

    def _loop(self) -> None:
        assert self._control is not None
        rest, due = b"", 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            while not self._stopped:
                now = time.monotonic()
                if now >= due:
                    due = now + self._beat_s
                    self._send({"status": asdict(self._process.status())})
                if not selector.select(max(due - now, 0.0)):
                    continue
                data = self._control.recv(1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))

    def _take(self, message: Mapping[str, Any]) -> None:
        if "say" in message:
            self._process.say(message["say"])
        elif "end" in message:
            # Beside the reports, which show that this process runs.
            end, text = self._process.end, message["end"]
            threading.Thread(target=end, args=(text,), name="hvd_pipe end", daemon=True).start()
        elif "cause" in message:
            with self._answered:
                self._answers.append(message["cause"])
                self._answered.notify_all()
