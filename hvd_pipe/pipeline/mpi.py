"""Messages over MPI, by mpi4py: non-blocking sends, and receives posted before they are needed.

MPI moves a large message only while someone is inside one of its functions. The main thread
computes meanwhile, so a communication thread asks how the messages are::

    main            send(3) ...... compute ...... receive(4) waits ...... compute
    communication     test . test .. test ... test    test -> it is here

It sleeps between two looks for a tenth of the time since something last happened, within
`LEAST_PAUSE_S` and `MOST_PAUSE_S`, and for good while nothing is on its way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from horovod.common.exceptions import HorovodInternalError

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.messages import Bytes, empty
from hvd_pipe.pipeline.transport import (
    DEPTH,
    WINDOW,
    Channel,
    Incoming,
    Kind,
    Transport,
    checked_size,
)
from hvd_pipe.runtime.watch.waits import waiting_for

try:
    from mpi4py import MPI
except ImportError as error:
    raise HvdPipeError(
        f"pipelines over MPI need mpi4py ({error}): pip install mpi4py, built for the MPI that "
        'Horovod runs over, or use transport="process-sets".'
    ) from error


LEAST_PAUSE_S, MOST_PAUSE_S = 1e-4, 1e-3
PAUSE = 0.1


def check(rank: int, size: int) -> None:
    """Check that mpi4py and Horovod are in the same job, and that threads may share MPI."""
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


class MpiTransport(Transport):
    """A transport over MPI; all ranks make it at the same time."""

    def __init__(self, channels: Sequence[Channel], meet: Callable[[], object]) -> None:
        super().__init__(channels, meet)
        self._happened = time.monotonic()
        self._halting = False
        self._thread = threading.Thread(target=self._run, name="hvd_pipe mpi", daemon=True)
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
            self._thread.start()

    # Architecture: D3
    def receive(self, peer: int, kind: Kind) -> Bytes:
        incoming = self._incoming[peer, kind]
        with self._changed, waiting_for(incoming.name):
            while not incoming.arrived:
                self._check()
                if not incoming.posted:
                    raise incoming.unexpected()
                self._changed.wait()
            message, buffer = incoming.arrived.popleft()
            incoming.received += 1
            self._lent[id(message)] = message, buffer, incoming
            self._post(incoming)
        return message

    # Architecture: D9
    def send(self, peer: int, kind: Kind, data: Any) -> None:
        outgoing = self._outgoing[peer, kind]
        size = checked_size(data, outgoing.channel)
        with self._changed:
            self._check()
            if len(outgoing.unsent) >= WINDOW:
                with waiting_for(outgoing.name):
                    while len(outgoing.unsent) >= WINDOW:
                        self._changed.wait()
                        self._check()
            request = self._comm.Isend([data, size, MPI.BYTE], peer, int(kind))
            outgoing.unsent.append((request, data))
            outgoing.sent += 1
            self.sent_bytes += size
            self._happened = time.monotonic()
            self._changed.notify_all()

    def flush(self) -> None:
        with self._changed:
            self._check()
            while any(one.unsent for one in self._outgoing.values()):
                # Another wait whenever some has gone.
                with waiting_for("the rest of what was sent"):
                    self._changed.wait()
                self._check()

    def _give_up(self) -> None:
        with self._changed:
            self._halting = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        with self._changed:
            if self._error is None:
                for request, _ in chain(*self._queues()):
                    with suppress(MPI.Exception):
                        request.Cancel()
        super()._give_up()

    def _finalize(self) -> None:
        """Use MPI no more; in whatever thread finalises it."""
        with self._changed:
            self._error = self._error or HorovodInternalError(
                "Horovod has been shut down, here or on another rank, and this pipeline with it."
            )
        self._give_up()  # MPI still writes to the buffers, and MPI_COMM_SELF drops this object

    def _post(self, incoming: Incoming) -> None:
        if self._error is not None:  # what has arrived is still the caller's
            return
        channel = incoming.channel
        while incoming.unposted and len(incoming.posted) + len(incoming.arrived) < DEPTH:
            buffer = incoming.free.pop() if incoming.free else empty(channel.capacity)
            request = self._comm.Irecv([buffer, MPI.BYTE], channel.peer, int(channel.kind))
            incoming.posted.append((request, buffer))
            incoming.unposted -= 1
        self._happened = time.monotonic()
        self._changed.notify_all()

    # The communication thread.

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
                is_busy = any(one.posted for one in self._incoming.values()) or any(
                    one.unsent for one in self._outgoing.values()
                )
                self._changed.wait(pause if is_busy else None)

    def _look(self) -> bool:
        """Return whether something has arrived or gone; messages of a channel do so in order."""
        moved, status = False, MPI.Status()
        for incoming in self._incoming.values():
            while incoming.posted:
                request, buffer = incoming.posted[0]
                try:
                    if not request.Test(status):
                        break
                except MPI.Exception as error:
                    if error.Get_error_class() != MPI.ERR_TRUNCATE:
                        raise
                    raise HvdPipeError(
                        f"{incoming.name} have at most {incoming.channel.capacity} bytes by the "
                        f"plan, and one of {status.Get_count(MPI.BYTE)} has come. Every rank must "
                        "make the same plan from the same model."
                    ) from error
                incoming.posted.popleft()
                incoming.arrived.append((buffer[: status.Get_count(MPI.BYTE)], buffer))
                moved = True
        for outgoing in self._outgoing.values():
            while outgoing.unsent and outgoing.unsent[0][0].Test():
                outgoing.unsent.popleft()
                moved = True
        return moved


def _on_delete(_communicator: MPI.Comm, _keyval: int, transport: MpiTransport) -> None:
    transport._finalize()
