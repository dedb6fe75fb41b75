"""Messages that leave in a fixed order, a few at a time, whatever the order they are ready in.

Messages that travel behind the next forward pass are wanted in the order of the layers, and the
link carries one after the other. So each waits until those before it have left::

    ready       3 . 2 . . 1 . 0          in the order of the backward pass
    on the wire 3-3-2-2-0-0-1-1          as the plan says: what is needed first goes first

The order is the same on all ranks, or ranks that each send two would wait for each other for ever.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Collection, Sequence
from statistics import median

import torch

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime.watch.waits import sleep_between_polls, waiting_for
from hvd_pipe.torch.compression import codec_for
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.allreduce import (
    Feedback,
    Message,
    Reduction,
    Zeros,
    launch_zeros,
    meet,
)
from hvd_pipe.torch.messages.compressed_allreduce import message_for
from hvd_pipe.torch.messages.group import Group

IN_FLIGHT = 2
"""Messages on the wire at a time: one travels while the next one is negotiated."""

LEAST_SLEEP_S = 1e-3
MOST_OF = 0.8  # a network that has become faster must show

ROUNDS = 5  # of which a message's median time is taken

PATIENCE_S = 10.0  # for the thread to leave what it does, in `Sender.close`


class Sender:
    """Sends a round of messages in their order, in a thread of its own."""

    def __init__(self, messages: Sequence[Message], device: torch.device) -> None:
        self.messages, self._device = messages, device
        self._changed = threading.Condition()
        self._ready: dict[int, torch.cuda.Event | None] = {}
        self._next = 0
        self._pending: list[int] = []
        self._done: set[int] = set()
        self._waited: set[int] = set()
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._sent: dict[int, float] = {}
        self._link_free = 0.0
        self.seconds: dict[int, float] = {}
        """By place, how long a message keeps the link busy: the least time of all rounds."""
        _running.add(self)

    def ready(self, place: int) -> None:
        """Let the message at this place of the order leave after those before it."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.current_stream(self._device).record_event()
        with self._changed:
            self._ready[place] = event
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._run, name="hvd_pipe sender", daemon=True
                )
                self._thread.start()
            self._send_ready()
            self._changed.notify_all()

    def _send_ready(self) -> None:
        """Send what may leave, unless the thread does."""

    def arrived(self, places: Sequence[int]) -> bool:
        return self._done.issuperset(places)

    def wait(self, places: Sequence[int]) -> None:
        """Block until these messages are reduced; the round is over with the last of all."""
        if not self._done.issuperset(places) or self._error is not None:
            with waiting_for(f"messages {list(places)} of a plan"), self._changed:
                self._changed.wait_for(
                    lambda: self._done.issuperset(places) or self._error or self._closed
                )
            if self._error is not None:
                raise self._error
            if not self._done.issuperset(places):
                raise HvdPipeError("Horovod was shut down while gradients were in flight.")
        self._waited.update(places)
        if len(self._waited) == len(self.messages):
            with self._changed:
                self._ready.clear()
                self._done.clear()
                self._waited.clear()
                self._next = 0

    def close(self) -> None:
        """End the thread; messages that have not left are not sent."""
        thread = self._thread
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(PATIENCE_S)
        _running.discard(self)

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":  # a thread begins on the first one
                torch.cuda.set_device(self._device)
            begun = time.monotonic()
            while not self._closed:
                if self._advance():
                    begun = time.monotonic()
                elif not self._sleep_until_due():
                    sleep_between_polls(begun)
        except BaseException as error:  # it is raised where the message is waited for
            with self._changed:
                self._error = error
                self._changed.notify_all()

    # Architecture: F2
    def _advance(self) -> bool:
        """Send the next message, or record arrivals; return whether there was either."""
        with self._changed:
            while not (self._closed or self._pending or self._next in self._ready):
                self._changed.wait()
            leaves = self._may_send()
            place = self._next
            self._next += leaves
        if self._closed:
            return True
        if leaves:
            self._launch(place)
            return True
        arrived = [place for place in self._pending if self.messages[place].arrived]
        for place in arrived:
            self._pending.remove(place)
        if arrived:
            self._note_seconds(arrived)
            with self._changed:
                self._done.update(arrived)
                self._changed.notify_all()
        return bool(arrived)

    def _launch(self, place: int) -> None:
        event = self._ready[place]
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        self._sent[place] = time.monotonic()
        self.messages[place].launch()
        self._pending.append(place)

    def _sleep_until_due(self) -> bool:
        """Sleep for most of the least time of the first message, instead of polling."""
        place = self._pending[0]
        begun = max(self._link_free, self._sent[place])
        left = begun + self.seconds.get(place, 0.0) - time.monotonic()
        if left < LEAST_SLEEP_S:
            return False
        with self._changed:  # what becomes ready may leave at once
            if not (self._closed or self._may_send()):
                self._changed.wait(MOST_OF * left)
        return True

    def _may_send(self) -> bool:
        return self._next in self._ready and len(self._pending) < IN_FLIGHT

    def _note_seconds(self, places: Sequence[int]) -> None:
        """Record how long the link was busy; messages that arrive together share that time."""
        now = time.monotonic()
        begun = max(self._link_free, min(self._sent.pop(place) for place in places))
        self._link_free, busy = now, (now - begun) / len(places)
        for place in places:
            self._note_busy(place, busy)

    def _note_busy(self, place: int, seconds: float) -> None:
        self.seconds[place] = min(seconds, self.seconds.get(place, seconds))


