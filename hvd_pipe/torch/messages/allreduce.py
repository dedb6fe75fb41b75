"""All-reduce one flat buffer in place, also through a compressor such as ``Compression.fp16``.

A `Message` is a buffer that travels again and again under one name. `message_for` in
`compressed_allreduce` makes the one that a `Reduction` asks for::

    message = message_for(reduction, flat, "gradients.0")
    message.launch()    the buffer belongs to the network from here
    message.wait()      it holds the reduced values, the same bits on every rank
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from horovod.torch.mpi_ops import (
    Average,
    ProcessSet,
    Sum,
    allreduce_async_,
    global_process_set,
    poll,
)

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.comm import CODECS, CodecCost
from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.timeline import NOT_SHOWN
from hvd_pipe.torch.agree import poison
from hvd_pipe.torch.compression import Compression, codec_for
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.group import Group, Posted
from hvd_pipe.torch.messages.pending import follow_horovod
from hvd_pipe.torch.parameters import gradient_dtype

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
    """The residuals of error feedback, shared by messages that carry one gradient in turn."""

    sent: torch.Tensor
    """What encoding this rank's values has lost; float32, of the buffer's size."""
    reduced: torch.Tensor
    """What encoding the sums of its slice has lost; likewise, zero outside the slice."""

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
        """Zero the residuals in `feedback` of sums that other ranks encode."""

    def launch_zeros(self, meets: bool = False) -> list[Zeros]:
        """Take part with zeros, where a `Group` carries this; else wait until all ranks `meet`."""
        self.meet()
        return []

    @abc.abstractmethod
    def meet(self) -> None:
        """Wait for all ranks to call this; raises HvdPipeError where one sends the message."""


@dataclass(frozen=True)
class Reduction:
    """How a buffer is reduced over the ranks; Horovod's own arguments and meanings."""

    op: Any = Average
    gradient_predivide_factor: float = 1.0
    compression: Any = Compression.none
    process_set: ProcessSet = global_process_set
    traffic: Traffic = field(default_factory=Traffic)
    group: Group | None = None
    """What carries messages whose order all ranks share; None: Horovod."""
    weights: tuple[float, ...] = ()
    """Rank i of the process set counts ``weights[i] / sum(weights)``; empty for equal weights."""

    @property
    def alone(self) -> bool:
        """Whether this rank is the only worker, or no member of the process set."""
        # Not size(): it waits for a lock that Horovod's own thread holds for most of each cycle
        # once process sets have been added, and a busy machine may give it none for minutes.
        return not self.process_set.included() or len(self.process_set.ranks) == 1

    @property
    def workers(self) -> int:
        return 1 if self.alone else len(self.process_set.ranks)

    @property
    def factor(self) -> float:
        """What this rank scales its values by, so that their plain mean is the weighted one."""
        if self.alone or not self.weights:
            return 1.0
        weight = float(self.weights[self.process_set.rank()])
        return weight * len(self.weights) / sum(self.weights)

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
        cost = replace(CODECS[codec.name], ratio=ratio)
        return cost if like.device.type == "cpu" else replace(cost, seconds_per_byte=0.0)

    def check_carried(self, name: str, parameter: torch.Tensor) -> None:
        """Raise ValueError where a parameter that joins has gradients that the group lacks."""
        if self.group is None or self.group.encodes:
            return
        dtype = gradient_dtype(parameter)
        if codec_for(self.compression, dtype) is not None:
            raise ValueError(
                f"{name!r} joins with encoded gradients ({dtype}), which carrier='torch' has no "
                "connections for: give the optimizer a frozen parameter of that kind when you "
                "make it, or use carrier='horovod'."
            )

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


Residuals = dict[str, list[torch.Tensor | None]]
"""By label, one tensor a parameter, or None."""


