"""How one flat buffer is reduced over the ranks, as operations of a graph or at once.

Horovod's operations are asynchronous: in a graph, each starts when its input is there, and what
does not depend on its output goes on. Names are what ranks meet under, so they are given, and
unique among what can be in flight together.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from functools import reduce as fold
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import Average, ProcessSet, global_process_set

from hvd_pipe.planning.comm import CODECS, CodecCost
from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.consensus import members
from hvd_pipe.tensorflow.checking import delayed
from hvd_pipe.tensorflow.compression import Codec, Compression
from hvd_pipe.tensorflow.graphs import call_name, variable
from hvd_pipe.tensorflow.measuring import timeline

RESIDUAL = "lost."
"""Begins the names of residuals in a state; they mean nothing on another rank."""


@dataclass(frozen=True)
class Feedback:
    """The residuals of a message: what encoding has lost, which is added to what comes next."""

    sent: tf.Variable
    """Lost where this rank encoded its own values; a float32 row for each rank."""
    reduced: tf.Variable
    """Lost where it encoded the sums of its own slice; one row."""

    def named(self, label: str) -> dict[str, tf.Variable]:
        """Return the variables, by the names that they have in a checkpoint."""
        names = f"{RESIDUAL}sent.{label}", f"{RESIDUAL}reduced.{label}"
        return dict(zip(names, (self.sent, self.reduced), strict=True))


@dataclass(frozen=True)
class Reduction:
    """How a buffer is reduced over the ranks; Horovod's own arguments and meanings."""

    op: Any = Average
    gradient_predivide_factor: float = 1.0
    compression: Any = Compression.none
    process_set: ProcessSet = global_process_set
    device: str = ""
    weights: Sequence[float] = ()
    """For dense buffers, a positive number a rank; empty for a plain mean."""

    @cached_property
    def alone(self) -> bool:
        """Whether this rank has nobody to reduce with, or is no member of the process set."""
        return not self.process_set.included() or len(members(self.process_set)) == 1

    @cached_property
    def workers(self) -> int:
        """How many ranks reduce."""
        return 1 if self.alone else len(members(self.process_set))

    @cached_property
    def factor(self) -> float:
        """What this rank's buffers are multiplied by, so that a plain mean is the weighted one."""
        if not self.weights or self.alone:
            return 1.0
        weight = self.weights[self.process_set.rank()]
        return float(weight * len(self.weights) / sum(self.weights))

    @cached_property
    def codec(self) -> Codec | None:
        """The codec of the buffer; None where Horovod sums the message."""
        return self.compression if isinstance(self.compression, Codec) else None

    def ratio(self, dtype: tf.DType) -> float:
        """Return the bytes that are sent over the bytes of a buffer of this dtype."""
        if self.codec is not None:
            return self.codec.nbytes(2**20) / (2**20 * int(dtype.size))
        wire, _ = self.compression.compress(tf.zeros([1], dtype))
        return float(wire.dtype.size / dtype.size)

    def cost(self, dtype: tf.DType) -> CodecCost:
        """Return what compression costs a buffer of this dtype."""
        known = CodecCost("wire", 1.0) if self.codec is None else CODECS[self.codec.name]
        return replace(known, ratio=self.ratio(dtype))

    def lossless(self) -> Reduction:
        """Return the same without compression."""
        return replace(self, compression=Compression.none)

    def feedback(self, numel: int) -> Feedback | None:
        """Return what error feedback of buffers of ``numel`` elements starts with, if wanted."""
        if self.codec is None or not self.codec.error_feedback or self.alone:
            return None
        size = _slice(numel, self.workers, self.codec.chunk)
        sent, reduced = (
            variable([rows, size], tf.float32, f"hvd_pipe.lost.{rows}")
            for rows in (self.workers, 1)
        )
        return Feedback(sent, reduced)

    def wire_bytes(self, numel: int, dtype: tf.DType) -> int:
        """Return the bytes that a rank sends for a buffer of ``numel`` elements."""
        if self.codec is None:
            return round(numel * int(dtype.size) * self.ratio(dtype))
        return self.workers * self.codec.nbytes(_slice(numel, self.workers, self.codec.chunk))

    # Architecture: K8
    def reduce(self, flat: tf.Tensor, name: str, feedback: Feedback | None = None) -> tf.Tensor:
        """Return the reduced buffer: the same bits on every rank."""
        if self.alone:
            return tf.identity(flat)
        name = call_name(name)
        if self.factor != 1.0:
            flat = flat * tf.constant(self.factor, flat.dtype)
        span: AbstractContextManager[None] = nullcontext()
        if timeline.active.is_on and tf.executing_eagerly():
            span = timeline.sending(name, self.wire_bytes(flat.shape[0], flat.dtype))
        if check_mode.active.on:
            flat = delayed(flat)
        name = f"HorovodAllreduce.{name}"  # Horovod's elastic.run knows its failures by this word
        with span, tf.device(self.device):
            if self.codec is not None:
                reduced = self._exchange(self.codec, flat, name, feedback)
            else:
                wire, context = self.compression.compress(flat)
                factor = self.gradient_predivide_factor if self.op == Average else 1.0
                arrived = mpi_ops._allreduce(
                    wire,
                    name=name,
                    op=self.op,
                    prescale_factor=1.0 / factor,
                    postscale_factor=factor,
                    ignore_name_scope=True,
                    process_set=self.process_set,
                )
                reduced = self.compression.decompress(arrived, context)
        return delayed(reduced) if check_mode.active.on else reduced

    def reduce_all(
        self, flats: Sequence[tf.Tensor], name: str, feedbacks: Sequence[Feedback | None] = ()
    ) -> list[tf.Tensor]:
        """Return the reduced buffers; their messages are numbered."""
        return [
            self.reduce(flat, f"{name}.{i}", feedbacks[i] if feedbacks else None)
            for i, flat in enumerate(flats)
        ]

    def gather(self, sparse: tf.IndexedSlices, name: str) -> tf.IndexedSlices:
        """Return the sum (or mean) of all ranks' sparse gradients, as sparse as they are."""
        if self.alone:
            return sparse
        name = call_name(name)
        labelled = (("values", sparse.values), ("indices", sparse.indices))
        # A graph has no sizes yet, and is not shown.
        nbytes = sum((part.shape.num_elements() or 0) * part.dtype.size for _, part in labelled)
        with timeline.sending(name, nbytes):
            parts = [
                mpi_ops.allgather(
                    part,
                    f"HorovodAllgather.{name}.{label}",
                    ignore_name_scope=True,
                    process_set=self.process_set,
                )
                for label, part in labelled
            ]
        values = parts[0] / self.workers if self.op == Average else parts[0]
        return tf.IndexedSlices(values, parts[1], sparse.dense_shape)

    def _exchange(
        self, codec: Codec, flat: tf.Tensor, name: str, feedback: Feedback | None
    ) -> tf.Tensor:
        """Reduce what cannot be summed as it travels: rank r sums slice r, and all gather sums."""
        workers, numel = self.workers, flat.shape[0]
        size = _slice(numel, workers, codec.chunk)
        padded = tf.pad(tf.cast(flat, tf.float32), [[0, workers * size - numel]])
        rows = tf.reshape(padded, [workers, size])
        code = _encode(codec, rows, None if feedback is None else feedback.sent)
        received = mpi_ops.alltoall(
            code, name=name, ignore_name_scope=True, process_set=self.process_set
        )
        received = tf.ensure_shape(received, code.shape)
        local_sum = fold(tf.add, tf.unstack(codec.decode(received)))  # in the order of ranks
        if self.op == Average:
            local_sum = local_sum / workers
        reply = _encode(codec, local_sum[None], None if feedback is None else feedback.reduced)
        gathered = mpi_ops.allgather(
            reply, f"{name}.reduced", ignore_name_scope=True, process_set=self.process_set
        )
        gathered = tf.ensure_shape(gathered, [workers, *reply.shape[1:]])
        return tf.cast(tf.reshape(codec.decode(gathered), [-1])[:numel], flat.dtype)


def _slice(numel: int, workers: int, chunk: int) -> int:
    """Return the size of the equal slices of whole chunks that hold a buffer."""
    return -(-numel // (chunk * workers)) * chunk


def _encode(codec: Codec, rows: tf.Tensor, lost: tf.Variable | None) -> tf.Tensor:
    """Encode the rows plus their residual, if there is one, and update the residual."""
    if lost is None:
        return codec.encode(rows)
    rows = rows + lost
    code = codec.encode(rows)
    residual = rows - codec.decode(code)
    # A message that overflowed is not repaired by later ones.
    lost.assign(tf.where(tf.math.is_finite(residual), residual, tf.zeros_like(residual)))
    return code
