"""Horovod's start and end, with what ours need around them."""

from __future__ import annotations

import atexit
import os
import warnings
from contextlib import suppress
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_pipe import restarts
from hvd_pipe.agreement import answer_with
from hvd_pipe.errors import is_failing
from hvd_pipe.tensorflow import workers
from hvd_pipe.tensorflow.waiting import starting_to_communicate
from hvd_pipe.watch import watchdog

__all__ = ["init", "settle", "shutdown"]


def init(*args: Any, **kwargs: Any) -> Any:
    """Initialise Horovod, with its own fusion of messages off unless the user has set it.

    Our buckets are merged already; fusing them again would copy every byte twice more. Set
    ``HOROVOD_FUSION_THRESHOLD`` (bytes) to have it back. Where Horovod sums on the CPU, Open MPI
    lets others have the processor while it waits: computing needs it
    (``OMPI_MCA_mpi_yield_when_idle=0`` has it poll). Arguments as Horovod's ``init``.

    Raises:
        HvdPipeError: Horovod was shut down in this process and cannot start again here.
    """
    restarts.prepare(mpi_ops)
    answer_with(mpi_ops)
    if mpi_ops.is_initialized():
        return mpi_ops.init(*args, **kwargs)
    if not mpi_ops.cuda_built():
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    with starting_to_communicate():
        result = mpi_ops.init(*args, **kwargs)
    atexit.unregister(settle)
    atexit.register(settle)  # after Horovod's own, so it is called before it
    return result


def settle() -> None:
    """Before Horovod ends, wait until the other ranks have sent what this one has sent.

    Not after an exception: the others then wait for this rank, which must go.
    """
    if is_failing():
        return
    engines = [session.engine for sessions in workers.running() for session in sessions]
    if any(engine.is_ahead() for engine in engines) and not restarts.is_elastic():
        warnings.warn(
            "training ended with averages in flight: call optimizer.synchronize() after the last "
            "step (drain_gradients() for a tape), or Pipe-SGD loses its last gradient and CoCoD "
            "leaves unequal replicas.",
            stacklevel=2,
        )
    for engine in engines:
        with suppress(tf.errors.OpError):  # a rank that has left before it sent as much
            engine.settle()


def shutdown(*args: Any, **kwargs: Any) -> Any:
    """Shut Horovod down when the other ranks no longer need what this one has sent.

    Optimizers and tapes keep what was in flight, and go on with it after another `init`, on other
    workers if need be; their graphs are traced anew.
    """
    settle()
    atexit.unregister(settle)
    workers.part()
    restarts.note_end(mpi_ops)
    watchdog.leave()
    result = mpi_ops.shutdown(*args, **kwargs)
    watchdog.stop()
    return result
