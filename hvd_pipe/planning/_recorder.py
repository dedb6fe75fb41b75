"""Record the events of a simulated run, up to a limit, for a timeline."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hvd_pipe.timeline import Event

__all__ = ["MAX_EVENTS", "Recorder"]

FloatArray = npt.NDArray[np.float64]

MAX_EVENTS = 20_000
"""A timeline has the first steps, as many as fit."""


@dataclass
class Recorder:
    """Events of some workers, until there are enough."""

    workers: tuple[int, ...]
    events: list[Event] = field(default_factory=list)
    steps: int = 0
    open: bool = True

    def begin(self, messages: int, gates: int = 0) -> None:
        """Close where a step with so many messages does not fit any more."""
        count = len(self.workers) * (4 + 2 * messages + 2 * gates)
        if self.open and len(self.events) + count > MAX_EVENTS:
            if not self.events:
                raise ValueError(
                    f"a step of {len(self.workers)} workers with {messages} messages has {count} "
                    f"events, a timeline at most {MAX_EVENTS}: ask for fewer trace_workers"
                )
            self.open = False
        self.open = self.open and bool(self.workers)
        self.steps += self.open

    def add(
        self,
        name: str,
        category: str,
        lane: str,
        start: FloatArray,
        end: FloatArray,
        **args: object,
    ) -> None:
        """An event of each traced worker; ``start`` and ``end`` have one entry a worker."""
        for worker in self.now:
            self.note(
                name, category, worker, lane, float(start[worker]), float(end[worker]), **args
            )

    def note(
        self,
        name: str,
        category: str,
        worker: int,
        lane: str,
        start: float,
        end: float,
        **args: object,
    ) -> None:
        """One event; one that takes no time only where that is its nature."""
        if end > start or category == "ready":
            self.events.append(Event(name, category, worker, lane, start, end - start, args))

    @property
    def now(self) -> tuple[int, ...]:
        """The workers whose events are wanted at present."""
        return self.workers if self.open else ()
