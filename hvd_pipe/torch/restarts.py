"""`hvd_pipe.restarts` by way of PyTorch's Horovod."""

from __future__ import annotations

from horovod.torch import mpi_ops

from hvd_pipe import restarts

__all__ = ["note_end", "prepare"]


def prepare() -> None:
    """Before Horovod starts, as `hvd_pipe.restarts.prepare`."""
    restarts.prepare(mpi_ops.is_initialized())


def note_end() -> None:
    """Before Horovod ends, as `hvd_pipe.restarts.note_end`."""
    restarts.note_end(mpi_ops.is_initialized() and mpi_ops.mpi_enabled())