def of_all_ranks(residuals: Residuals, reduction: Reduction, name: str) -> Residuals:
    """Return the residuals, with those of sums from all ranks; every rank calls this.

    Each rank encodes the sums of its own slice of a buffer, and keeps the residual of that slice
    only. In other buffers, a gradient's sum may be encoded by another rank::

        rank 0   [ r0 |    ]                       [ r0 r1 ]
        rank 1   [    | r1 ]   --sum over ranks--> [ r0 r1 ]   each then keeps its new slice
    """
    reduced = residuals.get(REDUCED)
    if reduced is None or reduction.alone:
        return residuals
    plain = replace(reduction, op=Sum, compression=Compression.none)
    summed = list(reduced)
    devices = sorted({tensor.device for tensor in reduced if tensor is not None}, key=str)
    for i, device in enumerate(devices):
        parts = {p: t for p, t in enumerate(reduced) if t is not None and t.device == device}
        flat = torch.cat([part.flatten() for part in parts.values()])
        plain.reduce(flat, f"{name}.{i}")
        totals = torch.split(flat, [part.numel() for part in parts.values()])
        for (index, part), total in zip(parts.items(), totals, strict=True):
            summed[index] = total.view(part.size())
    return {**residuals, REDUCED: summed}


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as Horovod can copy it, over the same memory, where it lacks the dtype."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach())
    other = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}.get(tensor.dtype)
    return tensor if other is None else tensor.detach().view(other)


class AllReduce(Message):
    """One Horovod all-reduce, with a compressor around it; as `message_for` says."""

    def __init__(
        self, reduction: Reduction, flat: torch.Tensor, name: str, exact: int = 0
    ) -> None:
        self._reduction, self._flat, self._name = reduction, flat, name
        self._values, self._factor = flat[: flat.numel() - exact], reduction.factor
        self._wire: torch.Tensor | None = None
        self._context: Any = None
        self._handle: int | None = None
        self._operation = NOT_SHOWN

    def launch(self) -> None:
        if self._reduction.alone:
            return
        if self._factor != 1.0:
            self._values.mul_(self._factor)
        self._wire, self._context = self._reduction.compression.compress(self._flat)
        trace = timeline.active
        begun = trace.now()  # it may be over when launch() returns
        self._handle = self._reduction.launch(self._wire, self._name)
        self._operation = trace.launched(
            self._name, self._wire.nbytes, partial(poll, self._handle), begun=begun
        )

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


class GroupAllReduce(Message):
    """One all-reduce by a `Group`, with a compressor around it; as `message_for` says."""

    def __init__(
        self, reduction: Reduction, flat: torch.Tensor, name: str, exact: int = 0
    ) -> None:
        assert reduction.group is not None
        self._reduction, self._flat, self._name = reduction, flat, name
        self._group = reduction.group
        self._values, self._factor = flat[: flat.numel() - exact], reduction.factor
        predivide = reduction.gradient_predivide_factor if reduction.op == Average else 1.0
        self._before = 1.0 / predivide
        self._after = predivide / reduction.workers if reduction.op == Average else 1.0
        self._wire: torch.Tensor | None = None
        self._context: Any = None
        self._posted: Posted | None = None
        self._operation = NOT_SHOWN
        self.settled = True

    def launch(self) -> None:
        check_mode.active.delay()
        if self._factor != 1.0:
            self._values.mul_(self._factor)
        self._wire, self._context = self._reduction.compression.compress(self._flat)
        if self._before != 1.0:
            self._wire.mul_(self._before)
        trace = timeline.active
        begun = trace.now()
        self._posted = posted = self._group.launch(self._wire, self._name)
        pending.operations.add(posted)
        self._reduction.traffic.add(self._wire.nbytes, self._reduction.workers)
        self._operation = trace.launched(
            self._name, self._wire.nbytes, lambda: posted.arrived, begun=begun
        )

    @property
    def arrived(self) -> bool:
        return self._posted is None or self._posted.arrived

    def wait(self) -> None:
        if self._posted is None:
            return
        check_mode.active.delay()
        posted, self._posted = self._posted, None
        posted.wait()
        pending.operations.discard(posted)
        self._operation.complete()
        assert self._wire is not None
        divides_wire = self._wire.is_floating_point()  # else it is of a compressor of the user's
        if divides_wire and self._after != 1.0:
            self._wire.mul_(self._after)
        if self._wire is not self._flat:
            self._flat.copy_(self._reduction.compression.decompress(self._wire, self._context))
        if not divides_wire:
            self._flat.mul_(self._after)
        self._wire = self._context = None

    def launch_zeros(self, meets: bool = False) -> list[Zeros]:
        """Take part in this message with zeros, beside the buffer."""
        flat, exact = torch.zeros_like(self._flat), self._flat.numel() - self._values.numel()
        if meets and exact:
            flat[-1] = self._before
        wire, _ = self._reduction.compression.compress(flat)
        words = wire[wire.numel() - exact :]
        factor = self._after if self._reduction.op == Average else 1.0 / self._reduction.workers
        return [Zeros(self._group.launch(wire, self._name), words, factor)]

    def meet(self) -> None:
        meet([self])


