"""When a process waits for other ranks inside TensorFlow, which does not say so.

A step is one call of TensorFlow's, in which it computes and waits in threads of its own. A process
counts as one that waits for other ranks while all of this is so:

1. its main thread is inside one and the same call of TensorFlow's or Horovod's;
2. none of its threads runs, is about to run, or reads a disk; but for those that communicate,
   which poll all the time under Open MPI;
3. TensorFlow is not in Python code of the user's, as for samples that he makes.

What waits in Python code, for a pipeline's message say, registers that
(:mod:`hvd_pipe.runtime.watch.waits`), and counts at once.

So a rank that computes for long on CPUs is none. Computing on a GPU looks like waiting, and
systems without ``/proc`` show no threads: there, only a call that has lasted ``HVD_PIPE_TIMEOUT``
counts, and a single call that computes for longer than that while another rank is lost is ended.
So it is where a script has started Horovod before anything of ours knew: which threads
communicate is not known then.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow.mpi_ops import global_process_set

from hvd_pipe.runtime.watch import threads
from hvd_pipe.runtime.watch.waits import Wait, of_thread
from hvd_pipe.runtime.watch.watchdog import Frames, Job, horovod_call, is_library, module_of
from hvd_pipe.tensorflow.agree import agreement

__all__ = ["JOB", "missed_start", "starting_to_communicate", "waits_for"]

_INSIDE = ("tensorflow.", "horovod.")
_CALLS_BACK = "tensorflow.python.ops.script_ops"
_AT_WORK = "RD"  # runs, or would, and sleeps without a chance to be woken: a disk

_communicating: set[int] = set()
_missed = False


@contextmanager
def starting_to_communicate() -> Iterator[None]:
    """Take the threads that appear within this for those that communicate."""
    global _missed  # noqa: PLW0603 - one a process, as Horovod itself
    before = threads.threads(os.getpid())
    yield
    _missed = False
    _communicating.clear()
    _communicating.update(threads.threads(os.getpid()) - before)


def missed_start() -> None:
    """Note that nobody has seen which threads communicate."""
    global _missed  # noqa: PLW0603
    _missed = True


def waits_for(frames: Frames) -> Wait | None:
    """Return what the main thread, or one that it waits for, is inside of while nothing works.

    It changes whenever that thread has run.
    """
    thread = threading.main_thread()
    registered = of_thread(thread.ident or 0)
    if registered is not None:
        return registered
    frame = _python(frames.get(thread.ident or 0))
    if frame is not None and module_of(frame) == "threading":  # it waits for another
        for other in threading.enumerate():
            found = _python(frames.get(other.ident or 0))
            if found is not None and _is_inside(found):
                thread, frame = other, found
                break
    if frame is None or not _is_inside(frame):
        return None
    if any(map(_calls_back, frames.values())) or _is_at_work():
        return None
    names = horovod_call(frame)
    activity = threads.activity(os.getpid(), thread.native_id or 0)
    pauses = None if activity is None else activity.pauses
    return Wait((thread.native_id, pauses, *names), "join" in names)


def _python(frame: FrameType | None) -> FrameType | None:
    """Leave out the functions that TensorFlow makes for operations from C++."""
    while frame is not None and frame.f_code.co_filename.startswith("<"):
        frame = frame.f_back
    return frame


def _is_inside(frame: FrameType) -> bool:
    return module_of(frame).startswith(_INSIDE)


def _calls_back(frame: FrameType | None) -> bool:
    """Whether a thread runs the user's Python code for an operation of TensorFlow's."""
    users = False
    while frame is not None:
        if module_of(frame) == _CALLS_BACK:
            return users
        users = users or not is_library(frame)
        frame = frame.f_back
    return False


def _is_at_work() -> bool:
    if _missed:  # a thread that polls would count as one that computes
        return False
    others = threads.threads(os.getpid()) - _communicating - {threading.get_native_id()}
    activities = (threads.activity(os.getpid(), number) for number in others)
    return any(found is not None and found.state in _AT_WORK for found in activities)


def _is_sure() -> bool:
    return sys.platform == "linux" and not _missed and not tf.config.list_logical_devices("GPU")


def _failed_elsewhere(error: BaseException) -> bool:
    """Whether an operation of Horovod's has failed; TensorFlow has no class for that.

    >>> _failed_elsewhere(tf.errors.UnknownError(None, None, "Horovod has been shut down. This"))
    True
    >>> _failed_elsewhere(tf.errors.InvalidArgumentError(None, None, "{{node horovod.py}} shapes"))
    False
    """
    if isinstance(error, HorovodInternalError):
        return True
    return isinstance(error, tf.errors.OpError) and bool(_OF_HOROVOD.search(error.message))


_OF_HOROVOD = re.compile(
    r"Horovod has been shut down|\{\{(?:function_)?node [^}]*(?:hvd_pipe\.|Horovod)"
)

JOB = Job(global_process_set, agreement, waits_for, _failed_elsewhere, _is_sure)
