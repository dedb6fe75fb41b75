"""No rank waits for ever for one that is gone: it ends, and says who is gone and why.

Open MPI waits for a stopped rank, and behind a cut link, for ever; Gloo gives up after half a
minute with an error that names nobody. So the ranks keep a `hvd_pipe.torch.heartbeat` of their
own, beside Horovod, from ``hvd.init()`` to ``hvd.shutdown()``. A rank ends itself only when
another is known to be lost *and* it has itself done nothing but wait for a while. Launchers then
end the rest of the job.

``HVD_PIPE_TIMEOUT`` is how many seconds a rank may be silent (120; 0 switches all of this off).
Elastic jobs recover by themselves and have none of it.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import global_process_set, rank, size

import hvd_pipe
from hvd_pipe.torch.agree import found_by_first, gather
from hvd_pipe.torch.checks import is_elastic
from hvd_pipe.torch.door import Door, knock
from hvd_pipe.torch.exchange import Exchange
from hvd_pipe.torch.heartbeat import FIRST, Heartbeat, Look, Peer

__all__ = ["leave", "start", "stop"]

ENVIRONMENT_VARIABLE = "HVD_PIPE_TIMEOUT"
DEFAULT_S = 120.0
NEWS_S = 2.0  # how long news of a rank may take to come after Horovod's own error

_heartbeat: Heartbeat | None = None


def start() -> None:
    """Begin to watch the other ranks, and to be watched; all ranks do this after ``hvd.init()``.

    Raises:
        ValueError: ``HVD_PIPE_TIMEOUT`` is not a number of seconds, on the first rank, which
            decides for all (`HvdPipeError` elsewhere).
    """
    global _heartbeat  # noqa: PLW0603 - one a process, as Horovod is
    stop()
    if size() == 1 or is_elastic():
        return
    door: Door | None = None

    def offer() -> dict[str, Any] | None:
        nonlocal door
        limit_s = _limit(os.environ.get(ENVIRONMENT_VARIABLE, ""))
        if limit_s == 0:
            return None
        with suppress(OSError):  # no port can be opened: the warning below says so
            door = Door()
        return {"limit_s": limit_s, "door": None if door is None else door.address}

    name = "hvd_pipe.watchdog"
    link: socket.socket | None = None
    told: list[dict[str, Any]] = []
    try:
        offered = found_by_first(offer, f"{name}.offer", global_process_set)
        if offered is None:
            return
        if rank() != FIRST and offered["door"] is not None:
            link = knock(offered["door"], rank())
        met = rank() == FIRST or link is not None
        me = {"host": socket.gethostname(), "pid": os.getpid(), "met": met}
        told = gather(me, f"{name}.met", global_process_set)
    finally:
        links = {} if door is None else door.close()
        if link is not None:
            links = {FIRST: link}
        for other in list(links):
            # A rank that had given up before it was let in holds no other end.
            if not (told and told[other]["met"]):
                links.pop(other).close()
    peers = [Peer(number, one["host"], one["pid"]) for number, one in enumerate(told)]
    missed = [str(peer) for peer in peers if not told[peer.rank]["met"]]
    if missed and rank() == FIRST:
        warnings.warn(
            f"{', '.join(missed[:3])}{' and others' if len(missed) > 3 else ''} cannot connect to "
            f"{peers[FIRST]}: where one of them is stopped or its link is cut, nobody notices. "
            f"Let TCP connections between these hosts through, or set {ENVIRONMENT_VARIABLE}=0 "
            "to go without.",
            stacklevel=3,
        )
    if links:
        _heartbeat = Heartbeat(peers, rank(), links, offered["limit_s"], _Process(rank()))
        _heartbeat.start()
        _install()


def leave() -> None:
    """Tell the others that this rank goes, before Horovod shuts down."""
    if _heartbeat is not None:
        _heartbeat.leave()


def stop() -> None:
    """Watch no more, after Horovod has shut down."""
    global _heartbeat  # noqa: PLW0603
    if _heartbeat is not None:
        _heartbeat.stop()
    _heartbeat = None


class _Process:
    """What the heartbeat knows of this process; it asks from a thread of its own."""

    def __init__(self, own_rank: int) -> None:
        self._rank = own_rank
        self._waits_for: tuple[object, ...] | None = None
        self._since = time.monotonic()

    def look(self) -> Look:
        frames = sys._current_frames()
        main = frames.get(threading.main_thread().ident or 0)
        waits_for = _waits_for(main, frames.values())
        now = time.monotonic()
        if waits_for != self._waits_for:
            self._waits_for, self._since = waits_for, now
        joined = waits_for is not None and "join" in waits_for
        return Look(_line(main), waits_for is not None, now - self._since, joined)

    def say(self, text: str) -> None:
        _say(text)

    def end(self, text: str) -> None:
        self.say(f"rank {self._rank} ends, as it waits for a rank that is lost: {text}")
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(1)


def _say(text: str) -> None:
    with suppress(Exception):  # nobody may be reading any more
        sys.stderr.write(f"hvd_pipe: {text}\n")
        sys.stderr.flush()


_WAITING = (
    "horovod.torch.mpi_ops",
    "horovod.common.basics",  # shutdown
    "hvd_pipe.torch.in_flight",
    "hvd_pipe.torch.exchange",
)
_FOR_THREADS = ("threading", "torch.autograd.graph")  # the latter's own run hooks on a GPU


def _waits_for(main: FrameType | None, threads: Iterable[FrameType]) -> tuple[object, ...] | None:
    """Return what the main thread, or others that it waits for, wait for inside Horovod, if so.

    Others do not count otherwise: a rank that saves a checkpoint may well wait in one of them.
    """
    found = _wait_of(main)
    if found is None and (main is None or _module(main) in _FOR_THREADS):
        found = next(filter(None, map(_wait_of, threads)), None)
    return found


def _wait_of(frame: FrameType | None) -> tuple[object, ...] | None:
    """Return what a thread waits for inside Horovod; it changes with each message."""
    while frame is not None and _module(frame) == "threading":
        frame = frame.f_back
    if frame is None or _module(frame) not in _WAITING:
        return None
    # Handles are numbered; an exchange has none here, but counts its bytes at each launch.
    message, exchange = frame.f_locals.get("handle"), frame.f_locals.get("self")
    if isinstance(exchange, Exchange):
        message = (id(exchange), exchange._reduction.traffic.sent_bytes)
    name = frame.f_code.co_name
    while frame.f_back is not None and _module(frame.f_back) in _WAITING:
        frame = frame.f_back  # synchronize() is called by join(), which is another matter
        name = frame.f_code.co_name
    return name, message


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


_LIBRARIES = (
    "<",  # <frozen runpy>
    *hvd_pipe.__path__,
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)


def _line(frame: FrameType | None) -> str:
    """Return the line of the user's own code that a thread is at, or the innermost one.

    >>> _line(None)
    ''
    """
    innermost = frame
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            break
        frame = frame.f_back
    frame = frame or innermost
    return "" if frame is None else _place(frame.f_code.co_filename, frame.f_lineno)


def _place(file: str, line: int) -> str:
    return f"{Path(file).name}:{line}"


def _limit(text: str) -> float:
    """Read `ENVIRONMENT_VARIABLE`.

    >>> _limit(""), _limit("0"), _limit("2.5")
    (120.0, 0.0, 2.5)
    """
    try:
        seconds = float(text or DEFAULT_S)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError(
            f"{ENVIRONMENT_VARIABLE} must be a number of seconds, 0 for no limit, got {text!r}."
        )
    return seconds


# What happens once a process: after a fork, at an exception, at the end.

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_before: _Hook | None = None


def _install() -> None:
    global _before
    if _before is None:
        os.register_at_fork(after_in_child=_forget)
        _before, sys.excepthook = sys.excepthook, _on_exception
    atexit.unregister(leave)
    atexit.register(leave)


def _forget() -> None:
    """Take no part in a forked child: a data loader's, say."""
    global _heartbeat  # noqa: PLW0603
    if _heartbeat is not None:
        _heartbeat.close()
    _heartbeat = None


def _on_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Tell the others why this rank ends, or the user why Horovod's communication failed."""
    failed_here = not isinstance(error, HorovodInternalError)
    if failed_here and _heartbeat is not None:
        last = traceback.extract_tb(trace)[-1:]
        place = f" ({_place(last[0].filename, last[0].lineno or 0)})" if last else ""
        text = str(error).partition("\n")[0][:300]
        _heartbeat.raised(f"{kind.__name__}{': ' if text else ''}{text}{place}")
    assert _before is not None
    _before(kind, error, trace)
    if not failed_here and _heartbeat is not None:
        cause = _heartbeat.cause(NEWS_S)
        if cause is not None:
            _say(f"rank {_heartbeat.me} failed because of another: {cause}")
