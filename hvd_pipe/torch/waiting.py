"""When a process waits for other ranks: by the functions of Horovod that its threads are in."""

from __future__ import annotations

import threading
from types import FrameType

from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import global_process_set

from hvd_pipe.torch.agree import agreement
from hvd_pipe.torch.exchange import Exchange
from hvd_pipe.watch.watchdog import Frames, Job, module_of

__all__ = ["JOB", "waits_for"]

_TRANSPORTS = ("hvd_pipe.pipeline.mpi", "hvd_pipe.pipeline.process_sets")
_WAITING = (
    "horovod.torch.mpi_ops",
    "horovod.common.basics",  # shutdown
    "hvd_pipe.torch.in_flight",
    "hvd_pipe.torch.exchange",
    "hvd_pipe.torch.pipedream.broadcasts",
    *_TRANSPORTS,
)
_FOR_THREADS = ("threading", "torch.autograd.graph")  # the latter's own run hooks on a GPU


def waits_for(frames: Frames) -> tuple[object, ...] | None:
    """Return what the main thread, or others that it waits for, wait for inside Horovod, if so.

    Others do not count otherwise: a rank that saves a checkpoint may well wait in one of them.
    """
    main = frames.get(threading.main_thread().ident or 0)
    found = _wait_of(main)
    if found is None and (main is None or module_of(main) in _FOR_THREADS):
        found = next(filter(None, map(_wait_of, frames.values())), None)
    return found


def _wait_of(frame: FrameType | None) -> tuple[object, ...] | None:
    """Return what a thread waits for inside Horovod; it changes with each message."""
    while frame is not None and module_of(frame) == "threading":
        frame = frame.f_back
    if frame is None or module_of(frame) not in _WAITING:
        return None
    if module_of(frame) in _TRANSPORTS and "handle" not in frame.f_locals:
        return None  # the thread that looks after messages, which sleeps between two looks
    # Handles are numbered; an exchange has none here, but counts its bytes at each launch.
    message, exchange = frame.f_locals.get("handle"), frame.f_locals.get("self")
    if isinstance(exchange, Exchange):
        message = (id(exchange), exchange._reduction.traffic.sent_bytes)
    name = frame.f_code.co_name
    while frame.f_back is not None and module_of(frame.f_back) in _WAITING:
        frame = frame.f_back  # synchronize() is called by join(), which is another matter
        name = frame.f_code.co_name
    return name, message


def _failed_elsewhere(error: BaseException) -> bool:
    return isinstance(error, HorovodInternalError)


JOB = Job(global_process_set, agreement, waits_for, _failed_elsewhere)