@dataclass(frozen=True)
class Zeros:
    """A message on its way in which this rank takes part with zeros."""

    operation: Posted | Message
    words: torch.Tensor
    factor: float

    @property
    def arrived(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self.operation.arrived

    def wait(self) -> list[float]:
        """Block until it has arrived; return the means of its exact elements."""
        self.operation.wait()
        return [self.factor * float(word) for word in self.words.tolist()]


def launch_zeros(messages: Sequence[Message], meets: bool = False) -> list[Zeros]:
    """Take part in these messages with zeros; see `Message.launch_zeros`."""
    return [zeros for message in messages for zeros in message.launch_zeros(meets)]


def meet(messages: Sequence[Message]) -> None:
    """Wait for all ranks under the names of these messages, or in a round of them.

    Raises HvdPipeError where other ranks send something. In what a group carries, the last exact
    element says that ranks meet, and ranks that send, or discard, have others that are not zero.
    """
    words = [zeros.wait()[:-1] for zeros in launch_zeros(messages, meets=True)]
    if any(word != 0.0 for part in words for word in part):
        raise HvdPipeError(pending.APART)


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

    def launch_zeros(self, meets: bool = False) -> list[Zeros]:
        return [*self._words.launch_zeros(meets), *self._values.launch_zeros(meets)]

    def meet(self) -> None:
        self._values.meet()


class CheckedMessage(Message):
    """Compares a buffer with what was sent, before the result takes its place."""

    def __init__(
        self, flat: torch.Tensor, exact: int, inner: Callable[[torch.Tensor], Message]
    ) -> None:
        self._flat, self._wire = flat.data, torch.zeros_like(flat)
        self._values = self._flat[: flat.numel() - exact]
        self._inner = inner(self._wire)
        self.feedback = self._inner.feedback
        self._snapshot: torch.Tensor | None = None
        self._launched = False
        self._changed: int | None = None

    def take_snapshot(self) -> None:
        """Copy the buffer: from here on no code may write to it."""
        self._snapshot = self._values.clone()

    def launch(self) -> None:
        self._compare()
        self.take_snapshot()
        self._wire.copy_(self._flat)
        self._launched = True
        self._inner.launch()

    @property
    def arrived(self) -> bool:
        return self._inner.arrived

    def wait(self) -> None:
        if not self._launched:
            return
        self._launched = False
        self._inner.wait()
        self._compare()
        self._snapshot = None
        self._flat.copy_(self._wire)
        poison(self._wire)

    def drop_foreign_residuals(self) -> None:
        self._inner.drop_foreign_residuals()

    def meet(self) -> None:
        self._inner.meet()

    def launch_zeros(self, meets: bool = False) -> list[Zeros]:
        return self._inner.launch_zeros(meets)

    def take_changed(self) -> int | None:
        """Return the first element that was changed since the snapshot; this ends the round."""
        changed, self._changed, self._snapshot = self._changed, None, None
        return changed

    def _compare(self) -> None:
        if self._snapshot is None or self._changed is not None:
            return
        # Bits, as NaN is not equal to itself.
        before, now = self._snapshot.view(torch.uint8), self._values.view(torch.uint8)
        differing = (before != now).nonzero()
        if len(differing):
            self._changed = int(differing[0]) // self._values.element_size()
