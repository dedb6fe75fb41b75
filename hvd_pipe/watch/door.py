"""How the ranks come to be connected to the first one: a port of its own, and a secret."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import psutil  # type: ignore[import-untyped]  # Horovod needs it, too

__all__ = ["Door", "knock"]

VISITOR_S = 3.0  # a stranger may say nothing
KNOCK_S = 10.0  # in all: a firewall lets connections neither in nor fail
MOST_ADDRESSES = 8


class Door:
    """Lets those in that know the secret, until it is closed.

    Raises:
        OSError: No port can be opened.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("", 0), backlog=1024)
        self._question, self._answer = secrets.token_hex(16), secrets.token_hex(16)
        self._met: dict[int, socket.socket] = {}
        self.address = {
            "host": socket.gethostname(),
            "addresses": _addresses(),
            "port": self._listener.getsockname()[1],
            "question": self._question,
            "answer": self._answer,
        }
        """What `knock` needs; for ranks of the same job only."""
        self._thread = threading.Thread(target=self._run, name="hvd_pipe door", daemon=True)
        self._thread.start()

    def close(self) -> dict[int, socket.socket]:
        """Return the connections to all that came, by rank."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which ends `accept`
        self._thread.join()
        self._listener.close()
        return self._met

    def _run(self) -> None:
        while True:
            try:
                visitor, _ = self._listener.accept()
            except OSError:
                return
            try:
                visitor.settimeout(VISITOR_S)
                question, rank = visitor.makefile().readline(100).split()
                if not hmac.compare_digest(question, self._question):
                    raise ValueError
                visitor.sendall(f"{self._answer}\n".encode())
                self._met[int(rank)] = visitor
            except (OSError, ValueError):  # a stranger
                visitor.close()


def knock(address: dict[str, Any], rank: int) -> socket.socket | None:
    """Return a connection to the first rank, or None where no way leads there."""
    ways = [*address["addresses"], address["host"]]
    if address["host"] == socket.gethostname():
        ways.insert(0, "127.0.0.1")
    deadline = time.monotonic() + KNOCK_S
    for tried, way in enumerate(ways):
        share = (deadline - time.monotonic()) / (len(ways) - tried)
        if share <= 0:
            break
        with suppress(OSError, ValueError):  # the latter for names that cannot be looked up
            link = socket.create_connection((way, address["port"]), share)
            with suppress(OSError, ValueError):  # a stranger may answer in no text at all
                # The first rank answers one after the other.
                link.settimeout(deadline - time.monotonic())
                link.sendall(f"{address['question']} {rank}\n".encode())
                if link.makefile().readline(100).strip() == address["answer"]:
                    return link
            link.close()
    return None


def _addresses() -> list[str]:
    """Return this host's addresses, first that of the interface that Horovod uses."""
    first = os.environ.get("HOROVOD_GLOO_IFACE", "")
    interfaces = sorted(psutil.net_if_addrs().items(), key=lambda item: item[0] != first)
    found = [
        one.address
        for _, addresses in interfaces
        for one in addresses
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]
    return found[:MOST_ADDRESSES]
