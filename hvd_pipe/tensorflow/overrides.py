"""Horovod's start and end, with what ours need around them."""

from __future__ import annotations

from typing import Any

from horovod.tensorflow import mpi_ops

from hvd_pipe.tensorflow import workers

__all__ = ["init", "shutdown"]


def init(*args: Any, **kwargs: Any) -> Any:
    """Initialise Horovod, with its own fusion of messages off unless the user has set it.

    Our buckets are merged already; fusing them again would copy every byte twice more. Set
    ``HOROVOD_FUSION_THRESHOLD`` (bytes) to have it back. Where Horovod sums on the CPU, Open MPI
    lets others have the processor while it waits: computing needs it
    (``OMPI_MCA_mpi_yield_when_idle=0`` has it poll). Arguments as Horovod's ``init``.

    Raises:
        HvdPipeError: Horovod was shut down in this process and cannot start again here.
    """
    workers.begin()
    return mpi_ops.init(*args, **kwargs)


def shutdown(*args: Any, **kwargs: Any) -> Any:
    """Shut Horovod down when the other ranks no longer need what this one has sent.

    Optimizers and tapes keep what was in flight, and go on with it after another `init`, on other
    workers if need be; their graphs are traced anew.
    """
    workers.begin()
    with workers.keeping():
        return mpi_ops.shutdown(*args, **kwargs)
