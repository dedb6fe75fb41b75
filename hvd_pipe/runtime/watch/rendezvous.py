"""Connect all ranks to rank 0, which opens a port and accepts peers that know the job's secret.

The port is that of the interface that Horovod's own connections use, where ``HOROVOD_GLOO_IFACE``
names it. Elsewhere it is open on all interfaces, IPv4 and IPv6: Horovod chooses one by asking the
hosts which of them can reach each other, and does not say which. It is open while ranks connect,
so for about a second.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import psutil  # type: ignore[import-untyped]  # Horovod needs it, too

AUTH_TIMEOUT_S = 3.0  # close connections that do not authenticate
CONNECT_S = 10.0  # in all: a firewall lets connections neither in nor fail
LONGEST_LINE = 100
BACKLOG = 8192  # connections that wait to be accepted; the kernel lowers it to net.core.somaxconn


class Listener:
    """Accepts connections that show the secret, until it is closed."""

    def __init__(self) -> None:
        chosen = _addresses_of(os.environ.get("HOROVOD_GLOO_IFACE", ""))
        self.listening = [_listen(address) for address in chosen] or [_listen_to_all()]
        port = self.listening[0].getsockname()[1]
        self._question, self._answer = secrets.token_hex(16), secrets.token_hex(16)
        self.address = {
            "host": socket.gethostname(),
            "addresses": [one.getsockname()[:2] for one in self.listening]
            if chosen
            else [(address, port) for address in _all_addresses()],
            "question": self._question,
            "answer": self._answer,
        }
        """What `connect` needs; for ranks of the same job only."""
        self._connected: dict[int, socket.socket] = {}
        self._loop = asyncio.SelectorEventLoop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="hvd_pipe listener", daemon=True)
        self._thread.start()

    def close(self) -> dict[int, socket.socket]:
        """Return the connections that were accepted, by rank; wait for no others."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        return self._connected

    def _run(self) -> None:
        self._loop.set_exception_handler(lambda *_: None)  # too many open files: it tries again
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        servers = [
            await asyncio.start_server(self._greet, sock=one, limit=LONGEST_LINE, backlog=BACKLOG)
            for one in self.listening
        ]
        await self._closing.wait()
        for server in servers:
            server.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(AUTH_TIMEOUT_S):
                question, rank = (await reader.readuntil(b"\n")).split()
            if hmac.compare_digest(question, self._question.encode()):
                number = int(rank)
                writer.write(f"{self._answer}\n".encode())
                if number in self._connected:
                    self._connected.pop(number).close()  # it had given that one up
                self._connected[number] = writer.get_extra_info("socket").dup()
        except (EOFError, OSError, ValueError, asyncio.LimitOverrunError):
            pass  # not a rank of this job
        finally:
            writer.close()


def connect(address: dict[str, Any], rank: int) -> socket.socket | None:
    """Return a connection to rank 0, or None where no address of it can be reached.

    Each address has an equal share of the time that is left, to connect and to answer.
    """
    addresses = [(str(host), int(port)) for host, port in address["addresses"]]
    if addresses:
        addresses.append((address["host"], addresses[0][1]))
    here = address["host"] == socket.gethostname()
    # A loopback address is another host's elsewhere, so it comes last there.
    addresses.sort(key=lambda one: _is_loopback(one[0]) != here)
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
                link.settimeout(max(now + share - time.monotonic(), 1e-3))
                # The answer is in one packet. Another program may send any bytes.
                answer = link.recv(LONGEST_LINE)
                if hmac.compare_digest(answer, f"{address['answer']}\n".encode()):
                    link.settimeout(None)
                    return link
            link.close()
    return None


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
        if one.family in (socket.AF_INET, socket.AF_INET6)
        and not one.address.lower().startswith("fe80:")  # needs an interface of the other host's
    ]


def _all_addresses() -> list[str]:
    """Return all addresses of this host, IPv4 first, and loopback for its own ranks."""
    addresses = [one for name in psutil.net_if_addrs() for one in _addresses_of(name)]
    return sorted(addresses, key=lambda one: ":" in one)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
