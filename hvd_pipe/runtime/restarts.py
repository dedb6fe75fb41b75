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

import functools
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from horovod.common.elastic import run_fn
from horovod.common.exceptions import HostsUpdatedInterrupt

from hvd_pipe.errors import HvdPipeError

_log = logging.getLogger("hvd_pipe")

Around = Callable[[], AbstractContextManager[None]]

_FUSION, _CYCLE = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"

YIELD = "OMPI_MCA_mpi_yield_when_idle"
"""Has Open MPI leave the processor to others while it waits."""

_ended_mpi = False
_fixed_both = False
_begun_by_script = False


def is_elastic() -> bool:
    """Whether workers may come and go: Horovod's launchers say so to each."""
    return os.environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")


def elastic_run(
    func: Callable[..., Any],
    finish: Callable[[Any], None],
    horovod: Any,
    translated: Around = nullcontext,
) -> Callable[..., Any]:
    """Return a training function ``func(state, ...)`` that starts anew when workers change.

    ``horovod`` is a module with the adapter's ``init`` and ``shutdown``.
    """

    def restart() -> None:
        horovod.shutdown()
        horovod.init()

    @functools.wraps(func)
    def finishing(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with translated():
                return func(state, *args, **kwargs)
        except HostsUpdatedInterrupt:
            # All ranks raise this at one step, those that have to leave as well.
            finish(state)
            # Horovod goes without sync() if hosts have only gone. A host that comes a moment
            # later would wait in sync() alone, and optimizers start in it.
            raise HostsUpdatedInterrupt(skip_sync=False) from None

    return run_fn(finishing, restart)  # type: ignore[no-any-return]


def observe(horovod: Any, start: Around, end: Around) -> None:
    """Do something around each start and end of Horovod from now on; once for each framework.

    All of Horovod's Python, ``hvd.elastic`` and what it runs at exit included, calls the library
    by one object, where this puts functions in place of the library's.
    """
    global _begun_by_script, _fixed_both
    library, runs = horovod._basics.MPI_LIB_CTYPES, horovod.is_initialized
    if isinstance(library.horovod_init, _Surrounded):
        return
    if runs():  # the script has started it, which nobody has seen
        _begun_by_script, _fixed_both = True, _fixes_both()
    surround(library, "horovod_init", start, lambda: not runs())
    if hasattr(library, "horovod_init_multi_comm"):  # a Horovod without MPI has none
        surround(library, "horovod_init_multi_comm", start, lambda: not runs())
    surround(library, "horovod_shutdown", end, runs)


def surround(owner: Any, name: str, around: Around, matters: Callable[[], bool]) -> None:
    """Do something around each call of a function from now on; once for each function."""
    function = getattr(owner, name)
    if not isinstance(function, _Surrounded):
        setattr(owner, name, _Surrounded(function, around, matters))


class _Surrounded:
    """A function of Horovod's, and what is to be done around it; its attributes are its own."""

    _function: Any
    _around: Around
    _matters: Callable[[], bool]

    def __init__(self, function: Any, around: Around, matters: Callable[[], bool]) -> None:
        vars(self).update(_function=function, _around=around, _matters=matters)

    def __call__(self, *arguments: Any) -> Any:
        if not self._matters():
            return self._function(*arguments)
        with self._around():
            return self._function(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._function, name, value)  # Horovod sets argtypes


def warn_of_missed_settings(horovod: Any, yields: bool, adapter: str) -> None:
    """Say once what Horovod, which runs already, should have been started with."""
    if not horovod.is_initialized() or horovod.size() == 1 or horovod.rank() != 0:
        return
    wanted = {_FUSION: "0"} if _CYCLE not in os.environ else {}  # both crash a second start
    if yields and horovod.mpi_enabled():
        wanted[YIELD] = "1"
    missed = " ".join(f"{key}={value}" for key, value in wanted.items() if key not in os.environ)
    if missed:
        _log.warning(
            "messages take longer than they need, as Horovod was started without %s: set that in "
            "the environment, or call %s.init(), which does, in place of Horovod's.",
            missed,
            adapter,
        )


def _fixes_both() -> bool:
    return _FUSION in os.environ and _CYCLE in os.environ


def prepare(horovod: Any) -> None:
    """Before Horovod starts: turn its own fusion off, unless the user has set it.

    In an elastic job, which will start again, it stays on where the user has set the cycle time.
    Where a script starts Horovod itself it stays as it was: a worker that comes to an elastic job
    starts before anything here can turn it off, and ranks that fuse unlike messages crash.
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
    if not (_begun_by_script or (is_elastic() and _CYCLE in os.environ)):
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
    """Before Horovod ends: note what that ends for good."""
    global _ended_mpi  # noqa: PLW0603
    if horovod.is_initialized() and horovod.mpi_enabled() and "mpi4py.MPI" not in sys.modules:
        _ended_mpi = True
