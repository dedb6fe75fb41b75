"""All-reduce one flat buffer in place, also through a compressor such as ``Compression.fp16``.

A `Message` is a buffer that travels again and again under one name. `message_for` in
`compressed_allreduce` returns the one that a `Reduction` asks for::

    message = message_for(reduction, flat, "gradients.0")
    message.launch()    the buffer belongs to the network from here
    message.wait()      it holds the reduced values, the same bits on every rank
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from horovod.torch.mpi_ops import Average, ProcessSet, allreduce_async_, global_process_set

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.codec import CODECS, CodecCost
from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.timeline import NOT_SHOWN
from hvd_pipe.torch.checking import spoil
from hvd_pipe.torch.compression import Compression, codec_for
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.pending import follow_horovod

SENT, REDUCED = "own.sent", "own.reduced"
"""A checkpoint's labels of the residuals in `Feedback.sent` and `Feedback.reduced`."""


@dataclass
class Traffic:
    """Counts what this rank sends."""

    sent_bytes: float = 0.0
    """Bytes on the wire so far: ``2 (n-1)/n`` of each message, the least that n workers need."""

    def add(self, nbytes: int, workers: int) -> None:
        """Count a message that is ``nbytes`` long as it travels."""
        self.sent_bytes += 2 * (workers - 1) / workers * nbytes


@dataclass(eq=False)
class Feedback:
    """The residuals of error feedback: each is added to what is encoded next.

    Messages of the same layout that carry one gradient in turn share one. Its tensors may be read
    and written while none of these is between `Message.launch` and `Message.wait`, to save and
    restore them.

    Args:
        sent: Lost where this rank encoded its own values; float32, of the buffer's size.
        reduced: Lost where it encoded the sums of its slice; the same, zero outside the slice.
    """

    sent: torch.Tensor
    reduced: torch.Tensor

    @classmethod
    def of(cls, flat: torch.Tensor) -> Feedback:
        """Return a feedback for buffers like ``flat`` that have lost nothing yet."""
        sent, reduced = (torch.zeros_like(flat, dtype=torch.float32) for _ in range(2))
        return cls(sent, reduced)


class Message(abc.ABC):
    """A flat buffer that is reduced in place; see the module's docstring."""

    feedback: Feedback | None = None
    """The residuals of a lossy codec with error feedback."""

    @property
    def residuals(self) -> dict[str, torch.Tensor]:
        """The residuals by their labels in a checkpoint, each of the buffer's size."""
        feedback = self.feedback
        return {} if feedback is None else {SENT: feedback.sent, REDUCED: feedback.reduced}

    settled = False
    """Whether Horovod alone has written what `wait` has left in the buffer."""

    @abc.abstractmethod
    def launch(self) -> None:
        """Send the buffer; it belongs to the network until `wait`."""

    @property
    @abc.abstractmethod
    def arrived(self) -> bool:
        """Whether `wait` would return, or raise, at once."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until the buffer holds the reduced values; at once if nothing was launched."""

    def drop_foreign_residuals(self) -> None:  # noqa: B027 - most messages keep none
        """Set to zero what `feedback` has of sums that other ranks encode."""

    @abc.abstractmethod
    def meet(self) -> None:
        """Wait for all ranks to call this; nothing of this message is in flight.

        What is sent has the message's name and another size. Horovod compares sizes, so a rank
        that sends the message itself instead is told, as are the ones that wait for it here.

        Raises:
            HvdPipeError: Another rank has sent the message.
        """


