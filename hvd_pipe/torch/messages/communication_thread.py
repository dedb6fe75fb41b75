"""The thread that takes operations of several phases through them, behind the backward pass."""

from __future__ import annotations

import threading
from typing import Protocol

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.torch.messages import pending

__all__ = ["CommunicationThread", "Operation", "communication_thread"]

POLL_S = 0.0002
"""How long the thread sleeps between two looks at what is on the wire."""


class Operation(Protocol):
    """An operation of several phases, as `compressed_allreduce.CompressedAllReduce`."""

    @property
    def feedback(self) -> object | None:
        """What it shares with others that must not overtake it."""

    def ready(self) -> bool:
        """Return whether the phase that is on the wire is over."""

    def advance(self) -> bool:
        """Work up to the next phase on the wire; return whether there is one."""

    def end(self, error: Exception | None) -> None:
        """Let its owner go on, or raise ``error`` there."""


class CommunicationThread:
    """Advances all operations, one phase at a time; the first one starts the thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[Operation] = []
        self._moving: list[Operation] = []
        self._halting = False
        self._thread: threading.Thread | None = None

    def take(self, operation: Operation) -> None:
        """Advance an operation to its end; returns at once."""
        with self._changed:
            self._queue.append(operation)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hvd_pipe", daemon=True)
                self._thread.start()
            self._changed.notify()

    def halt(self) -> None:
        """End the thread before Horovod and Python do, and with it what is still in flight.

        A daemon thread that is inside C++ when Python ends would end the process with an abort.
        """
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            self._halting = True
            self._changed.notify()
        thread.join()
        for operation in (*self._queue, *self._moving):
            operation.end(HvdPipeError("Horovod was shut down while this message was in flight."))
        self._queue, self._moving = [], []
        self._thread, self._halting = None, False

    def _run(self) -> None:
        busy = False
        while True:
            with self._changed:
                if not (busy or self._queue or self._halting):
                    self._changed.wait(POLL_S if self._moving else None)
                if self._halting:
                    return
                queue, self._queue = self._queue, []
            self._moving += [operation for operation in queue if operation.advance()]
            busy = self._advance_one()

    def _advance_one(self) -> bool:
        """Take one operation into its next phase, so that new ones wait for no more than that."""
        older: set[object] = set()
        for operation in self._moving:
            if operation.feedback not in older and operation.ready():
                if not operation.advance():
                    self._moving.remove(operation)
                return True
            if operation.feedback is not None:
                older.add(operation.feedback)
        return False


communication_thread = CommunicationThread()
"""The process's one."""
pending.before_shutdown(communication_thread.halt)
