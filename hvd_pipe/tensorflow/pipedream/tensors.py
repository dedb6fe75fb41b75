"""TensorFlow's tensors on their way: minibatches cut up, messages between stages, broadcasts."""

from __future__ import annotations

import functools
import itertools
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow.mpi_ops import MPI_LIB, ProcessSet, rank

from hvd_pipe.pipeline.messages import ITEM_BYTES, Bytes, Messages, Part, TensorSpec
from hvd_pipe.pipeline.stage import Buffer, Microbatch
from hvd_pipe.tensorflow.pipedream.graph import Graph


def split(graph: Graph, batch: Any, microbatches: int) -> list[Microbatch]:
    """Cut a minibatch into microbatches along the first dimension, as `numpy.array_split` does.

    Example:
        >>> from hvd_pipe.tensorflow.pipedream.graph import graph_of
        >>> graph = graph_of(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
        >>> first, last = split(graph, (tf.zeros((3, 2)), tf.range(3)), 2)
        >>> first.inputs[0].shape, last.targets.numpy(), last.samples
        (TensorShape([2, 2]), array([2], dtype=int32), 1)
    """
    if not isinstance(batch, Sequence) or len(batch) != 2:
        got = f"{len(batch)} items" if isinstance(batch, Sequence) else type(batch).__name__
        raise TypeError(
            f"the dataset must yield (x, y), got {got}: give several inputs or targets as a "
            "tuple or a dict, ((ids, lengths), y); weights of samples belong in loss_fn."
        )
    inputs = graph.feed(batch[0])
    targets = keras.tree.map_structure(tf.convert_to_tensor, batch[1])
    samples = int(inputs[0].shape[0])
    named = [(value.name, tensor) for value, tensor in zip(graph.values, inputs, strict=False)]
    named += [("targets", tensor) for tensor in keras.tree.flatten(targets)]
    for name, tensor in named:
        if not tensor.shape.rank or tensor.shape[0] != samples:
            raise ValueError(
                f"a minibatch of {samples} samples has {name} of shape {list(tensor.shape)}: "
                "inputs and targets have the samples as their first dimension."
            )
    if samples < microbatches:
        raise ValueError(
            f"a minibatch of {samples} samples cannot be cut into {microbatches} microbatches: "
            "make larger batches, leave the last one out (dataset.batch(..., "
            "drop_remainder=True)), or ask for fewer microbatches."
        )
    size, larger = divmod(samples, microbatches)
    bounds = [at * size + min(at, larger) for at in range(microbatches + 1)]

    def part(first: int, end: int) -> Microbatch:
        labels = keras.tree.map_structure(lambda tensor: tensor[first:end], targets)
        digest = 0
        for tensor in keras.tree.flatten(labels):
            digest = zlib.crc32(tensor.numpy().tobytes(), digest)
        cut = tuple(tensor[first:end] for tensor in inputs)
        return Microbatch(cut, labels, end - first, (end - first) / samples, digest)

    return [part(first, end) for first, end in itertools.pairwise(bounds)]


_DTYPES = {name: tf.as_dtype(name) for name in ITEM_BYTES}


class KerasMessages(Messages):
    """See :class:`hvd_pipe.pipeline.messages.Messages`; received tensors are copies."""

    def __init__(
        self, specs: Sequence[TensorSpec], stages: int, where: str, short: bool = False
    ) -> None:
        super().__init__(_DTYPES, specs, stages, where, short)

    def _bytes(self, tensor: Any, dtype: tf.DType) -> Part:
        data: Part = tf.cast(tensor, dtype).numpy()
        return data

    def _tensor(
        self, part: Buffer, shape: tuple[int, ...], dtype: tf.DType, wanted: tf.DType
    ) -> Any:
        array = part.view(dtype.as_numpy_dtype).reshape(shape)
        return tf.cast(tf.constant(array), wanted)


class Broadcast:
    """A pending broadcast; see :class:`hvd_pipe.pipeline.process_sets.Start`."""

    def __init__(self, buffer: Bytes, root_rank: int, name: str, process_set: ProcessSet) -> None:
        self._words = buffer, root_rank, name, process_set
        self._error: Exception | None = None
        # A daemon: Python must not wait for it at its end, as Horovod's own end ends it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until it is done."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        buffer, root_rank, name, process_set = self._words
        try:
            with tf.device("CPU"):
                carry = _graph(name, root_rank, process_set.process_set_id, buffer.size)
                message = carry(tf.convert_to_tensor(buffer))
            if rank() != root_rank:
                buffer[:] = message.numpy()
        except Exception as error:  # it is the main thread's to raise
            self._error = error


@functools.cache
def _graph(name: str, root_rank: int, process_set_id: int, nbytes: int) -> Any:
    """Return a broadcast of that name as a function of the message."""

    def carry(message: Any) -> Any:
        return MPI_LIB.horovod_broadcast(
            message,
            name=name,
            root_rank=root_rank,
            ignore_name_scope=True,
            process_set_id=process_set_id,
        )

    spec = tf.TensorSpec([nbytes], tf.uint8)
    return tf.function(carry, input_signature=[spec], autograph=False).get_concrete_function()
