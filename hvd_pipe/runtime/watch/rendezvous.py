"""Connect all ranks to rank 0, which opens a port and accepts peers that know the job's secret.

The port is that of the interface that Horovod's own connections use, where ``HOROVOD_GLOO_IFACE``
names it. Elsewhere it is open on all interfaces, IPv4 and IPv6: Horovod chooses one by asking the
hosts which of them can reach each other, and does not say which. It is open while ranks connect,
so for about a second.
"""

from __future__ import annotations

import errno
import hmac
import os
import resource
import secrets
import selectors
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]  # Horovod needs it, too

__all__ = ["Listener", "connect", "files_lacking"]

AUTH_TIMEOUT_S = 3.0  # close connections that do not authenticate
CONNECT_S = 10.0  # in all: a firewall lets connections neither in nor fail
LONGEST_LINE = 100
BACKLOG = 8192  # connections that wait to be accepted; the kernel lowers it to net.core.somaxconn
SPARE_FILES = 64  # that the rank opens beside: its data and checkpoints


@dataclass
class _Connection:
    """A connection that has not shown the secret yet."""

    socket: socket.socket
    deadline: float
    received: bytes = b""


class Listener:
    """Accepts connections that show the secret, until it is closed.

    Raises:
        OSError: No port can be opened.
    """

    def __init__(self) -> None:
        interface = os.environ.get("HOROVOD_GLOO_IFACE", "")
        addresses = _addresses_of(interface)
        self._listeners = [_listen(address) for address in addresses] or [_listen_to_all()]
        self._question, self._answer = secrets.token_hex(16), secrets.token_hex(16)
        self._connected: dict[int, socket.socket] = {}
        self._pending: dict[int, _Connection] = {}
        self._closing, self._wake = socket.socketpair()
        port = self._listeners[0].getsockname()[1]
        self.address = {
            "host": socket.gethostname(),
            "addresses": [(one.getsockname()[0], one.getsockname()[1]) for one in self._listeners]
            if addresses
            else [(address, port) for address in _all_addresses()],
            "question": self._question,
            "answer": self._answer,
        }
        """What `connect` needs; for ranks of the same job only."""
        self._selector = selectors.DefaultSelector()
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="hvd_pipe listener", daemon=True)
        self._thread.start()

    def close(self) -> dict[int, socket.socket]:
        """Return the connections that were accepted, by rank; wait for no others."""
        self._closing.close()  # which wakes the thread up
        self._thread.join()
        return self._connected

    def _run(self) -> None:
        """Serve all connections at once: none can hold up the others."""
        while True:
            first = min(
                (connection.deadline for connection in self._pending.values()), default=None
            )
            wait_s = None if first is None else max(first - time.monotonic(), 0.0)
            ready = [key for key, _ in self._selector.select(wait_s)]
            if any(key.fileobj is self._wake for key in ready):
                break
            for key in ready:
                key.data(key.fileobj)
            for connection in list(self._pending.values()):
                if time.monotonic() >= connection.deadline:
                    self._refuse(connection)
        for connection in list(self._pending.values()):
            self._refuse(connection)
        for one in (*self._listeners, self._wake):
            one.close()
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # it would stay ready for ever
                self._selector.unregister(listener)
            return  # else it has gone again
        accepted.setblocking(False)
        connection = _Connection(accepted, time.monotonic() + AUTH_TIMEOUT_S)
        self._pending[accepted.fileno()] = connection
        self._selector.register(accepted, selectors.EVENT_READ, lambda _: self._read(connection))

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(LONGEST_LINE)
            connection.received += data
            line, end, _ = connection.received.partition(b"\n")
            if not end:
                if not data or len(connection.received) >= LONGEST_LINE:
                    raise ValueError
                return
            question, rank = line.split()
            if not hmac.compare_digest(question, self._question.encode()):
                raise ValueError
            number = int(rank)
            connection.socket.sendall(f"{self._answer}\n".encode())
        except BlockingIOError:
            return
        except (OSError, ValueError):  # not a rank of this job
            self._refuse(connection)
            return
        self._forget(connection)
        if number in self._connected:
            self._connected.pop(number).close()  # it had given that one up
        self._connected[number] = connection.socket

    def _forget(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        del self._pending[connection.socket.fileno()]

    def _refuse(self, connection: _Connection) -> None:
        self._forget(connection)
        connection.socket.close()


def files_lacking(connections: int) -> int:
    """Return how many files more this process must be allowed to open for so many connections."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return 0
    return max(0, int(psutil.Process().num_fds()) + connections + SPARE_FILES - allowed)


def connect(address: dict[str, Any], rank: int) -> socket.socket | None:
    """Return a connection to rank 0, or None where no address of it can be reached.

    Each address has an equal share of the time that is left, to connect and to answer.
    """
    addresses = [(str(host), int(port)) for host, port in address["addresses"]]
    if addresses:
        addresses.append((address["host"], addresses[0][1]))
    here = address["host"] == socket.gethostname()
    addresses.sort(
        key=lambda one: _is_loopback(one[0]) != here
    )  # elsewhere it is another's, so last
    deadline = time.monotonic() + CONNECT_S
    for tried, one in enumerate(addresses):
        now = time.monotonic()
        share = (deadline - now) / (len(addresses) - tried)
        if share <= 0:
            break
        with suppress(OSError, ValueError):  # the latter for names that cannot be looked up
            link = socket.create_connection(one, share)
            with suppress(OSError, ValueError):
                link.sendall(f"{address['question']} {rank}\n".encode())
                # Another program may answer slowly, and with any bytes.
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
    return socket.create_server((address, 0), family=family, backlog=BACKLOG)


def _listen_to_all() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be switched off
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=BACKLOG)


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
