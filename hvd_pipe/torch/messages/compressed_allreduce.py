"""All-reduce what cannot be summed as it travels: encoded bytes, in two phases.

Rank r of n owns slice r of the buffer::

    rank 0   [ a0 | a1 ]  encode, alltoall    [ a0 | b0 ]  decode, sum    allgather     decode
    rank 1   [ b0 | b1 ]  ----------------->  [ a1 | b1 ]  and encode  -------------->  [ m0 | m1 ]

Every rank decodes the same bytes in the second phase, its own slice too, so that all end with the
same bits. Each sends ``2 (n-1)/n`` of the encoded bytes, as in a ring.

One thread a process, the `communication_thread`, carries the phases behind the backward pass. It
waits for no message before all that are queued have started, or two ranks that launch in different
orders would wait for each other for ever.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from horovod.torch.mpi_ops import Average, Sum, allgather_async, alltoall_async

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.timeline import NOT_SHOWN
from hvd_pipe.runtime.watch.waits import waiting_for
from hvd_pipe.torch.agree import poison
from hvd_pipe.torch.compression import Codec, Compression, blocks, codec_for, is_horovods
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.allreduce import (
    AllReduce,
    Feedback,
    GroupAllReduce,
    InTwo,
    Message,
    Reduction,
    Zeros,
    meet,
)
from hvd_pipe.torch.messages.pending import follow_horovod, side_stream

POLL_S = 0.0002
"""How long the thread sleeps between two looks at what is on the wire."""


class CompressedAllReduce(Message):
    """A flat buffer that is reduced by way of a codec.

    Every rank gets ``dec(enc(mean_i dec(enc(x_i))))``, sums in float32 in the order of ranks. With
    error feedback, ``x_i + sent_i`` and ``mean + reduced`` take the places of x_i and the mean,
    and ``sent_i`` and ``reduced`` become what encoding these has lost (zero where that is not
    finite). The last ``exact`` elements travel in float32 or float64. Ranks may launch messages in
    different orders, but those that share a `Feedback` in one.
    """

    def __init__(
        self,
        reduction: Reduction,
        flat: torch.Tensor,
        name: str,
        codec: Codec,
        exact: int = 0,
        feedback: Feedback | None = None,
    ) -> None:
        _check(reduction, flat, codec, exact, feedback)
        if feedback is None and codec.error_feedback:
            feedback = Feedback.of(flat)
        self.feedback = feedback
        self._reduction, self._flat, self._name, self._codec = reduction, flat, name, codec
        self._values, self._words = flat[: flat.numel() - exact], flat[flat.numel() - exact :]
        self._factor = reduction.factor
        self._word_dtype = torch.promote_types(flat.dtype, torch.float32)
        self._word_bytes = exact * self._word_dtype.itemsize
        self._slices = _slices(self._values.numel(), reduction.workers, codec.chunk)
        # The first slice is never shorter than another; an empty buffer sends a byte all the same.
        self._row_bytes = max(self._word_bytes + codec.nbytes(self._slices[0].stop), 1)
        self._rows: torch.Tensor | None = None
        self._launched = False
        self._phases: Generator[_OnWire, Any, None] | None = None
        self._on_wire: _OnWire | None = None
        self.is_in_first_phase = False
        self._error: Exception | None = None
        self._operation = NOT_SHOWN
        self._filled: torch.cuda.Event | None = None
        self._reduced: torch.cuda.Event | None = None
        self.done = threading.Event()
        """Set when the buffer holds the reduced values, or an error has ended it."""

    def launch(self) -> None:
        if self._reduction.alone:
            return
        if self._launched:
            raise HvdPipeError(f"{self._name} is in flight already: call wait() before launch().")
        self._launched = True
        self.done.clear()
        self.is_in_first_phase = True
        if self._factor != 1.0:
            self._values.mul_(self._factor)
        if self._flat.is_cuda:
            self._filled = torch.cuda.current_stream(self._flat.device).record_event()
        workers = self._reduction.workers
        self._reduction.traffic.add(workers * self._row_bytes, workers)
        self._phases = self._carry()
        self._operation = timeline.active.launched(self._name, workers * self._row_bytes)
        pending.operations.add(self)
        communication_thread.submit(self)

    @property
    def arrived(self) -> bool:
        return not self._launched or self.done.is_set()

    def wait(self) -> None:
        if not self._launched:
            return
        with waiting_for(self._name):
            self.done.wait()
        self._launched = False
        pending.operations.discard(self)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._reduced is not None:
            torch.cuda.current_stream(self._flat.device).wait_event(self._reduced)

    def drop_foreign_residuals(self) -> None:
        if self.feedback is None or self._reduction.alone:
            return
        own_slice = self._slices[self._reduction.process_set.rank()]
        self.feedback.reduced[: own_slice.start].zero_()
        self.feedback.reduced[own_slice.stop :].zero_()

    def launch_zeros(self, meets: bool = False) -> list[Zeros]:
        if self._reduction.group is None:
            return super().launch_zeros(meets)
        flat, exact = torch.zeros_like(self._flat), self._words.numel()
        if meets and exact:
            flat[-1] = 1.0
        zeros = CompressedAllReduce(self._reduction, flat, self._name, self._codec, exact)
        zeros.launch()
        factor = 1.0 if self._reduction.op == Average else 1.0 / self._reduction.workers
        return [Zeros(zeros, flat[flat.numel() - exact :], factor)]

    def meet(self) -> None:
        if self._reduction.group is not None:
            meet([self])
            return
        if self._reduction.alone:
            return
        process_set = self._reduction.process_set
        rows = self._flat.new_zeros(self._reduction.workers, 0, dtype=torch.uint8)
        with pending.explaining():
            handle = alltoall_async(rows, name=self._name, process_set=process_set)
        pending.wait(pending.sent(handle))

    # What the communication thread calls.

    def ready(self) -> bool:
        """Return whether the phase that is on the wire is over."""
        return self._on_wire is None or self._on_wire.arrived

    @property
    def kept_in_order(self) -> list[object]:
        """What later messages may not use before this one has gone on to its next phase."""
        group = self._reduction.group if self.is_in_first_phase else None
        return [one for one in (self.feedback, group) if one is not None]

    def advance(self) -> bool:
        """Work up to the next phase on the wire; return whether there is one."""
        assert self._phases is not None
        check_mode.active.delay()
        trace, begun = timeline.active, timeline.active.now()
        try:
            on_wire, self._on_wire = self._on_wire, None
            cuda = self._flat.is_cuda
            stream = torch.cuda.stream(side_stream(self._flat.device)) if cuda else nullcontext()
            with stream, pending.explaining():
                arrived = None if on_wire is None else on_wire.wait()
                self._on_wire = self._phases.send(arrived)
            return True
        except StopIteration:
            self.end(None)
        except Exception as error:
            if "not supported with Join" in str(error):
                left = HvdPipeError(
                    f"a rank has left by hvd.join(), and {self._codec!r} needs all ranks: give "
                    "every rank the same number of steps, or use hvd.Compression.fp16. Horovod "
                    f"says: {error}"
                )
                left.__cause__ = error
                self.end(left)
            else:
                self.end(error)
        finally:
            trace.codec(begun, self._name)
        return False

    def end(self, error: Exception | None) -> None:
        """Let `wait` return, or raise ``error``."""
        self._error, self._phases, self._on_wire = error, None, None
        self._operation.complete()
        self.done.set()

    def _carry(self) -> Generator[_OnWire, Any, None]:
        """Carry the buffer through both phases; yield what is on the wire, and receive it."""
        if self._filled is not None:
            # This thread's stream uses the caller's buffers, after the caller has filled them.
            stream = torch.cuda.current_stream(self._flat.device)
            stream.wait_event(self._filled)
            shared = (self.feedback.sent, self.feedback.reduced) if self.feedback else ()
            for tensor in (self._flat, *shared):
                tensor.record_stream(stream)
        received = yield self._send_slices(self._encode())
        words, reply = self._sum_words(received), self._sum_own(received)
        self.is_in_first_phase = False
        gathered = yield self._send_reply(reply, f"{self._name}.reduced")
        for row, part in zip(gathered, self._slices, strict=True):
            values = self._values[part]
            self._codec.decode(self._code(row, values), values)
        self._words.copy_(words)
        if self._flat.is_cuda:
            self._reduced = torch.cuda.current_stream(self._flat.device).record_event()

    def _send_slices(self, rows: torch.Tensor) -> _OnWire:
        if self._reduction.group is not None:
            return self._reduction.group.launch_slices(rows, self._name)
        process_set = self._reduction.process_set
        return _ByHorovod(alltoall_async(rows, name=self._name, process_set=process_set))

    def _send_reply(self, row: torch.Tensor, name: str) -> _OnWire:
        if self._reduction.group is not None:
            return self._reduction.group.launch_reply(row, name)
        process_set = self._reduction.process_set
        return _ByHorovod(allgather_async(row, name=name, process_set=process_set))

    def _encode(self) -> torch.Tensor:
        """Return the rows for all ranks: the exact words, then the rank's slice of the values."""
        if self._rows is None:
            shape = (len(self._slices), self._row_bytes)
            # The end of a short slice's row is not read.
            self._rows = self._flat.new_empty(shape, dtype=torch.uint8)
        poison(self._rows)
        words = self._words.to(self._word_dtype).view(torch.uint8)
        for row, part in zip(self._rows, self._slices, strict=True):
            row[: self._word_bytes].copy_(words)
            values = self._values[part]
            residual = None if self.feedback is None else self.feedback.sent[part]
            self._encode_values(values, residual, self._code(row, values))
        return self._rows

    def _sum_own(self, received: torch.Tensor) -> torch.Tensor:
        """Return the encoded sum (or mean) of this rank's slice, as the row for all ranks."""
        part = self._slices[self._reduction.process_set.rank()]
        total = torch.empty_like(self._values[part], dtype=torch.float32)
        self._codec.decode(self._code(received[0], total), total)
        for row in received[1:]:
            self._codec.add(self._code(row, total), total)
        if self._reduction.op == Average:
            for (piece,) in blocks(total):
                piece.div_(len(received))
        reply = received.new_empty(1, self._row_bytes)
        poison(reply)
        residual = None if self.feedback is None else self.feedback.reduced[part]
        self._encode_values(total, residual, self._code(reply[0], total))
        return reply

    def _sum_words(self, received: torch.Tensor) -> torch.Tensor:
        """Return the sum (or mean) of all ranks' exact words; every rank has got them all."""
        parts = received[:, : self._word_bytes].reshape(-1).view(self._word_dtype)
        words = parts.view(len(received), self._words.numel())
        total = words[0].clone()
        for word in words[1:]:
            total.add_(word)
        return total.div_(len(words)) if self._reduction.op == Average else total

    def _encode_values(
        self, values: torch.Tensor, residual: torch.Tensor | None, code: torch.Tensor
    ) -> None:
        """Encode values with what was lost before, if that is kept, and keep what this loses."""
        if residual is None:
            self._codec.encode(values, code)
            return
        for lost, value in blocks(residual, values):
            lost.add_(value)
        self._codec.encode(residual, code)
        self._codec.add(code, residual, factor=-1.0)
        for (lost,) in blocks(residual):
            lost.nan_to_num_(0.0, 0.0, 0.0)

    def _code(self, row: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return the part of a row that holds these values, encoded."""
        return row[self._word_bytes :][: self._codec.nbytes(values.numel())]


def message_for(
    reduction: Reduction,
    flat: torch.Tensor,
    name: str,
    exact: int = 0,
    feedback: Feedback | None = None,
) -> Message:
    """Return what carries ``flat``; its last ``exact`` elements are summed as they are."""
    codec = codec_for(reduction.compression, flat.dtype)
    if codec is not None:
        return CompressedAllReduce(reduction, flat, name, codec, exact, feedback)
    if reduction.group is not None and (not exact or is_horovods(reduction.compression)):
        return GroupAllReduce(reduction, flat, name, exact)
    if not exact or is_horovods(reduction.compression):
        return AllReduce(reduction, flat, name, exact)
    # A compressor of the user's may round the exact elements to zero.
    values, words = flat[: flat.numel() - exact], flat[flat.numel() - exact :]
    plain = replace(reduction, compression=Compression.none, weights=())
    if not values.numel():
        return message_for(plain, words, name, exact)
    words_message = message_for(plain, words, f"{name}.words", exact)
    return InTwo(message_for(reduction, values, name), words_message)


def _slices(numel: int, workers: int, chunk: int) -> list[slice]:
    """Cut a buffer into equal slices of whole chunks; the last ones may be shorter, or empty.

    >>> _slices(1000, 3, 256), _slices(1, 2, 256)
    ([slice(0, 512, None), slice(512, 1000, None), slice(1000, 1000, None)], \
[slice(0, 1, None), slice(1, 1, None)])
    """
    size = -(-numel // (chunk * workers)) * chunk
    ends = [min(rank * size, numel) for rank in range(workers + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _check(
    reduction: Reduction,
    flat: torch.Tensor,
    codec: Codec,
    exact: int,
    feedback: Feedback | None,
) -> None:
    if reduction.op not in (Average, Sum):
        raise ValueError(f"{codec!r} needs op=hvd.Average or hvd.Sum, got {reduction.op!r}.")
    if not flat.dtype.is_floating_point:
        raise TypeError(f"{codec!r} is for floating numbers, got {flat.dtype}.")
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(f"flat must be one-dimensional and contiguous, got {tuple(flat.shape)}.")
    if not 0 <= exact <= flat.numel():
        raise ValueError(f"exact must be in 0..{flat.numel()}, flat's size, got {exact}.")
    if feedback is None:
        return
    if not codec.error_feedback:
        raise ValueError(f"{codec!r} takes no feedback: set error_feedback=True.")
    wanted = (torch.float32, flat.shape, flat.device)
    for tensor in (feedback.sent, feedback.reduced):
        if (tensor.dtype, tensor.shape, tensor.device) != wanted:
            raise ValueError(
                f"feedback must be float32 {tuple(flat.shape)} on {flat.device}, got "
                f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: use Feedback.of(flat)."
            )


class _OnWire(Protocol):
    @property
    def arrived(self) -> bool: ...

    def wait(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class _ByHorovod:
    """A message of Horovod's, which has allocated what arrives."""

    handle: int

    @property
    def arrived(self) -> bool:
        return pending.has_arrived(self.handle)

    def wait(self) -> torch.Tensor:
        arrived = pending.wait(self.handle)
        received: torch.Tensor = arrived[0] if isinstance(arrived, tuple) else arrived
        if received.is_cuda:
            received.record_stream(torch.cuda.current_stream(received.device))
            follow_horovod(received)
        return received


class CommunicationThread:
    """Advances all messages, one phase at a time; the first one starts the thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: list[CompressedAllReduce] = []
        self._active: list[CompressedAllReduce] = []
        self._halting = False
        self._thread: threading.Thread | None = None

    def submit(self, message: CompressedAllReduce) -> None:
        """Advance a message to its end; returns at once."""
        with self._changed:
            self._queue.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hvd_pipe", daemon=True)
                self._thread.start()
            self._changed.notify()

    def halt(self) -> None:
        """End the thread, which would abort the process at its end, and what is in flight."""
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            self._halting = True
            self._changed.notify()
        thread.join()
        for message in (*self._queue, *self._active):
            message.end(HvdPipeError("Horovod was shut down while this message was in flight."))
        self._queue, self._active = [], []
        self._thread, self._halting = None, False

    def _run(self) -> None:
        busy = False
        while True:
            with self._changed:
                if not (busy or self._queue or self._halting):
                    self._changed.wait(POLL_S if self._active else None)
                if self._halting:
                    return
                queue, self._queue = self._queue, []
            self._active += [message for message in queue if message.advance()]
            busy = self._advance_one()

    def _advance_one(self) -> bool:
        """Take one message into its next phase, so that new ones wait for no more than that."""
        older: set[object] = set()
        for message in self._active:
            in_order = message.kept_in_order
            if older.isdisjoint(in_order) and message.ready():
                if not message.advance():
                    self._active.remove(message)
                return True
            older.update(in_order)
        return False


communication_thread = CommunicationThread()
pending.before_shutdown(communication_thread.halt)
