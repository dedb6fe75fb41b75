"""Ranks that have loaded a checkpoint meet; where one rank alone has, all ranks hear of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_pipe.errors import RanksDisagreeError
from hvd_pipe.runtime.watch.waits import waiting_for
from hvd_pipe.tensorflow.messages.reduction import Reduction

__all__ = ["meet", "refused"]


def meet(mine: Sequence[bool], name: str, reduction: Reduction) -> None:
    """Compare the updates in flight with those of the other ranks, now.

    Ranks meet under the name of the message that a rank which does not come here sends next. That
    has one dimension, so Horovod refuses both.

    Args:
        mine: What this rank has in flight; of one length on all ranks.
        name: Of this message, as `Reduction.reduce` takes it.
        reduction: How it is reduced.

    Raises:
        RanksDisagreeError: One rank has loaded what others have not.
    """
    if reduction.alone:
        return

    def counts() -> tf.Tensor:
        return mpi_ops._allreduce(
            tf.constant([mine], tf.float32),
            op=mpi_ops.Sum,
            name=f"HorovodAllreduce.{name}",
            ignore_name_scope=True,
            process_set=reduction.process_set,
        )

    with tf.init_scope(), tf.device("/cpu:0"), waiting_for(name), refused():
        # In a graph, as eager operations lose their names.
        found = tf.function(counts, autograph=False).get_concrete_function()().numpy()
    if (found % reduction.workers).any():
        raise RanksDisagreeError(_ALONE)


@contextmanager
def refused() -> Iterator[None]:
    """Say what it means that messages of ranks do not match.

    Raises:
        RanksDisagreeError: They do not.
    """
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
