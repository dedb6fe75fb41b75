"""Every rank decides alike: `hvd_pipe.runtime.consensus` by way of TensorFlow's Horovod."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import ProcessSet, allgather

from hvd_pipe.errors import RanksDisagreeError
from hvd_pipe.runtime.consensus import Agreement
from hvd_pipe.runtime.watch.waits import waiting_for

if TYPE_CHECKING:
    from hvd_pipe.tensorflow.messages.reduction import Reduction


def _gather_bytes(data: bytes, name: str, process_set: ProcessSet) -> list[bytes]:
    with tf.init_scope(), tf.device("/cpu:0"):  # at once, even while a graph is traced
        tensor = tf.constant(np.frombuffer(data, dtype=np.uint8))
        count = tf.constant([len(data)], dtype=tf.int64)
        counts = allgather(count, name=f"{name}.bytes", process_set=process_set).numpy()
        gathered = allgather(tensor, name=f"{name}.data", process_set=process_set).numpy()
    return [part.tobytes() for part in np.split(gathered, np.cumsum(counts)[:-1])]


agreement = Agreement(_gather_bytes)
check_alike = agreement.check_alike
checked = agreement.checked
found_by_first = agreement.found_by_first
gather = agreement.gather


def largest(values: Sequence[float], name: str, process_set: ProcessSet) -> list[float]:
    """Return, element by element, the largest of all ranks' ``values``."""
    rows = np.array(gather(list(values), name, process_set))
    return [float(value) for value in rows.max(axis=0)]


def meet(pending: Sequence[bool], name: str, reduction: Reduction) -> None:
    """Compare the updates in flight with those of the other ranks, now.

    Ranks meet under the name of the message that a rank which does not come here sends next. That
    has one dimension, so Horovod refuses both.
    """
    if reduction.alone:
        return

    def counts() -> tf.Tensor:
        return mpi_ops._allreduce(
            tf.constant([pending], tf.float32),
            op=mpi_ops.Sum,
            name=f"HorovodAllreduce.{name}",
            ignore_name_scope=True,
            process_set=reduction.process_set,
        )

    with tf.init_scope(), tf.device("/cpu:0"), waiting_for(name), refused():
        # In a graph, as eager operations lose their names.
        counted = tf.function(counts, autograph=False).get_concrete_function()().numpy()
    if (counted % reduction.workers).any():
        raise RanksDisagreeError(_ALONE)


@contextmanager
def refused() -> Iterator[None]:
    """Say what it means that messages of ranks do not match."""
    try:
        yield
    except tf.errors.OpError as error:
        if "Mismatched" not in error.message or "rank" not in error.message:
            raise
        raise RanksDisagreeError(_ALONE) from error


_ALONE = (
    "ranks disagree on the updates that are still to be made: load the checkpoint on all ranks, "
    "each its own, or call optimizer.synchronize() on all ranks before one of them loads."
)
