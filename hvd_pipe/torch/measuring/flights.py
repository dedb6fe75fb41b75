"""`runtime.timeline.flights` by way of torch's Horovod, which tells of arrivals when asked."""

from __future__ import annotations

from collections.abc import Callable

from horovod.torch.mpi_ops import poll

from hvd_pipe.runtime.timeline import flights
from hvd_pipe.runtime.timeline.flights import Flight

__all__ = ["Flight", "Flights"]


class Flights(flights.Flights):
    """All messages of a process.

    Args:
        now, landed: As `hvd_pipe.runtime.timeline.flights.Flights`.
    """

    def __init__(self, now: Callable[[], float], landed: Callable[[Flight], None]) -> None:
        super().__init__(now, landed, lambda handle: bool(poll(handle)))
