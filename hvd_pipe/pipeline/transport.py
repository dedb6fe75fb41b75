"""Who the workers are, and how messages travel between them: what a transport does, the choice.

===================  ==========================  ================================================
transport            needs                       a message is
===================  ==========================  ================================================
``"mpi"``            Horovod over MPI, mpi4py    a non-blocking send, and a receive posted ahead
``"process-sets"``   dynamic process sets        a broadcast over the two ranks, padded to the
                                                 largest message of its channel
===================  ==========================  ================================================
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from horovod.common.exceptions import HorovodInternalError

from hvd_pipe.errors import HvdPipeError, is_failing
from hvd_pipe.pipeline.messages import Bytes
from hvd_pipe.planning.schedule import Worker

T = TypeVar("T")

TRANSPORTS = ("auto", "mpi", "process-sets")
DEPTH = 2  # messages of a channel that may arrive before anyone asks for them
WINDOW = 4  # messages of a channel that may be on their way before `Transport.send` waits
MOST_BYTES = (1 << 31) - 1  # MPI and Horovod count bytes in a C int


@dataclass(frozen=True)
class Layout:
    """The workers of a pipeline, by rank.

    Example:
        >>> layout = Layout((2, 1))
        >>> [str(layout.worker(rank)) for rank in range(layout.size)]
        ['stage 0 replica 0', 'stage 0 replica 1', 'stage 1 replica 0']
        >>> layout.rank(Worker(1, 0)), layout.ranks(0)
        (2, (0, 1))
        >>> list(layout.neighbours())
        [(0, 2), (1, 2)]
    """

    replicas: tuple[int, ...]

    @property
    def size(self) -> int:
        """Workers of all stages together."""
        return sum(self.replicas)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.replicas)

    def worker(self, rank: int) -> Worker:
        """Return what this rank is."""
        left = rank
        for stage, width in enumerate(self.replicas):
            if left < width:
                return Worker(stage, left)
            left -= width
        raise ValueError(f"rank {rank} is outside of a pipeline of {self.size} workers")

    def rank(self, worker: Worker) -> int:
        """Return the rank of a worker."""
        return sum(self.replicas[: worker.stage]) + worker.replica

    def ranks(self, stage: int) -> tuple[int, ...]:
        """Return the ranks of a stage's replicas."""
        first = sum(self.replicas[:stage])
        return tuple(range(first, first + self.replicas[stage]))

    def neighbours(self) -> Iterator[tuple[int, int]]:
        """Yield the pairs of ranks that ever exchange messages, alike on every rank."""
        for stage in range(self.stages - 1):
            pairs = set()
            # Microbatch u is the work of replica u mod R of both stages.
            for u in range(self.replicas[stage] * self.replicas[stage + 1]):
                left = self.rank(Worker(stage, u % self.replicas[stage]))
                right = self.rank(Worker(stage + 1, u % self.replicas[stage + 1]))
                pairs.add((left, right))
            yield from sorted(pairs)


class Kind(IntEnum):
    """What a message carries."""

    ACTIVATION = 0
    GRADIENT = 1


@dataclass(frozen=True)
class Channel:
    """Messages of one kind between this rank and another, in one direction."""

    peer: int
    kind: Kind
    outgoing: bool
    capacity: int

    def __str__(self) -> str:
        way = "to" if self.outgoing else "from"
        return f"{self.kind.name.lower()} messages {way} rank {self.peer}"


class Incoming:
    """Messages of a channel that this rank receives."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.name = channel, str(channel)
        self.unposted = self.posted_so_far = self.received = 0
        self.posted: deque[tuple[Any, Bytes]] = deque()  # a request, and the buffer it fills
        self.arrived: deque[tuple[Bytes, Bytes]] = deque()  # a message, and its buffer
        self.free: list[Bytes] = []

    def unexpected(self) -> HvdPipeError:
        """Return the error of a message that nobody has announced."""
        return HvdPipeError(
            f"no {self.name} are expected after {self.received}: "
            "call expect() with how many will come."
        )


class Outgoing:
    """Messages of a channel that this rank sends."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.name = channel, str(channel)
        self.unsent: deque[tuple[Any, Any]] = deque()  # a request, and what it sends
        self.sent = 0


class _ByPeer(dict[tuple[int, Kind], T]):
    """The channels of one direction, by peer and kind."""

    def __missing__(self, key: tuple[int, Kind]) -> T:
        known = [f"{kind.name.lower()} with rank {rank}" for rank, kind in self]
        raise ValueError(
            f"there is no channel of {Kind(key[1]).name.lower()} messages with rank {key[0]} in "
            f"this direction; those there are: {', '.join(known) or 'none'}"
        )


