"""Horovod's functions that need another body here."""

from __future__ import annotations

from typing import Any

from horovod.torch import mpi_ops

from hvd_pipe.torch import workers
from hvd_pipe.torch.broadcasts import broadcast_optimizer_state, broadcast_parameters
from hvd_pipe.torch.strategies.engine import refuse_join

__all__ = ["broadcast_optimizer_state", "broadcast_parameters", "init", "join", "shutdown"]


def init(*args: Any, **kwargs: Any) -> Any:
    """Initialise Horovod, with its own fusion of messages off unless the user has set it.

    Our buckets are merged already; fusing them again would copy every byte twice more. Set
    ``HOROVOD_FUSION_THRESHOLD`` (bytes) to have it back. Without a GPU, Open MPI lets others have
    the processor while it waits: computing needs it (``OMPI_MCA_mpi_yield_when_idle=0`` has it
    poll). Arguments as Horovod's ``init``.

    Raises:
        HvdPipeError: Horovod was shut down in this process and cannot start again here.
    """
    was_running = mpi_ops.is_initialized()
    workers.begin()
    result = mpi_ops.init(*args, **kwargs)
    if not was_running:
        workers.watch()
    return result


def shutdown(*args: Any, **kwargs: Any) -> Any:
    """Shut Horovod down when the other ranks no longer need what this one has sent.

    Optimizers keep what was in flight, and go on with it after another `init`, on other workers
    if need be.
    """
    workers.begin()
    return mpi_ops.shutdown(*args, **kwargs)


def join(device: int = -1) -> int:
    """Horovod's ``join``, when all that this rank has sent has been reduced.

    A rank that has joined takes part with zeros, even where it had sent something, and would then
    wait for that for ever. Give collectives of your own a name: Horovod numbers unnamed ones, and
    ranks count differently after uneven steps.

    Raises:
        HvdPipeError: An optimizer sends encoded or sparse gradients.
    """
    workers.begin()
    refuse_join()  # here, too: Horovod makes an error of its own kind of one that is raised inside
    last: int = mpi_ops.join(device)
    return last
