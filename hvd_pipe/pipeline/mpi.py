"""Messages over MPI, by mpi4py: non-blocking sends, and receives posted before they are needed.

MPI moves a large message only while someone is inside one of its functions. The main thread
computes meanwhile, so a thread of the transport's own, the courier, asks how the messages are::

    main      send(3) ...... compute ...... receive(4) waits ...... compute
    courier     test . test .. test ... test    test -> it is here

It sleeps between two looks for a tenth of the time since something last happened, within
`LEAST_PAUSE_S` and `MOST_PAUSE_S`, and for good while nothing is on its way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from horovod.common.exceptions import HorovodInternalError

from hvd_pipe.errors import HvdPipeError, is_failing
from hvd_pipe.pipeline.transport import (
    DEPTH,
    WINDOW,
    Channel,
    Kind,
    Transport,
    channel_of,
    checked_size,
)
from hvd_pipe.pipeline.wire import Bytes, empty
from hvd_pipe.runtime.watch.waits import waiting_for

try:
    from mpi4py import MPI
except ImportError as error:
    raise HvdPipeError(
        f"pipelines over MPI need mpi4py ({error}): pip install mpi4py, built for the MPI that "
        'Horovod runs over, or use transport="process-sets".'
    ) from error

__all__ = ["MpiTransport", "check"]

LEAST_PAUSE_S, MOST_PAUSE_S = 1e-4, 1e-3
PAUSE = 0.1

_abandoned: list[object] = []  # what MPI may still write to or read from after a close


def check(rank: int, size: int) -> None:
    """Check that mpi4py and Horovod are in the same job, and that threads may share MPI.

    Args:
        rank, size: This process's rank and the number of ranks, as Horovod has them.

    Raises:
        HvdPipeError: They are not, or may not.
    """
    world = MPI.COMM_WORLD
    if (world.rank, world.size) != (rank, size):
        raise HvdPipeError(
            f"this process is rank {rank} of {size} to Horovod and rank {world.rank} of "
            f"{world.size} to mpi4py ({MPI.Get_library_version().split(',')[0]}): build mpi4py "
            "for the MPI that Horovod runs over (pip install --no-binary mpi4py mpi4py), start "
            'Horovod with all ranks, or use transport="process-sets".'
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise HvdPipeError(
            "MPI was initialised for one thread at a time, and both Horovod and pipelines use it "
            "from threads of their own: unset HOROVOD_MPI_THREADS_DISABLE and mpi4py.rc.threads, "
            "use an MPI that provides MPI_THREAD_MULTIPLE, or use "
            'transport="process-sets".'
        )


class _Incoming:
    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.unposted = 0
        self.posted: deque[tuple[MPI.Request, Bytes]] = deque()
        self.arrived: deque[tuple[Bytes, Bytes]] = deque()  # a message, and its buffer
        self.received = 0
        self.free: list[Bytes] = []


class _Outgoing:
    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.unsent: deque[tuple[MPI.Request, Any]] = deque()
        self.sent = 0


class MpiTransport(Transport):
    """A transport over MPI; all ranks make it at the same time.

    Args:
        channels: This rank's, as `hvd_pipe.pipeline.transport.check_channels` wants them.
        meet: Waits until all ranks are there, without MPI as far as this module is concerned.
        depth: Messages of a channel that have arrived or may do so before anyone asks for them.
        window: Messages of a channel that may be on their way before `send` waits.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        meet: Callable[[], object],
        depth: int = DEPTH,
        window: int = WINDOW,
    ) -> None:
        self.sent_bytes = 0
        self._meet, self._depth, self._window = meet, depth, window
        self._incoming = {
            (one.peer, one.kind): _Incoming(one) for one in channels if not one.outgoing
        }
        self._outgoing = {(one.peer, one.kind): _Outgoing(one) for one in channels if one.outgoing}
        self._lent: dict[int, tuple[Bytes, Bytes, _Incoming]] = {}
        self._changed = threading.Condition()
        self._happened = time.monotonic()
        self._error: Exception | None = None
        self._halting = False
        self._closed = False
        self._thread: threading.Thread | None = None
        # Horovod finalises MPI in its own thread as soon as some rank has left, by an exception,
        # say. A thread that is inside MPI then ends the process with an abort, and nobody is told
        # why. What hangs on MPI_COMM_SELF is deleted first of all, while MPI can still be used.
        # It hangs there before any rank can go on, and leave: Dup() waits for all.
        self._keyval = MPI.Comm.Create_keyval(delete_fn=_on_delete)
        MPI.COMM_SELF.Set_attr(self._keyval, self)
        # Messages of an earlier pipeline, or of the user's own, are not taken for this one's. It
        # is not freed: that is for all ranks together, also for those that fail.
        self._comm = MPI.COMM_WORLD.Dup()
        with self._changed:
            self._check()
            self._comm.Set_errhandler(MPI.ERRORS_RETURN)

    def expect(self, peer: int, kind: Kind, count: int) -> None:
        incoming = channel_of(self._incoming, peer, kind)
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        with self._changed:
            self._check()
            incoming.unposted += count
            self._post(incoming)
            self._wake()

    def receive(self, peer: int, kind: Kind) -> Bytes:
        incoming = channel_of(self._incoming, peer, kind)
        with self._changed, waiting_for(str(incoming.channel)):
            while not incoming.arrived:
                self._check()
                if not incoming.posted:
                    raise HvdPipeError(
                        f"no {incoming.channel} are expected after {incoming.received}: "
                        "call expect() with how many will come."
                    )
                self._changed.wait()
            message, buffer = incoming.arrived.popleft()
            incoming.received += 1
            self._lent[id(message)] = message, buffer, incoming
            self._post(incoming)
            self._wake()
        return message

    def recycle(self, buffer: Bytes) -> None:
        lent = self._lent.pop(id(buffer), None)
        if lent is None:
            raise ValueError("only a buffer that receive() has returned can be recycled, and once")
        _, whole, incoming = lent
        with self._changed:
            incoming.free.append(whole)

    def send(self, peer: int, kind: Kind, data: Any) -> None:
        outgoing = channel_of(self._outgoing, peer, kind)
        size = checked_size(data, outgoing.channel)
        with self._changed:
            self._check()
            with waiting_for(str(outgoing.channel)):
                while len(outgoing.unsent) >= self._window:
                    self._changed.wait()
                    self._check()
            request = self._comm.Isend([data, size, MPI.BYTE], peer, int(kind))
            outgoing.unsent.append((request, data))
            outgoing.sent += 1
            self.sent_bytes += size
            self._wake()

    def flush(self) -> None:
        with self._changed:
            self._check()
            while any(one.unsent for one in self._outgoing.values()):
                # Another wait whenever some has gone.
                with waiting_for("the rest of what was sent"):
                    self._changed.wait()
                self._check()

    def close(self, meet: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        self._halt()
        self._give_up()
        if meet and self._error is None and not is_failing():
            # The others may still be about to receive what this rank has sent.
            self._meet()
        self._lent.clear()
        for incoming in self._incoming.values():  # MPI_COMM_SELF keeps this transport
            incoming.free.clear()
            incoming.arrived.clear()

    def _give_up(self) -> None:
        with self._changed:
            for incoming in self._incoming.values():
                self._abandon(incoming.posted)
            for outgoing in self._outgoing.values():
                self._abandon(outgoing.unsent)

    def _abandon(self, requests: deque[tuple[MPI.Request, Any]]) -> None:
        for request, buffer in requests:
            if self._error is None:
                with suppress(MPI.Exception):
                    request.Cancel()
            _abandoned.append((request, buffer))
        requests.clear()

    def _check(self) -> None:
        if isinstance(self._error, HorovodInternalError):
            raise HorovodInternalError(str(self._error)) from self._error
        if self._error is not None:
            raise HvdPipeError(str(self._error)) from self._error
        if self._closed:
            raise HvdPipeError("this transport is closed.")

    def _finalize(self) -> None:
        """Use MPI no more; in whatever thread finalises it."""
        with self._changed:
            self._error = self._error or HorovodInternalError(
                "Horovod has been shut down, here or on another rank, and this pipeline with it."
            )
        self._halt()
        self._give_up()  # MPI still writes to the buffers, and MPI_COMM_SELF drops this object

    def _post(self, incoming: _Incoming) -> None:
        channel = incoming.channel
        if self._error is not None:  # what has arrived is still the caller's
            return
        while incoming.unposted and len(incoming.posted) + len(incoming.arrived) < self._depth:
            buffer = incoming.free.pop() if incoming.free else empty(channel.capacity)
            request = self._comm.Irecv([buffer, MPI.BYTE], channel.peer, int(channel.kind))
            incoming.posted.append((request, buffer))
            incoming.unposted -= 1

    # The courier.

    def _wake(self) -> None:
        self._happened = time.monotonic()
        if self._thread is None and self._is_busy():
            self._thread = threading.Thread(target=self._run, name="hvd_pipe mpi", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _is_busy(self) -> bool:
        return any(one.posted for one in self._incoming.values()) or any(
            one.unsent for one in self._outgoing.values()
        )

    def _halt(self) -> None:
        with self._changed:
            self._halting = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._halting:
                try:
                    moved = self._look()
                except Exception as error:  # it is the main thread's to raise
                    self._error = error
                    self._changed.notify_all()
                    return
                now = time.monotonic()
                if moved:
                    self._happened = now
                    self._changed.notify_all()
                pause = min(max(PAUSE * (now - self._happened), LEAST_PAUSE_S), MOST_PAUSE_S)
                self._changed.wait(pause if self._is_busy() else None)

    def _look(self) -> bool:
        """Return whether something has arrived or gone; messages of a channel do so in order."""
        moved = False
        for incoming in self._incoming.values():
            while incoming.posted:
                request, buffer = incoming.posted[0]
                size = _arrived(request, incoming.channel)
                if size is None:
                    break
                incoming.posted.popleft()
                incoming.arrived.append((buffer[:size], buffer))
                moved = True
        for outgoing in self._outgoing.values():
            while outgoing.unsent and outgoing.unsent[0][0].Test():
                outgoing.unsent.popleft()
                moved = True
        return moved


def _arrived(request: MPI.Request, channel: Channel) -> int | None:
    """Return the bytes of a message that has arrived."""
    status = MPI.Status()
    try:
        if not request.Test(status):
            return None
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_TRUNCATE:
            raise
        raise HvdPipeError(
            f"{channel} have at most {channel.capacity} bytes by the plan, and one of "
            f"{status.Get_count(MPI.BYTE)} has come. Every rank must make the same plan from the "
            "same model."
        ) from error
    return int(status.Get_count(MPI.BYTE))


def _on_delete(_communicator: MPI.Comm, _keyval: int, transport: MpiTransport) -> None:
    transport._finalize()
