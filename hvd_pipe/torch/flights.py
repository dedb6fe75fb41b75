"""`hvd_pipe.flights` by way of torch's Horovod, which tells of an arrival only when asked."""

from __future__ import annotations

from collections.abc import Callable

from horovod.torch.mpi_ops import poll

from hvd_pipe import flights
from hvd_pipe.flights import Flight

__all__ = ["Flight", "Flights"]


class Flights(flights.Flights):
    """All messages of a process.

    Args:
        now, landed: As `hvd_pipe.flights.Flights`.
    """

    def __init__(self, now: Callable[[], float], landed: Callable[[Flight], None]) -> None:
        super().__init__(now, landed, lambda handle: bool(poll(handle)))
