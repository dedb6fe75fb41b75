"""Horovod's start and end, with what ours need around them."""

from __future__ import annotations

import os
import weakref
from typing import Any

from horovod.tensorflow import mpi_ops

__all__ = ["init", "note", "shutdown"]

_running: weakref.WeakSet[Any] = weakref.WeakSet()


def init(*args: Any, **kwargs: Any) -> Any:
    """Initialise Horovod, with its own fusion of messages off unless the user has set it.

    Our buckets are merged already; fusing them again would copy every byte twice more. Set
    ``HOROVOD_FUSION_THRESHOLD`` (bytes) to have it back. Arguments as Horovod's ``init``.
    """
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    return mpi_ops.init(*args, **kwargs)


def note(sessions: Any) -> None:
    """Remember whose messages must have arrived before Horovod ends."""
    _running.add(sessions)


def shutdown(*args: Any, **kwargs: Any) -> Any:
    """Shut Horovod down when the other ranks no longer need what this one has sent."""
    for sessions in list(_running):
        for session in sessions:
            session.engine.settle()
    return mpi_ops.shutdown(*args, **kwargs)
