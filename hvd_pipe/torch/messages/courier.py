"""The thread that carries exchanges from phase to phase, behind the backward pass."""

from __future__ import annotations

import threading
from typing import Protocol

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.torch.messages import in_flight

__all__ = ["Courier", "Parcel", "courier"]

POLL_S = 0.0002
"""How long the courier sleeps between two looks at what is on the wire."""


class Parcel(Protocol):
    """What the courier carries: an `hvd_pipe.torch.messages.exchange.Exchange`."""

    @property
    def feedback(self) -> object | None:
        """What it shares with others that must not overtake it."""

    def ready(self) -> bool:
        """Return whether the phase that is on the wire is over."""

    def advance(self) -> bool:
        """Work up to the next phase on the wire; return whether there is one."""

    def end(self, error: Exception | None) -> None:
        """Let its owner go on, or raise ``error`` there."""


class Courier:
    """The thread that carries all exchanges; started by the first one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[Parcel] = []
        self._moving: list[Parcel] = []
        self._halting = False
        self._thread: threading.Thread | None = None

    def take(self, exchange: Parcel) -> None:
        """Carry an exchange; returns at once."""
        with self._changed:
            self._queue.append(exchange)
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
        for exchange in (*self._queue, *self._moving):
            exchange.end(HvdPipeError("Horovod was shut down while this message was in flight."))
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
            self._moving += [exchange for exchange in queue if exchange.advance()]
            busy = self._hand_over_one()

    def _hand_over_one(self) -> bool:
        """Take one exchange into its next phase, so that new ones wait for no more than that.

        One that shares its `Feedback` with an older one waits for it, as residuals go from step to
        step.
        """
        older: set[object] = set()
        for exchange in self._moving:
            if exchange.feedback not in older and exchange.ready():
                if not exchange.advance():
                    self._moving.remove(exchange)
                return True
            if exchange.feedback is not None:
                older.add(exchange.feedback)
        return False


courier = Courier()
"""The process's one."""
in_flight.before_shutdown(courier.halt)
