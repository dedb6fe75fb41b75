"""What Horovod 0.28.1 cannot do twice in a process, found before it crashes; for each framework.

1. Under MPI it finalises MPI, which cannot be started again.
2. With both ``HOROVOD_FUSION_THRESHOLD`` and ``HOROVOD_CYCLE_TIME`` set, its second start writes
   into a vector that both settings have left empty (``ParameterManager::BayesianParameter``).
"""

from __future__ import annotations

import os
import sys
from typing import Any

from hvd_pipe.errors import HvdPipeError

__all__ = ["is_elastic", "note_end", "prepare"]

_FUSION, _CYCLE = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"

_ended_mpi = False
_fixed_both = False


def is_elastic() -> bool:
    """Whether workers may come and go: Horovod's launchers say so to each."""
    return os.environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")


def prepare(horovod: Any) -> None:
    """Before Horovod starts: turn its own fusion off, unless the user has set it.

    In an elastic job, which will start again, it stays on where the user has set the cycle time.

    Args:
        horovod: The framework's ``mpi_ops``.

    Raises:
        HvdPipeError: This start, or one that must be expected, would crash the process.
    """
    global _fixed_both  # noqa: PLW0603 - one a process, as Horovod itself
    if horovod.is_initialized():
        return
    if _ended_mpi:
        raise HvdPipeError(
            "hvd.init() after hvd.shutdown(): Horovod has finalised MPI, which cannot be started "
            "again. Start the job with `horovodrun --gloo`, or let the script import mpi4py.MPI "
            "before the first hvd.init()."
        )
    if not (is_elastic() and _CYCLE in os.environ):
        os.environ.setdefault(_FUSION, "0")
    both = _FUSION in os.environ and _CYCLE in os.environ
    if _fixed_both or (both and is_elastic()):
        raise HvdPipeError(
            f"Horovod crashes when it starts a second time with both {_FUSION} and {_CYCLE} set, "
            f"as after hvd.shutdown() and at each reset of an elastic job: unset {_CYCLE} (or "
            f"{_FUSION}, if it was you who set it)."
        )
    _fixed_both = both


def note_end(horovod: Any) -> None:
    """Before Horovod ends: note what that ends for good.

    Args:
        horovod: The framework's ``mpi_ops``.
    """
    global _ended_mpi  # noqa: PLW0603
    if horovod.is_initialized() and horovod.mpi_enabled() and "mpi4py.MPI" not in sys.modules:
        _ended_mpi = True
