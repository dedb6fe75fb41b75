"""How one flat buffer is reduced over the ranks: in place, or by way of a compressor.

A `Message` is a buffer that travels again and again under one name::

    message = reduction.message(flat, "gradients.0")
    message.launch()    the buffer belongs to the network from here
    message.wait()      it holds the reduced values, the same bits on every rank
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from horovod.torch.mpi_ops import Average, ProcessSet, allreduce_async_, global_process_set

from hvd_pipe.planning.codec import CODECS, CodecCost
from hvd_pipe.runtime import check_mode
from hvd_pipe.torch.compression import Compression, Int8, codec_for, is_horovods
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages import in_flight
from hvd_pipe.torch.messages.streams import follow_horovod

if TYPE_CHECKING:
    from hvd_pipe.torch.messages.exchange import Feedback

__all__ = ["Message", "Reduction", "Traffic", "sendable"]


@dataclass
class Traffic:
    """Counts what this rank sends."""

    sent_bytes: float = 0.0
    """Bytes on the wire so far: ``2 (n-1)/n`` of each message, the least that n workers need."""

    def add(self, nbytes: int, workers: int) -> None:
        """Count a message that is ``nbytes`` long as it travels."""
        self.sent_bytes += 2 * (workers - 1) / workers * nbytes


class Message(abc.ABC):
    """A flat buffer that is reduced in place; see the module's docstring."""

    feedback: Feedback | None = None
    """What a lossy codec has left over, if it keeps that."""
    settled = False
    """Whether Horovod alone has written what `wait` has left in the buffer."""

    @abc.abstractmethod
    def launch(self) -> None:
        """Send the buffer; it belongs to the network until `wait`."""

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
    """How a buffer is reduced over the ranks; Horovod's own arguments and meanings."""

    op: Any = Average
    gradient_predivide_factor: float = 1.0
    compression: Any = Compression.none
    process_set: ProcessSet = global_process_set
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def alone(self) -> bool:
        """Whether this rank has nobody to reduce with, or is no member of the process set."""
        return not self.process_set.included() or bool(self.process_set.size() == 1)

    @property
    def workers(self) -> int:
        """How many ranks reduce."""
        return 1 if self.alone else int(self.process_set.size())

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
        known = CODECS["int8" if isinstance(codec, Int8) else "bf16"]
        seconds = known.seconds_per_byte if like.device.type == "cpu" else 0.0
        return replace(known, ratio=ratio, seconds_per_byte=seconds)

    def message(
        self, flat: torch.Tensor, name: str, exact: int = 0, feedback: Feedback | None = None
    ) -> Message:
        """Return the message that carries ``flat``.

        Args:
            flat: One-dimensional, contiguous.
            name: The same on all ranks, unique among what is in flight.
            exact: How many elements at the end no lossy codec may touch: control words, counts.
            feedback: Another message's, if the two carry the same gradients in turn.
        """
        codec = codec_for(self.compression, flat.dtype)
        if codec is None and exact and not is_horovods(self.compression):
            return self._in_two(flat, name, exact)
        if codec is None:
            return _AllReduce(self, flat, name)
        from hvd_pipe.torch.messages.exchange import Exchange  # noqa: PLC0415 - it needs Message from here

        return Exchange(self, flat, name, codec, exact, feedback)

    def _in_two(self, flat: torch.Tensor, name: str, exact: int) -> Message:
        """Send the exact elements apart: a compressor of the user's may round them to zero."""
        values, words = flat[: flat.numel() - exact], flat[flat.numel() - exact :]
        plain = replace(self, compression=Compression.none)
        if not values.numel():
            return plain.message(words, name, exact)
        return _InTwo(_AllReduce(self, values, name), plain.message(words, f"{name}.words", exact))

    def launch(self, tensor: torch.Tensor, name: str) -> int:
        """Start an all-reduce in place and return its handle."""
        check_mode.active.delay()
        factor = self.gradient_predivide_factor if self.op == Average else 1.0
        handle = allreduce_async_(
            tensor,
            name=name,
            op=self.op,
            prescale_factor=1.0 / factor,
            postscale_factor=factor,
            process_set=self.process_set,
        )
        self.traffic.add(tensor.nbytes, self.workers)
        return in_flight.sent(handle)

    def reduce(self, tensor: torch.Tensor, name: str) -> None:
        """All-reduce in place and wait for it."""
        in_flight.wait(self.launch(tensor, name))


def sendable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as Horovod can copy it: bfloat16, which it does not know, as int16."""
    return tensor.detach().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


class _InTwo(Message):
    """Values by way of a compressor, and words beside them as they are."""

    def __init__(self, values: Message, words: Message) -> None:
        self._values, self._words = values, words

    def launch(self) -> None:
        self._words.launch()
        self._values.launch()

    def wait(self) -> None:
        self._values.wait()
        self._words.wait()
        self.settled = self._words.settled

    def meet(self) -> None:
        self._values.meet()


class _AllReduce(Message):
    """One Horovod all-reduce, with a compressor around it."""

    def __init__(self, reduction: Reduction, flat: torch.Tensor, name: str) -> None:
        self._reduction, self._flat, self._name = reduction, flat, name
        self._wire: torch.Tensor | None = None
        self._context: Any = None
        self._handle: int | None = None
        self._flight: timeline.Flight | None = None

    def launch(self) -> None:
        if self._reduction.alone:
            return
        self._wire, self._context = self._reduction.compression.compress(self._flat)
        trace = timeline.active
        begun = None if trace is None else trace.moment()  # it may be over when launch() returns
        self._handle = self._reduction.launch(self._wire, self._name)
        if trace is not None:
            self._flight = trace.launched(self._name, self._wire.nbytes, self._handle, begun=begun)

    def meet(self) -> None:
        if not self._reduction.alone:
            self._reduction.reduce(torch.zeros(0, device=self._flat.device), self._name)

    def wait(self) -> None:
        if self._handle is None:
            return
        check_mode.active.delay()
        handle, self._handle = self._handle, None
        in_flight.wait(handle)
        if self._flight is not None:
            self._flight.land()
        assert self._wire is not None
        follow_horovod(self._wire)
        self.settled = self._wire is self._flat
        if not self.settled:
            self._flat.copy_(self._reduction.compression.decompress(self._wire, self._context))
        self._wire = self._context = None