class Transport(ABC):
    """Carries whole messages between ranks, in order within a channel; for the main thread."""

    def __init__(self, channels: Sequence[Channel], meet: Callable[[], object]) -> None:
        self.sent_bytes = 0
        """Bytes of all messages that `send` has taken so far."""
        self._meet = meet
        self._incoming = _ByPeer(
            {(one.peer, one.kind): Incoming(one) for one in channels if not one.outgoing}
        )
        self._outgoing = _ByPeer(
            {(one.peer, one.kind): Outgoing(one) for one in channels if one.outgoing}
        )
        self._lent: dict[int, tuple[Bytes, Bytes, Incoming]] = {}
        self._changed = threading.Condition()  # guards all of this, where there is a thread
        self._error: Exception | None = None
        self._closed = False

    def expect(self, peer: int, kind: Kind, count: int) -> None:
        """Say that so many more messages will come; the first `DEPTH` may do so at once."""
        incoming = self._incoming[peer, kind]
        if count < 0:
            raise ValueError(f"count must be at least 0, got {count}")
        with self._changed:
            self._check()
            incoming.unposted += count
            self._post(incoming)

    @abstractmethod
    def receive(self, peer: int, kind: Kind) -> Bytes:
        """Wait for the oldest expected message; its buffer is the caller's until `recycle`."""

    def recycle(self, buffer: Bytes) -> None:
        """Take back, for further messages, a buffer that `receive` has returned."""
        lent = self._lent.pop(id(buffer), None)
        if lent is None:
            raise ValueError("only a buffer that receive() has returned can be recycled, and once")
        _, whole, incoming = lent
        with self._changed:
            incoming.free.append(whole)

    @abstractmethod
    def send(self, peer: int, kind: Kind, data: Any) -> None:
        """Send a message, which must not change any more; waits only for one `WINDOW` ago."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until all that was sent has gone."""

    def close(self, meet: bool = True) -> None:
        """Drop pending messages, and wait until all ranks have done so."""
        if self._closed:
            return
        self._closed = True
        self._give_up()
        if meet and self._error is None and not is_failing():
            # The others may still be about to receive what this rank has sent.
            self._meet()
        self._lent.clear()
        for incoming in self._incoming.values():
            incoming.free.clear()
            incoming.arrived.clear()

    def _check(self) -> None:
        if self._error is not None:
            is_horovod = isinstance(self._error, HorovodInternalError)
            kind = HorovodInternalError if is_horovod else HvdPipeError
            raise kind(str(self._error)) from self._error
        if self._closed:
            raise HvdPipeError("this transport is closed.")

    @abstractmethod
    def _post(self, incoming: Incoming) -> None:
        """Receive ahead what is announced, up to `DEPTH` messages."""

    def _give_up(self) -> None:
        """Keep the memory of all that is on its way, which may still be written to or read."""
        with self._changed:
            for queue in self._queues():
                _abandoned.extend(queue)
                queue.clear()

    def _queues(self) -> list[deque[tuple[Any, Any]]]:
        """Return the pending messages of each channel."""
        incoming = [one.posted for one in self._incoming.values()]
        return incoming + [one.unsent for one in self._outgoing.values()]


_abandoned: list[object] = []


def check_transport(transport: str) -> None:
    """Check the name of a transport; ValueError says which there are."""
    if transport not in TRANSPORTS:
        raise ValueError(f"transport must be one of {', '.join(TRANSPORTS)}, got {transport!r}")


def chosen(transport: str, mpi_enabled: bool) -> str:
    """Return the transport that a job uses."""
    check_transport(transport)
    if transport == "auto":
        return "mpi" if mpi_enabled else "process-sets"
    if transport == "mpi" and not mpi_enabled:
        raise HvdPipeError(
            'transport="mpi" needs Horovod over MPI, and this job was started over Gloo: start it '
            'with mpirun or `horovodrun --mpi`, or use transport="process-sets".'
        )
    return transport


def channels_of(
    layout: Layout, rank: int, before: tuple[int, int] | None, after: tuple[int, int] | None
) -> Iterator[Channel]:
    """Yield what a worker sends to and receives from each neighbour."""
    for left, right in layout.neighbours():
        if rank == right and before is not None:
            yield Channel(left, Kind.ACTIVATION, False, before[0])
            yield Channel(left, Kind.GRADIENT, True, before[1])
        if rank == left and after is not None:
            yield Channel(right, Kind.ACTIVATION, True, after[0])
            yield Channel(right, Kind.GRADIENT, False, after[1])


def checked_size(data: Any, channel: Channel) -> int:
    """Return the bytes of a message: an array, a tensor, or anything with the buffer interface."""
    size = int(data.nbytes if hasattr(data, "nbytes") else memoryview(data).nbytes)
    if size > channel.capacity:
        raise HvdPipeError(
            f"{channel} have at most {channel.capacity} bytes by the plan, got one of {size}: "
            "profile and plan with the largest minibatch."
        )
    return size
