"""The messages that a timeline shows: when each was launched, and when it had arrived.

Where nobody hears of an arrival without asking, a thread asks while messages are on their way:
every 0.2 ms for new ones, every fiftieth of their age for old ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Flight", "Flights"]

_POLL_S = 2e-4
_POLL_SHARE = 0.02


@dataclass(eq=False)
class Flight:
    """A message on its way."""

    flights: Flights
    message: str
    nbytes: int
    start: Any
    """The moment, as its framework's recorder knows it."""
    launched_s: float
    slot: int
    """Which no other message on its way has: the lowest that was free."""
    end_s: float | None = None

    def land(self) -> None:
        """Note that it has arrived, unless that is known."""
        self.flights.land(self)


class Flights:
    """All messages of a process.

    Args:
        now: Returns the host's seconds.
        landed: Is told of each message that has arrived, before its slot is free.
        poll: Says whether the message of a handle has arrived; needed where there are handles.
    """

    def __init__(
        self,
        now: Callable[[], float],
        landed: Callable[[Flight], None],
        poll: Callable[[int], bool] | None = None,
    ) -> None:
        self._now, self._landed, self._poll = now, landed, poll
        self._used: list[bool] = []
        self._changed = threading.Condition()
        self._asked: list[tuple[Flight, int]] = []
        self._thread: threading.Thread | None = None
        self._halting = False

    def launch(self, message: str, nbytes: int, start: Any, handle: int | None = None) -> Flight:
        """Note that a message leaves; without a handle, who receives it lets it land."""
        with self._changed:
            slot = self._used.index(False) if False in self._used else len(self._used)
            self._used[slot : slot + 1] = [True]
            flight = Flight(self, message, nbytes, start, self._now(), slot)
            if handle is None:
                return flight
            self._asked.append((flight, handle))
            if self._thread is None:
                name = "hvd_pipe timeline"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return flight

    def land(self, flight: Flight) -> None:
        """Note that a message has arrived, unless that is known."""
        with self._changed:
            if flight.end_s is not None:
                return
            flight.end_s = self._now()
        self._landed(flight)
        with self._changed:
            self._used[flight.slot] = False

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
            over = {id(flight) for flight, handle in asked if self._is_over(flight, handle)}
            with self._changed:
                self._asked = [one for one in self._asked if id(one[0]) not in over]
                if self._asked and not self._halting:
                    age = self._now() - max(flight.launched_s for flight, _ in self._asked)
                    self._changed.wait(max(_POLL_S, _POLL_SHARE * age))

    def _is_over(self, flight: Flight, handle: int) -> bool:
        if flight.end_s is not None:
            return True
        try:
            if self._poll is None or not self._poll(handle):
                return False
        except Exception:
            return True  # somebody has waited for it already, and lets it land
        self.land(flight)
        return True
