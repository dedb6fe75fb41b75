"""Messages as broadcasts of Horovod's, where there is no MPI, over process sets of two ranks.

A broadcast has the same size on both sides, so a message is padded to the largest of its channel.
Its name is the channel's and one of few slots in turn, as Horovod remembers all names::

    message   0    1    2    3    4    5
    name      .0   .1   .2   .3   .0   .1      `WINDOW` slots

Horovod's own thread on each rank looks at the process sets in one and the same order, with all
ranks in step, so that broadcasts over sets that overlap do not wait for each other in a circle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.messages import Bytes, empty
from hvd_pipe.pipeline.transport import (
    DEPTH,
    WINDOW,
    Channel,
    Incoming,
    Kind,
    Outgoing,
    Transport,
    checked_size,
)
from hvd_pipe.runtime.consensus import shutdown_is_told
from hvd_pipe.runtime.watch.waits import waiting_for

_serials = itertools.count()  # ranks make transports together, so they count alike


class Handle(Protocol):
    """A pending broadcast."""

    def wait(self) -> None:
        """Block until it is done."""


Start = Callable[[Bytes, int, str, ProcessSet], Handle]
"""Starts a broadcast of Horovod's, in place, from a root rank, and returns at once."""


class ProcessSetTransport(Transport):
    """A transport over process sets; all ranks make it together."""

    def __init__(
        self,
        channels: Sequence[Channel],
        rank: int,
        sets: Mapping[tuple[int, ...], ProcessSet],
        start: Start,
        meet: Callable[[], object],
    ) -> None:
        super().__init__(channels, meet)
        self._rank, self._sets, self._start = rank, sets, start
        self._serial = next(_serials)

    def receive(self, peer: int, kind: Kind) -> Bytes:
        self._check()
        incoming = self._incoming[peer, kind]
        if not incoming.posted:
            raise incoming.unexpected()
        arriving, buffer = incoming.posted[0]
        _wait(arriving, incoming)
        incoming.posted.popleft()
        incoming.received += 1
        self._lent[id(buffer)] = buffer, buffer, incoming
        self._post(incoming)
        return buffer

    def send(self, peer: int, kind: Kind, data: Any) -> None:
        self._check()
        outgoing = self._outgoing[peer, kind]
        size = checked_size(data, outgoing.channel)
        if len(outgoing.unsent) >= WINDOW:
            self._finish_oldest(outgoing)
        message = np.frombuffer(data, np.uint8)
        if size < outgoing.channel.capacity or not message.flags.writeable:
            unpadded, message = message, empty(outgoing.channel.capacity)
            message[:size] = unpadded
            message[size:] = 0  # nothing else of this process's memory travels along
        started = self._begin(message, outgoing.channel, outgoing.sent)
        outgoing.unsent.append((started, message))
        outgoing.sent += 1
        self.sent_bytes += size

    def flush(self) -> None:
        self._check()
        for outgoing in self._outgoing.values():
            while outgoing.unsent:
                self._finish_oldest(outgoing)

    def _begin(self, buffer: Bytes, channel: Channel, number: int) -> Handle:
        root, other = (
            (self._rank, channel.peer) if channel.outgoing else (channel.peer, self._rank)
        )
        kind = channel.kind.name.lower()
        name = f"hvd_pipe.pipeline.{self._serial}.{kind}.{root}.{other}.{number % WINDOW}"
        pair = min(root, other), max(root, other)
        with shutdown_is_told():
            return self._start(buffer, root, name, self._sets[pair])

    def _post(self, incoming: Incoming) -> None:
        while incoming.unposted and len(incoming.posted) < DEPTH:
            buffer = incoming.free.pop() if incoming.free else empty(incoming.channel.capacity)
            started = self._begin(buffer, incoming.channel, incoming.posted_so_far)
            incoming.posted.append((started, buffer))
            incoming.posted_so_far += 1
            incoming.unposted -= 1

    def _finish_oldest(self, outgoing: Outgoing) -> None:
        going, _ = outgoing.unsent[0]
        _wait(going, outgoing)
        outgoing.unsent.popleft()


def _wait(handle: Handle, messages: Incoming | Outgoing) -> None:
    channel = messages.channel
    try:
        with waiting_for(messages.name):
            handle.wait()
    except HorovodInternalError as error:
        if "ismatched" not in str(error):
            raise
        raise HvdPipeError(
            f"{channel} have at most {channel.capacity} bytes by the plan of this rank, and rank "
            f"{channel.peer} has another plan. Horovod says: {error}"
        ) from error
