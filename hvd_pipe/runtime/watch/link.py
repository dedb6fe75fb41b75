"""A connection between two ranks of the watch, and what they tell each other by it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Link", "Peer", "Status", "encode"]

LONGEST = 1 << 16  # bytes of a message


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
    """What a process is doing.

    Args:
        where: The line that its script is at.
        waits: Whether it waits for other ranks.
        since_s: For how long it has waited for one message, or not waited.
        joined: Whether it is in ``hvd.join()``, where it waits for ranks that get on.
        busy: Whether other threads that it would not end without, such as one that writes a
            checkpoint, get something done.
    """

    where: str = ""
    waits: bool = False
    since_s: float = 0.0
    joined: bool = False
    busy: bool = False


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as it travels: once for all ranks that it goes to."""
    return json.dumps(message).encode() + b"\n"


class Link:
    """A connection to one rank."""

    def __init__(self, rank: int, connected: socket.socket, now: float) -> None:
        self.rank, self.socket = rank, connected
        self.heard = now
        self.status = Status()
        self.warned = self.stopped = False
        self._rest = self._unsent = b""
        self._error: OSError = ConnectionResetError()
        self._sending = threading.Lock()
        connected.setblocking(False)

    def send(self, messages: bytes) -> None:
        """Send as much as the network takes now; the rest goes with the next messages."""
        with self._sending:
            if len(self._unsent) < LONGEST:  # a link that is cut takes nothing: do not queue
                self._unsent += messages
            try:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
            except BlockingIOError:
                pass
            except OSError as error:  # the kernel says it once: to `receive` it says "closed"
                self._error = error

    def receive(self) -> list[dict[str, Any]]:
        """Return what has come.

        Raises:
            OSError: The connection is closed.
        """
        try:
            data = self.socket.recv(LONGEST)
        except BlockingIOError:
            return []
        if not data:
            raise self._error
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line]
