"""Connect all ranks to the first one, which listens on a port and accepts who knows a secret.

The port is that of the interface that Horovod's own connections use, where ``HOROVOD_GLOO_IFACE``
names it. Elsewhere it is open on all interfaces, IPv4 and IPv6: Horovod chooses one by asking the
hosts which of them can reach each other, and does not say which. It is open while ranks connect,
so for about a second.
"""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]  # Horovod needs it, too

__all__ = ["Door", "knock"]

AUTH_TIMEOUT_S = 3.0  # close connections that do not authenticate
KNOCK_S = 10.0  # in all: a firewall lets connections neither in nor fail
LONGEST_LINE = 100


@dataclass
class _Guest:
    """A connection that has not shown the secret yet."""

    socket: socket.socket
    deadline: float
    received: bytes = b""


class Door:
    """Lets those in that know the secret, until it is closed.

    Raises:
        OSError: No port can be opened.
    """

    def __init__(self) -> None:
        interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
        addresses = _addresses_of(interface)
        self._listeners = [_listen(address) for address in addresses] or [_listen_to_all()]
        self._question, self._answer = secrets.token_hex(16), secrets.token_hex(16)
        self._met: dict[int, socket.socket] = {}
        self._guests: dict[int, _Guest] = {}
        self._closing, self._wake = socket.socketpair()
        port = self._listeners[0].getsockname()[1]
        self.address = {
            "host": socket.gethostname(),
            "ways": [(one.getsockname()[0], one.getsockname()[1]) for one in self._listeners]
            if addresses
            else [(address, port) for address in _all_addresses()],
            "question": self._question,
            "answer": self._answer,
        }
        """What `knock` needs; for ranks of the same job only."""
        self._selector = selectors.DefaultSelector()
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hvd_pipe door", daemon=True)
        self._thread.start()

    def close(self) -> dict[int, socket.socket]:
        """Return the connections to all that came, by rank; waits for nobody else."""
        self._closing.close()  # which wakes the thread up
        self._thread.join()
        return self._met

    def _run(self) -> None:
        """Serve all connections at once: none can hold up the others."""
        while True:
            first = min((guest.deadline for guest in self._guests.values()), default=None)
            wait_s = None if first is None else max(first - time.monotonic(), 0.0)
            ready = [key for key, _ in self._selector.select(wait_s)]
            if any(key.fileobj is self._wake for key in ready):
                break
            for key in ready:
                key.data(key.fileobj)
            for guest in list(self._guests.values()):
                if time.monotonic() >= guest.deadline:
                    self._turn_away(guest)
        for guest in list(self._guests.values()):
            self._turn_away(guest)
        for one in (*self._listeners, self._wake):
            one.close()
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # it has gone again
            visitor, _ = listener.accept()
            visitor.setblocking(False)
            guest = _Guest(visitor, time.monotonic() + AUTH_TIMEOUT_S)
            self._guests[visitor.fileno()] = guest
            self._selector.register(visitor, selectors.EVENT_READ, lambda _: self._read(guest))

    def _read(self, guest: _Guest) -> None:
        try:
            data = guest.socket.recv(LONGEST_LINE)
            guest.received += data
            line, end, _ = guest.received.partition(b"\n")
            if not end:
                if not data or len(guest.received) >= LONGEST_LINE:
                    raise ValueError
                return
            question, rank = line.split()
            if not hmac.compare_digest(question, self._question.encode()):
                raise ValueError
            number = int(rank)
            guest.socket.sendall(f"{self._answer}\n".encode())
        except BlockingIOError:
            return
        except (OSError, ValueError):  # a stranger
            self._turn_away(guest)
            return
        self._forget(guest)
        if number in self._met:
            self._met.pop(number).close()  # it had given that one up
        self._met[number] = guest.socket

    def _forget(self, guest: _Guest) -> None:
        self._selector.unregister(guest.socket)
        del self._guests[guest.socket.fileno()]

    def _turn_away(self, guest: _Guest) -> None:
        self._forget(guest)
        guest.socket.close()


def knock(address: dict[str, Any], rank: int) -> socket.socket | None:
    """Return a connection to the first rank, or None where no way leads there.

    Each address has an equal share of the time that is left, to connect and to answer.
    """
    ways = [(str(host), int(port)) for host, port in address["ways"]]
    if ways:
        ways.append((address["host"], ways[0][1]))
    here = address["host"] == socket.gethostname()
    ways.sort(key=lambda way: _is_loopback(way[0]) != here)  # elsewhere it is another's, so last
    deadline = time.monotonic() + KNOCK_S
    for tried, way in enumerate(ways):
        now = time.monotonic()
        share = (deadline - now) / (len(ways) - tried)
        if share <= 0:
            break
        with suppress(OSError, ValueError):  # the latter for names that cannot be looked up
            link = socket.create_connection(way, share)
            with suppress(OSError, ValueError):
                link.sendall(f"{address['question']} {rank}\n".encode())
                # A stranger may answer slowly, and in no text at all.
                answer = _line(link, now + share)
                if hmac.compare_digest(answer, address["answer"].encode()):
                    link.settimeout(None)
                    return link
            link.close()
    return None


def _line(link: socket.socket, deadline: float) -> bytes:
    """Return a line, however slowly it comes; TimeoutError at the deadline."""
    received = b""
    while b"\n" not in received:
        link.settimeout(max(deadline - time.monotonic(), 1e-3))
        data = link.recv(LONGEST_LINE - len(received))
        if not data or time.monotonic() >= deadline:
            raise TimeoutError
        received += data
    return received.partition(b"\n")[0]


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=1024)


def _listen_to_all() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be switched off
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=1024)


def _addresses_of(interface: str) -> list[str]:
    """Return the addresses of an interface; none where there is no such interface."""
    return [
        one.address
        for one in psutil.net_if_addrs().get(interface, [])
        if one.family in (socket.AF_INET, socket.AF_INET6) and not _is_local_to_link(one.address)
    ]


def _all_addresses() -> list[str]:
    """Return all addresses of this host, IPv4 first, and loopback for its own ranks."""
    found = [one for name in psutil.net_if_addrs() for one in _addresses_of(name)]
    return sorted(found, key=lambda one: ":" in one)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _is_local_to_link(address: str) -> bool:
    """Whether an address needs an interface of the other host's beside it."""
    return address.lower().startswith("fe80:")