class GroupSender(Sender):
    """Sends messages that a `Group` carries: at once, and in a thread that sleeps until later.

    Two share the link, so each takes a median time, and not its least one. None is sent behind the
    messages in ``alone`` before they have arrived.
    """

    def __init__(
        self, messages: Sequence[Message], device: torch.device, alone: Collection[int]
    ) -> None:
        super().__init__(messages, device)
        self._alone = alone
        self._times: defaultdict[int, list[float]] = defaultdict(list)

    def _may_send(self) -> bool:
        return super()._may_send() and not any(place in self._alone for place in self._pending)

    def _note_busy(self, place: int, seconds: float) -> None:
        self._times[place] = [*self._times[place][1 - ROUNDS :], seconds]
        self.seconds[place] = median(self._times[place])

    def _send_ready(self) -> None:
        while not self._closed and self._may_send():
            self._launch(self._next)
            self._next += 1

    def _advance(self) -> bool:
        with self._changed:
            while not (self._closed or self._pending):
                self._changed.wait()
            if self._closed:
                return True
            place = self._pending[0]
        self.messages[place].wait()
        with self._changed:
            self._pending.remove(place)
            self._note_seconds([place])
            self._done.add(place)
            self._send_ready()
            self._changed.notify_all()
        return True


class OrderedMessages:
    """Makes the messages of buckets; one that is k times in ``order`` travels in k pieces."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self._messages: list[OrderedMessage] = []
        self._sender: Sender | None = None
        self._group: Group | None = None

    def make(
        self,
        reduction: Reduction,
        flat: torch.Tensor,
        name: str,
        exact: int = 0,
        feedback: Feedback | None = None,
    ) -> OrderedMessage:
        """Return the message of the next bucket; what is ``exact`` travels with the last piece."""
        self._group = reduction.group
        values = flat.numel() - exact
        count = min(self._order.count(len(self._messages)), max(values, 1))
        codec = codec_for(reduction.compression, flat.dtype)
        if feedback is None and codec is not None and codec.error_feedback:
            feedback = Feedback.of(flat)
        message = OrderedMessage(self, flat.device, feedback)
        start = 0
        for i in range(count):
            last, end = i == count - 1, round(values * (i + 1) / count)
            part = slice(start, end + exact if last else end)
            piece_feedback = feedback and Feedback(feedback.sent[part], feedback.reduced[part])
            label = name if count == 1 else f"{name}-{i}"
            piece = message_for(reduction, flat[part], label, exact if last else 0, piece_feedback)
            message.pieces.append(piece)
            message.sizes.append((end - start) * flat.element_size())
            start = end
        self._messages.append(message)
        return message

    @property
    def sender(self) -> Sender:
        """The sender of all messages, which must have been made before its first use."""
        if self._sender is None:
            unplaced = [list(message.pieces) for message in self._messages]
            messages: list[Message] = []
            for bucket in self._order:
                if unplaced[bucket]:
                    self._messages[bucket].places.append(len(messages))
                    messages.append(unplaced[bucket].pop(0))
            last = self._messages[-1]
            if self._group is None:
                self._sender = Sender(messages, last.device)
            else:  # the last bucket has the weights that forward needs first
                self._sender = GroupSender(messages, last.device, alone=last.places)
            weakref.finalize(self, self._sender.close)
        return self._sender

    def seconds(self) -> list[tuple[int, float]]:
        """Return the bytes of each message, before compression, and how long the link was busy."""
        seconds = {} if self._sender is None else self._sender.seconds
        return [
            (size, seconds[place])
            for message in self._messages
            for place, size in zip(message.places, message.sizes, strict=False)
            if place in seconds
        ]

    def close(self) -> None:
        """Send nothing more."""
        if self._sender is not None:
            self._sender.close()


class OrderedMessage(Message):
    """A buffer that travels in one or more pieces, each when its turn has come."""

    def __init__(
        self, messages: OrderedMessages, device: torch.device, feedback: Feedback | None
    ) -> None:
        self._messages, self.device, self.feedback = messages, device, feedback
        self.pieces: list[Message] = []
        self.sizes: list[int] = []
        """The bytes of the pieces, before compression."""
        self.places: list[int] = []
        """Where the pieces stand in the order."""
        self._launched = False

    @property
    def settled(self) -> bool:  # type: ignore[override]
        return self.pieces[-1].settled

    @property
    def arrived(self) -> bool:
        return not self._launched or self._messages.sender.arrived(self.places)

    # Architecture: F1
    def launch(self) -> None:
        self._launched, sender = True, self._messages.sender
        for place in self.places:
            sender.ready(place)

    # Architecture: F7
    def wait(self) -> None:
        if not self._launched:
            return
        self._messages.sender.wait(self.places)
        self._launched = False
        for piece in self.pieces:
            piece.wait()

    def launch_zeros(self, meets: bool = False) -> list[Zeros]:
        sender = self._messages.sender
        if not isinstance(sender, GroupSender):
            return super().launch_zeros(meets)
        return launch_zeros(sender.messages, meets)

    def drop_foreign_residuals(self) -> None:
        for piece in self.pieces:
            piece.drop_foreign_residuals()

    def meet(self) -> None:
        sender = self._messages.sender
        if isinstance(sender, GroupSender):
            meet(sender.messages)
        else:
            # Under the name of what leaves first: other ranks send no more until it arrives.
            sender.messages[0].meet()


_running: weakref.WeakSet[Sender] = weakref.WeakSet()


def _close_all() -> None:
    for sender in list(_running):
        sender.close()


pending.before_shutdown(_close_all)
