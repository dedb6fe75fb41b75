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
from collections.abc import Mapping, Sequence

import torch

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime.watch.waits import sleep_between_polls, waiting_for
from hvd_pipe.torch.compression import codec_for
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.allreduce import Feedback, Message, Reduction
from hvd_pipe.torch.messages.compressed_allreduce import message_for

IN_FLIGHT = 2
"""Messages on the wire at a time: one travels while the next one is negotiated."""

LEAST_SLEEP_S = 1e-3
MOST_OF = 0.8  # a network that has become faster must show

PATIENCE_S = 10.0  # for the thread to leave what it does, in `Sender.close`


class Sender:
    """Sends a round of messages in its order, in a thread of its own.

    Args:
        messages: What travels, in the order of sending. Every round sends each of them once.
        device: Where the messages lie; None for the host's memory.
    """

    def __init__(self, messages: Sequence[Message], device: torch.device | None = None) -> None:
        self.first = messages[0]
        self._round = _Round(messages, device or torch.device("cpu"))
        self._close = weakref.finalize(self, _Round.close, self._round)
        _running.add(self._round)

    def ready(self, place: int) -> None:
        """Let the message at this place of the order leave, once those before it have left."""
        self._round.ready(place)

    def wait(self, places: Sequence[int]) -> None:
        """Block until these messages are reduced."""
        self._round.wait(places)

    def arrived(self, places: Sequence[int]) -> bool:
        """Return whether these messages are reduced."""
        return self._round.arrived(places)

    def restart(self) -> None:
        """Begin the next round; all messages of the last one have arrived."""
        self._round.restart()

    @property
    def seconds(self) -> Mapping[int, float]:
        """By place, the least time of all rounds that a message has kept the link busy."""
        return self._round.seconds

    def close(self) -> None:
        """End the thread; what has not left stays."""
        self._close()


class _Round:
    """The thread and what it knows; it does not keep the `Sender` alive."""

    def __init__(self, messages: Sequence[Message], device: torch.device) -> None:
        self._messages, self._device = messages, device
        self._changed = threading.Condition()
        self._ready: dict[int, torch.cuda.Event | None] = {}
        self._left = 0
        self._flying: list[int] = []
        self._done: set[int] = set()
        self._error: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._sent: dict[int, float] = {}
        self._free = 0.0
        self.seconds: dict[int, float] = {}

    def ready(self, place: int) -> None:
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
            self._changed.notify_all()

    def arrived(self, places: Sequence[int]) -> bool:
        return self._done.issuperset(places)

    def wait(self, places: Sequence[int]) -> None:
        if self._done.issuperset(places) and self._error is None:
            return
        with waiting_for(f"messages {list(places)} of a plan"), self._changed:
            while not self._done.issuperset(places) and self._error is None and not self._closed:
                self._changed.wait()
        if self._error is not None:
            raise self._error
        if not self._done.issuperset(places):
            raise HvdPipeError("Horovod was shut down while gradients were in flight.")

    def restart(self) -> None:
        with self._changed:
            self._ready.clear()
            self._done.clear()
            self._left = 0

    def close(self) -> None:
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
        """Send the next message, or note what has arrived; False where all are on their way."""
        with self._changed:
            while not (self._closed or self._flying or self._left in self._ready):
                self._changed.wait()
            leaves = self._may_send()
            place = self._left
            self._left += leaves
        if self._closed:
            return True
        if leaves:
            event = self._ready[place]
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
            self._sent[place] = time.monotonic()
            self._messages[place].launch()
            self._flying.append(place)
            return True
        arrived = [place for place in self._flying if self._messages[place].arrived]
        for place in arrived:
            self._flying.remove(place)
        if arrived:
            self._note_seconds(arrived)
            with self._changed:
                self._done.update(arrived)
                self._changed.notify_all()
        return bool(arrived)

    def _sleep_until_due(self) -> bool:
        """Sleep for most of what the first message takes at least, so as not to poll meanwhile."""
        place = self._flying[0]
        begun = max(self._free, self._sent[place])
        left = begun + self.seconds.get(place, 0.0) - time.monotonic()
        if left < LEAST_SLEEP_S:
            return False
        with self._changed:  # what becomes ready may leave at once
            if not (self._closed or self._may_send()):
                self._changed.wait(MOST_OF * left)
        return True

    def _may_send(self) -> bool:
        return self._left in self._ready and len(self._flying) < IN_FLIGHT

    def _note_seconds(self, places: Sequence[int]) -> None:
        """Note how long the link was busy; messages that are found together share it."""
        now = time.monotonic()
        begun = max(self._free, min(self._sent.pop(place) for place in places))
        self._free, busy = now, (now - begun) / len(places)
        for place in places:
            self.seconds[place] = min(busy, self.seconds.get(place, busy))


