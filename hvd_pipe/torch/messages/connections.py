"""Gloo's sockets, which torch gives no access to: to end connections, and to keep strangers out.

Linux only: a process sees its own sockets in ``/proc/self/fd``.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

Address = tuple[str, int]

_SO_ATTACH_FILTER = 26
_LONGEST_S = 32_767.0  # that Linux takes between two questions to a silent host


class Connections:
    """The listener that Gloo opens after this is made, and the connections from and to it."""

    def __init__(self) -> None:
        self._before = _open_sockets()
        self._links: dict[int, str] = {}

    def take_listener(self) -> list[Address]:
        """Take over what has begun to listen; return where it does."""
        self._take(_listens)
        return [one.getsockname()[:2] for one in self._sockets()]

    def take_connected(self, listeners: Collection[Address], timeout_s: float) -> None:
        """Take over the connections to any of these; a host that is lost ends them in time."""
        timeout_s = min(timeout_s, _LONGEST_S)
        self._take(lambda one: bool({one.getsockname()[:2], _peer(one)} & {*listeners}))
        for one in self._sockets():
            if _peer(one) is not None:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in (
                    (socket.TCP_KEEPIDLE, timeout_s / 2),
                    (socket.TCP_KEEPINTVL, timeout_s / 6),
                    (socket.TCP_KEEPCNT, 3),
                    (socket.TCP_USER_TIMEOUT, timeout_s * 1e3),
                ):
                    one.setsockopt(socket.IPPROTO_TCP, option, max(1, round(value)))

    def refuse_strangers(self) -> None:
        """Drop what arrives at the listener, now that all ranks are connected."""
        drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF: return 0
        program = struct.pack("HL", 1, ctypes.addressof(drop_all))
        for one in self._sockets():
            if _listens(one):
                one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    def abort(self) -> None:
        """End the connections: whoever waits for a message, here or elsewhere, gets an error."""
        for one in self._sockets():
            if _peer(one) is not None:  # Gloo ends the process where its listener is shut down
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def close_in_child(self) -> None:
        """Close a forked child's copies, which would keep a dead rank's connections open."""
        for descriptor, link in self._links.items():
            if _link(descriptor) == link:
                os.close(descriptor)

    def _take(self, is_wanted: Callable[[socket.socket], bool]) -> None:
        for descriptor, link in _open_sockets().items():
            if self._before.get(descriptor) != link:
                for one in _opened(descriptor, link):
                    if is_wanted(one):
                        self._links[descriptor] = link

    def _sockets(self) -> Iterator[socket.socket]:
        for descriptor, link in self._links.items():
            yield from _opened(descriptor, link)


def _open_sockets() -> dict[int, str]:
    """Return this process's sockets, by descriptor, as the system names them."""
    descriptors = (int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    links = {descriptor: _link(descriptor) for descriptor in descriptors}
    return {descriptor: link for descriptor, link in links.items() if link.startswith("socket:")}


def _link(descriptor: int) -> str:
    try:
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())
    except OSError:
        return ""  # another thread has closed it


def _opened(descriptor: int, link: str) -> Iterator[socket.socket]:
    """Yield this socket, unless another thread has closed it."""
    try:
        own = os.dup(descriptor)
    except OSError:
        return
    with socket.socket(fileno=own) as one:
        if _link(own) == link:
            yield one


def _listens(one: socket.socket) -> bool:
    return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _peer(one: socket.socket) -> Address | None:
    try:
        return one.getpeername()[:2]  # type: ignore[no-any-return]
    except OSError:
        return None
