"""Broadcasts of TensorFlow's Horovod, as :mod:`hvd_pipe.pipeline.process_sets` starts them.

TensorFlow waits inside each of Horovod's operations, so each has a thread that does so in place of
the main one: there are few at a time. Horovod matches them by name, which an operation has in a
graph only (eager ones of a kind share one), so there is a small graph for each name.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import tensorflow as tf
from horovod.tensorflow.mpi_ops import MPI_LIB, ProcessSet, rank

from hvd_pipe.pipeline.wire import Bytes

__all__ = ["Broadcast", "start"]


class Broadcast:
    """One that is on its way.

    Args:
        buffer, root_rank, name, process_set: As for `start`.
    """

    def __init__(self, buffer: Bytes, root_rank: int, name: str, process_set: ProcessSet) -> None:
        self._words = buffer, root_rank, name, process_set
        self._error: Exception | None = None
        # A daemon: Python must not wait for it at its end, as Horovod's own end ends it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            OpError: Horovod has failed.
        """
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


def start(buffer: Bytes, root_rank: int, name: str, process_set: ProcessSet) -> Broadcast:
    """Start a broadcast in place and return at once.

    Args:
        buffer: What the root sends, or room for it.
        root_rank: Its number in the job.
        name: The same on both ranks.
        process_set: They.
    """
    return Broadcast(buffer, root_rank, name, process_set)


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
