"""The messages that a timeline shows: when each was launched, and when it had arrived.

Where nobody hears of an arrival without asking, a thread asks while messages are on their way:
every 0.2 ms for new ones, every fiftieth of their age for old ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["NOT_SHOWN", "PendingOperation", "PendingOperations"]

_POLL_S = 2e-4
_POLL_SHARE = 0.02


@dataclass(eq=False)
class PendingOperation:
    """A message on its way."""

    message: str
    nbytes: int
    start: Any
    """The moment, as its framework's recorder knows it."""
    launched_s: float = 0.0
    slot: int = 0
    """Which no other message on its way has: the lowest that was free."""
    end_s: float | None = None
    shown_by: PendingOperations | None = None

    def complete(self) -> None:
        """Note that it has arrived, unless that is known."""
        if self.shown_by is not None:
            self.shown_by.complete(self)


NOT_SHOWN = PendingOperation("", 0, None)
"""Stands for a message that no timeline shows."""


class PendingOperations:
    """All messages of a process.

    Args:
        now: Returns the host's seconds.
        completed: Is told of each message that has arrived, before its slot is free.
        poll: Says whether the message of a handle has arrived; needed where there are handles.
    """

    def __init__(
        self,
        now: Callable[[], float],
        completed: Callable[[PendingOperation], None],
        poll: Callable[[int], bool] | None = None,
    ) -> None:
        self._now, self._completed, self._poll = now, completed, poll
        self._used: list[bool] = []
        self._changed = threading.Condition()
        self._asked: list[tuple[PendingOperation, int]] = []
        self._thread: threading.Thread | None = None
        self._halting = False

    def launch(
        self, message: str, nbytes: int, start: Any, handle: int | None = None
    ) -> PendingOperation:
        """Note that a message leaves; without a handle, who receives it completes it."""
        with self._changed:
            slot = self._used.index(False) if False in self._used else len(self._used)
            self._used[slot : slot + 1] = [True]
            operation = PendingOperation(message, nbytes, start, self._now(), slot, shown_by=self)
            if handle is None:
                return operation
            self._asked.append((operation, handle))
            if self._thread is None:
                name = "hvd_pipe timeline"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return operation

    def complete(self, operation: PendingOperation) -> None:
        """Note that a message has arrived, unless that is known."""
        with self._changed:
            if operation.end_s is not None:
                return
            operation.end_s = self._now()
        self._completed(operation)
        with self._changed:
            self._used[operation.slot] = False

    def halt(self) -> None:
        """End the thread: it must not be inside Horovod when that ends."""
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            self._halting = True
            self._changed.notify()
        thread.join()
        self._thread, self._halting, self._asked = None, False, []

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._asked or self._halting):
                    self._changed.wait()
                if self._halting:
                    return
                asked = list(self._asked)
            over = {
                id(operation) for operation, handle in asked if self._is_over(operation, handle)
            }
            with self._changed:
                self._asked = [one for one in self._asked if id(one[0]) not in over]
                if self._asked and not self._halting:
                    age = self._now() - max(operation.launched_s for operation, _ in self._asked)
                    self._changed.wait(max(_POLL_S, _POLL_SHARE * age))

    def _is_over(self, operation: PendingOperation, handle: int) -> bool:
        if operation.end_s is not None:
            return True
        try:
            if self._poll is None or not self._poll(handle):
                return False
        except Exception:
            return True  # somebody has waited for it already, and completes it
        self.complete(operation)
        return True