@dataclass(frozen=True)
class Reduction:
    """How a buffer is reduced over the ranks; Horovod's own arguments and meanings.

    Args:
        op, gradient_predivide_factor, compression, process_set: As in Horovod.
        traffic: Counts the bytes that are sent.
        weights: In a weighted average, one positive number a rank of the process set: rank i
            counts ``weights[i] / sum(weights)``. Empty for equal weights.
    """

    op: Any = Average
    gradient_predivide_factor: float = 1.0
    compression: Any = Compression.none
    process_set: ProcessSet = global_process_set
    traffic: Traffic = field(default_factory=Traffic)
    weights: tuple[float, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether this rank has nobody to reduce with, or is no member of the process set."""
        # Not size(): it waits for a lock that Horovod's own thread holds for most of each cycle
        # once process sets have been added, and a busy machine may give it none for minutes.
        return not self.process_set.included() or len(self.process_set.ranks) == 1

    @property
    def workers(self) -> int:
        """How many ranks reduce."""
        return 1 if self.alone else len(self.process_set.ranks)

    @property
    def factor(self) -> float:
        """What this rank's values are multiplied by, so that their plain mean is the weighted.

        Horovod wants the same factors from all ranks, so each scales its message itself.
        """
        if self.alone or not self.weights:
            return 1.0
        mine = float(self.weights[self.process_set.rank()])
        return mine * len(self.weights) / sum(self.weights)

    def ratio(self, like: torch.Tensor) -> float:
        """Return the bytes that are sent over the bytes of a buffer of this dtype."""
        codec = codec_for(self.compression, like.dtype)
        if codec is not None:
            return codec.nbytes(2**20) / (2**20 * like.element_size())
        sample = like.new_zeros(1024)
        wire, _ = self.compression.compress(sample)
        return float(wire.nbytes / sample.nbytes)

    def cost(self, like: torch.Tensor) -> CodecCost:
        """Return what compression costs a buffer of this dtype, on this kind of device."""
        ratio, codec = self.ratio(like), codec_for(self.compression, like.dtype)
        if codec is None:
            return CodecCost("wire", ratio)
        known = CODECS[codec.name]
        seconds = known.seconds_per_byte if like.device.type == "cpu" else 0.0
        return replace(known, ratio=ratio, seconds_per_byte=seconds)

    # Architecture: G4
    def launch(self, tensor: torch.Tensor, name: str) -> int:
        """Start an all-reduce in place and return its handle."""
        check_mode.active.delay()
        factor = self.gradient_predivide_factor if self.op == Average else 1.0
        with pending.explaining():
            handle = allreduce_async_(
                tensor,
                name=name,
                op=self.op,
                prescale_factor=1.0 / factor,
                postscale_factor=factor,
                process_set=self.process_set,
            )
        self.traffic.add(tensor.nbytes, self.workers)
        return pending.sent(handle)

    def reduce(self, tensor: torch.Tensor, name: str) -> None:
        """All-reduce in place and wait for it."""
        pending.wait(self.launch(tensor, name))


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as Horovod can copy it, over the same memory, where it lacks the dtype."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach())
    other = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}.get(tensor.dtype)
    return tensor if other is None else tensor.detach().view(other)


class AllReduce(Message):
    """One Horovod all-reduce, with a compressor around it."""

    def __init__(self, reduction: Reduction, flat: torch.Tensor, name: str) -> None:
        self._reduction, self._flat, self._name = reduction, flat, name
        self._wire: torch.Tensor | None = None
        self._context: Any = None
        self._handle: int | None = None
        self._operation = NOT_SHOWN

    def launch(self) -> None:
        if self._reduction.alone:
            return
        self._wire, self._context = self._reduction.compression.compress(self._flat)
        trace = timeline.active
        begun = trace.moment()  # it may be over when launch() returns
        self._handle = self._reduction.launch(self._wire, self._name)
        self._operation = trace.launched(self._name, self._wire.nbytes, self._handle, begun=begun)

    def meet(self) -> None:
        if not self._reduction.alone:
            self._reduction.reduce(torch.zeros(0, device=self._flat.device), self._name)

    @property
    def arrived(self) -> bool:
        return self._handle is None or pending.has_arrived(self._handle)

    def wait(self) -> None:
        if self._handle is None:
            return
        check_mode.active.delay()
        handle, self._handle = self._handle, None
        pending.wait(handle)
        self._operation.complete()
        assert self._wire is not None
        follow_horovod(self._wire)
        self.settled = self._wire is self._flat
        if not self.settled:
            self._flat.copy_(self._reduction.compression.decompress(self._wire, self._context))
        self._wire = self._context = None


class _Wrapped(Message):
    """A message that another one carries, under its name."""

    def __init__(self, inner: Message) -> None:
        self._inner, self.feedback = inner, inner.feedback

    @property
    def arrived(self) -> bool:
        return self._inner.arrived

    def wait(self) -> None:
        self._inner.wait()

    def drop_foreign_residuals(self) -> None:
        self._inner.drop_foreign_residuals()

    def meet(self) -> None:
        self._inner.meet()


class CheckedMessage(_Wrapped):
    """A message whose buffer is compared with what was sent, before the result takes its place.

    Args:
        flat: The buffer that the user sees.
        exact: How many elements at its end are not the user's.
        inner: Makes the message that carries a buffer like this one.
    """

    def __init__(
        self, flat: torch.Tensor, exact: int, inner: Callable[[torch.Tensor], Message]
    ) -> None:
        self._flat, self._wire = flat.data, torch.zeros_like(flat)
        self._values = self._flat[: flat.numel() - exact]
        super().__init__(inner(self._wire))
        self._kept: torch.Tensor | None = None
        self._launched = False
        self._changed: int | None = None

    def keep(self) -> None:
        """Take down the buffer as it is: from here on nobody may write to it."""
        self._kept = self._values.clone()

    def launch(self) -> None:
        self._compare()
        self.keep()
        self._wire.copy_(self._flat)
        self._launched = True
        self._inner.launch()

    def wait(self) -> None:
        if not self._launched:
            return
        self._launched = False
        self._inner.wait()
        self._compare()
        self._kept = None
        self._flat.copy_(self._wire)
        spoil(self._wire)

    def take_changed(self) -> int | None:
        """Return the first element that was changed since `keep`; a round ends with this."""
        changed, self._changed, self._kept = self._changed, None, None
        return changed

    def _compare(self) -> None:
        if self._kept is None or self._changed is not None:
            return
        # Bits, as NaN is not equal to itself.
        before, now = (each.view(torch.uint8) for each in (self._kept, self._values))
        found = (before != now).nonzero()
        if len(found):
            self._changed = int(found[0]) // self._values.element_size()


class InTwo(Message):
    """Values by way of a compressor, and words beside them as they are."""

    def __init__(self, values: Message, words: Message) -> None:
        self._values, self._words = values, words

    def launch(self) -> None:
        self._words.launch()
        self._values.launch()

    @property
    def arrived(self) -> bool:
        return self._values.arrived and self._words.arrived

    def wait(self) -> None:
        self._values.wait()
        self._words.wait()
        self.settled = self._words.settled

    def meet(self) -> None:
        self._values.meet()


class Scaled(_Wrapped):
    """A message whose values are multiplied by a factor as they leave."""

    def __init__(self, inner: Message, values: torch.Tensor, factor: float) -> None:
        super().__init__(inner)
        self._values, self._factor = values, factor

    def launch(self) -> None:
        self._values.mul_(self._factor)
        self._inner.launch()


# The thread that takes operations of several phases through them, behind the backward pass.


POLL_S = 0.0002
"""How long the thread sleeps between two looks at what is on the wire."""


class Operation(Protocol):
    """An operation of several phases, as `compressed_allreduce.CompressedAllReduce`."""

    @property
    def feedback(self) -> object | None:
        """What it shares with others that must not overtake it."""

    def ready(self) -> bool:
        """Return whether the phase that is on the wire is over."""

    def advance(self) -> bool:
        """Work up to the next phase on the wire; return whether there is one."""

    def end(self, error: Exception | None) -> None:
        """Let its owner go on, or raise ``error`` there."""


class CommunicationThread:
    """Advances all operations, one phase at a time; the first one starts the thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[Operation] = []
        self._moving: list[Operation] = []
        self._halting = False
        self._thread: threading.Thread | None = None

    def take(self, operation: Operation) -> None:
        """Advance an operation to its end; returns at once."""
        with self._changed:
            self._queue.append(operation)
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
        for operation in (*self._queue, *self._moving):
            operation.end(HvdPipeError("Horovod was shut down while this message was in flight."))
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
            self._moving += [operation for operation in queue if operation.advance()]
            busy = self._advance_one()

    def _advance_one(self) -> bool:
        """Take one operation into its next phase, so that new ones wait for no more than that."""
        older: set[object] = set()
        for operation in self._moving:
            if operation.feedback not in older and operation.ready():
                if not operation.advance():
                    self._moving.remove(operation)
                return True
            if operation.feedback is not None:
                older.add(operation.feedback)
        return False


communication_thread = CommunicationThread()
"""The process's one."""
pending.before_shutdown(communication_thread.halt)