class OrderedMessages:
    """Makes the messages of buckets, which leave in one order.

    Args:
        order: The buckets' numbers in the order of sending; a bucket that stands there k times
            travels in k pieces.
    """

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self._made: list[OrderedMessage] = []
        self._device = torch.device("cpu")
        self._sender: Sender | None = None
        self._waited: set[OrderedMessage] = set()

    def make(
        self,
        reduction: Reduction,
        flat: torch.Tensor,
        name: str,
        exact: int = 0,
        feedback: Feedback | None = None,
    ) -> OrderedMessage:
        """Return the message of the next bucket; arguments as `compressed_allreduce.message_for`.

        What is ``exact`` travels with the last piece.
        """
        self._device = flat.device
        values = flat.numel() - exact
        count = min(self._order.count(len(self._made)), max(values, 1))
        codec = codec_for(reduction.compression, flat.dtype)
        if feedback is None and codec is not None and codec.error_feedback:
            feedback = Feedback.of(flat)
        ends = [round(values * (i + 1) / count) for i in range(count)]
        pieces, sizes, start = [], [], 0
        for i, end in enumerate(ends):
            last = i == count - 1
            part = slice(start, end + exact if last else end)
            own = feedback and Feedback(feedback.sent[part], feedback.reduced[part])
            label = name if count == 1 else f"{name}-{i}"
            pieces.append(message_for(reduction, flat[part], label, exact if last else 0, own))
            sizes.append((end - start) * flat.element_size())
            start = end
        message = OrderedMessage(pieces, sizes, feedback, self)
        self._made.append(message)
        return message

    def launch(self, message: OrderedMessage) -> None:
        """Let a message leave in its turn."""
        sender = self._sending()
        for place in message.places:
            sender.ready(place)

    def wait(self, message: OrderedMessage) -> None:
        """Block until it is reduced; the round is over with the last of all."""
        sender = self._sending()
        sender.wait(message.places)
        self._waited.add(message)
        if len(self._waited) == len(self._made):
            self._waited.clear()
            sender.restart()

    def arrived(self, message: OrderedMessage) -> bool:
        """Return whether it is reduced."""
        return self._sending().arrived(message.places)

    def meet(self) -> None:
        """Meet under the name of what leaves first: other ranks send no more until it arrives."""
        self._sending().first.meet()

    def seconds(self) -> list[tuple[int, float]]:
        """Return the bytes of each message, before compression, and how long the link was busy."""
        if self._sender is None:
            return []
        sizes = {
            place: size
            for message in self._made
            for place, size in zip(message.places, message.sizes, strict=True)
        }
        return [(sizes[place], seconds) for place, seconds in self._sender.seconds.items()]

    def close(self) -> None:
        """Send nothing more."""
        if self._sender is not None:
            self._sender.close()

    def _sending(self) -> Sender:
        if self._sender is None:
            left = [list(message.pieces) for message in self._made]
            messages: list[Message] = []
            for bucket in self._order:
                if left[bucket]:
                    self._made[bucket].places.append(len(messages))
                    messages.append(left[bucket].pop(0))
            self._sender = Sender(messages, self._device)
        return self._sender


class OrderedMessage(Message):
    """A buffer that travels in one or more pieces, each when its turn has come.

    Args:
        pieces: The messages of its pieces.
        sizes: Their bytes, before compression.
        feedback: The residuals of all of it.
        messages: What sends them.
    """

    def __init__(
        self,
        pieces: Sequence[Message],
        sizes: Sequence[int],
        feedback: Feedback | None,
        messages: OrderedMessages,
    ) -> None:
        self.sizes = sizes
        self.pieces, self.feedback, self._messages = pieces, feedback, messages
        self.places: list[int] = []
        """Where the pieces stand in the order."""
        self._launched = False

    @property
    def settled(self) -> bool:  # type: ignore[override]
        return self.pieces[-1].settled

    @property
    def arrived(self) -> bool:
        return not self._launched or self._messages.arrived(self)

    # Architecture: F1
    def launch(self) -> None:
        self._launched = True
        self._messages.launch(self)

    # Architecture: F7
    def wait(self) -> None:
        if not self._launched:
            return
        self._messages.wait(self)
        self._launched = False
        for piece in self.pieces:
            piece.wait()

    def drop_foreign_residuals(self) -> None:
        for piece in self.pieces:
            piece.drop_foreign_residuals()

    def meet(self) -> None:
        self._messages.meet()


_running: weakref.WeakSet[_Round] = weakref.WeakSet()


def _close_all() -> None:
    for each in list(_running):
        each.close()


pending.before_shutdown(_close_all)
