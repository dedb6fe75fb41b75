"""When a process waits for other ranks, under torch.

What is ours registers its waits (:mod:`hvd_pipe.runtime.watch.waits`). The user's own calls
of Horovod are
known by the modules that the thread is in.
"""

from __future__ import annotations

import threading
from types import FrameType

from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import global_process_set

from hvd_pipe.runtime.watch.waits import Wait, of_thread
from hvd_pipe.runtime.watch.watchdog import Frames, Job, horovod_call, module_of
from hvd_pipe.torch.agree import agreement
from hvd_pipe.torch.messages import in_flight

__all__ = ["JOB", "waits_for"]

_WAITING = ("horovod.torch.mpi_ops", "horovod.common.basics")  # the latter for shutdown()
_FOR_THREADS = ("threading", "torch.autograd.graph")  # the latter's own run hooks on a GPU


def waits_for(frames: Frames) -> Wait | None:
    """Return what the main thread, or others that it waits for, wait for, if that is other ranks.

    Others do not count otherwise: a rank that saves a checkpoint may well wait in one of them.
    """
    main = threading.main_thread().ident or 0
    frame = frames.get(main)
    found = _wait_of(main, frame)
    if found is None and (frame is None or module_of(frame) in _FOR_THREADS):
        found = next(filter(None, (_wait_of(*each) for each in frames.items())), None)
    return found


def _wait_of(thread: int, frame: FrameType | None) -> Wait | None:
    registered = of_thread(thread)
    if registered is not None or frame is None or module_of(frame) not in _WAITING:
        return registered
    names = horovod_call(frame)
    return Wait((names[-1], *in_flight.known()), "join" in names)


def _failed_elsewhere(error: BaseException) -> bool:
    return isinstance(error, HorovodInternalError)


JOB = Job(global_process_set, agreement, waits_for, _failed_elsewhere)
