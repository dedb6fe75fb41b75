"""Connect the child processes to that of rank 0, which accepts peers that know the job's secret.

Its port is on the address that Horovod's own connections use, where ``HOROVOD_GLOO_IFACE`` names
it. Elsewhere it is open on all interfaces, IPv4 and IPv6: Horovod chooses one by asking the hosts
which of them can reach each other, and does not say which. It is open while ranks connect, so for
about a second.
"""

from __future__ import annotations

import hmac
import selectors
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

CONNECT_S = 10.0  # in all: a firewall lets connections neither in nor fail
LONGEST_LINE = 100
BACKLOG = 8192  # connections that wait to be accepted; the kernel lowers it to net.core.somaxconn


def listen(address: str) -> socket.socket:
    """Open a port on an address, or on all of this host's where it is empty."""
    if not address and socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be switched off
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
            )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=BACKLOG)


def accept(listening: socket.socket, secret: str, over: socket.socket) -> dict[int, socket.socket]:
    """Return connections that show the secret, by rank, once ``over`` has something to read."""
    accepted: dict[int, socket.socket] = {}
    listening.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(over, selectors.EVENT_READ)
        selector.register(listening, selectors.EVENT_READ)
        while over not in (ready := [key.fileobj for key, _ in selector.select()]):
            for peer in ready:
                assert isinstance(peer, socket.socket)
                if peer is listening:
                    with suppress(OSError):  # it has gone
                        selector.register(peer.accept()[0], selectors.EVENT_READ)
                else:
                    selector.unregister(peer)
                    _greet(peer, secret, accepted)
        selector.unregister(over)
        for key in selector.get_map().values():
            key.fileobj.close()  # type: ignore[union-attr]
    return accepted


def _greet(peer: socket.socket, secret: str, accepted: dict[int, socket.socket]) -> None:
    with suppress(OSError, ValueError):  # it is not a rank of this job
        shown, rank = peer.recv(LONGEST_LINE).split()  # in one packet, as the answer
        if hmac.compare_digest(shown, secret.encode()):
            peer.sendall(_answer(secret))
            accepted[int(rank)] = peer  # the rank has given up an older one
            return
    peer.close()


def _answer(secret: str) -> bytes:
    return secret[::-1].encode()


def connect(addresses: Sequence[Any], secret: str, rank: int) -> socket.socket | None:
    """Return a connection to rank 0, or None where none of its addresses can be reached."""
    for host, port in addresses:
        with suppress(OSError, ValueError):  # the latter for names that cannot be looked up
            link = socket.create_connection((host, port), CONNECT_S / len(addresses) / 2)
            with suppress(OSError):
                link.sendall(f"{secret} {rank}".encode())
                # Another program may send any bytes, or none.
                if hmac.compare_digest(link.recv(LONGEST_LINE), _answer(secret)):
                    return link
            link.close()
    return None
