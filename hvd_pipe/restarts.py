"""Horovod's start and end in a process, for each framework: who must know, and what may not be.

A script may start and end Horovod by ``horovod.torch`` or ``horovod.tensorflow`` and have nothing
but the optimizer from here. So the first optimizer or tape has both seen (`observe`), whoever asks
for them: graphs and message names that belong to one set of workers must not outlive it.

What Horovod 0.28.1 cannot do twice in a process is found before it crashes:

1. Under MPI it finalises MPI, which cannot be started again.
2. With both ``HOROVOD_FUSION_THRESHOLD`` and ``HOROVOD_CYCLE_TIME`` set, its second start writes
   into a vector that both settings have left empty (``ParameterManager::BayesianParameter``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hvd_pipe.errors import HvdPipeError

__all__ = ["is_elastic", "note_end", "observe", "prepare"]

Around = Callable[[], AbstractContextManager[None]]

_FUSION, _CYCLE = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"

_ended_mpi = False
_fixed_both = False


def is_elastic() -> bool:
    """Whether workers may come and go: Horovod's launchers say so to each."""
    return os.environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")


def observe(horovod: Any, start: Around, end: Around) -> None:
    """Do something around each start and end of Horovod from now on; once for each framework.

    All of Horovod's Python, ``hvd.elastic`` and what it runs at exit included, calls the library
    by one object, where this puts two functions in place of the library's.

    Args:
        horovod: The framework's ``mpi_ops``.
        start: What is around a start; not called where Horovod runs already.
        end: What is around an end; not called where Horovod does not run.
    """
    global _fixed_both  # noqa: PLW0603
    library = horovod._basics.MPI_LIB_CTYPES
    if isinstance(library.horovod_init, _Observed):
        return
    if horovod.is_initialized():  # by the script, which nobody has seen
        _fixed_both = _fixes_both()
    runs = horovod.is_initialized
    for name in ("horovod_init", "horovod_init_multi_comm"):
        setattr(library, name, _Observed(getattr(library, name), start, lambda: not runs()))
    library.horovod_shutdown = _Observed(library.horovod_shutdown, end, lambda: bool(runs()))


class _Observed:
    """A function of Horovod's library, and what is to be done around it."""

    def __init__(self, function: Any, around: Around, matters: Callable[[], bool]) -> None:
        self._function, self._around, self._matters = function, around, matters

    def __call__(self, *arguments: Any) -> Any:
        if not self._matters():
            return self._function(*arguments)
        with self._around():
            return self._function(*arguments)

    @property
    def argtypes(self) -> Any:
        """As ctypes' functions have them; Horovod sets one's."""
        return self._function.argtypes

    @argtypes.setter
    def argtypes(self, kinds: Any) -> None:
        self._function.argtypes = kinds


def _fixes_both() -> bool:
    return _FUSION in os.environ and _CYCLE in os.environ


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
    both = _fixes_both()
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
