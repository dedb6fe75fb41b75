"""What belongs to one set of workers, from Horovod's start to its end: it ends for all at once.

    begin()             before all else: from here on, Horovod's joins and its end are seen
    note(sessions)      what is distributed; it outlives the workers, and starts anew on the next
    watch()             each other, from the first that is distributed over all
    Horovod ends        what is in flight is kept, the rest forgotten; graphs are traced anew, as
                        they hold numbers of these workers

New workers have made nothing, so that counting begins again as well.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import logging
import os
import re
import sys
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import global_process_set

from hvd_pipe.errors import HvdPipeError, is_failing
from hvd_pipe.runtime import restarts
from hvd_pipe.runtime.consensus import answer_with
from hvd_pipe.runtime.watch import waits, watchdog
from hvd_pipe.runtime.watch.waits import Wait, of_thread
from hvd_pipe.runtime.watch.watchdog import Frames, Job, horovod_call, is_library, module_of
from hvd_pipe.tensorflow.agree import agreement
from hvd_pipe.tensorflow.graphs import trace_anew

_log = logging.getLogger("hvd_pipe")

_running: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()

# Numbers what is distributed over each process set, whose members all count the same ones.
_counts: defaultdict[object, Iterator[int]] = defaultdict(itertools.count)

_generation = 0
_begun = False
_watching = False
_keeping = False
_leaving = False


def begin() -> None:
    """Have Horovod's joins and its end seen, also where a script asks Horovod itself for them."""
    global _begun  # noqa: PLW0603 - one a process, as Horovod itself
    answer_with(mpi_ops)
    if not _begun:
        _begun = True
        runs = mpi_ops.is_initialized
        if runs():
            _miss_start()
            restarts.warn_of_missed_settings(
                mpi_ops, not mpi_ops.cuda_built(), "hvd_pipe.tensorflow"
            )
        restarts.observe(mpi_ops, _starting, _ending)
        restarts.surround(mpi_ops.MPI_LIB, "horovod_join", _joining, runs)
    _settle_at_exit()


def note(sessions: Any) -> None:
    """Remember what is distributed."""
    _running[next(_numbers)] = sessions


def watch() -> None:
    """Have all ranks watch each other; all come here with the first that all distribute.

    Not in ``hvd.init()``: to connect, they use TensorFlow, and scripts must choose their devices
    before anybody does.
    """
    global _watching  # noqa: PLW0603 - one a process, as Horovod itself
    if not _watching:
        _watching = True
        watchdog.start(JOB)


def running() -> list[Any]:
    """Return what is distributed, in the order in which it was made."""
    return [sessions for _, sessions in sorted(_running.items())]


def count(process_set_id: object) -> int:
    """Number what starts on these workers, for each process set apart."""
    return next(_counts[process_set_id])


def generation() -> int:
    """Return how many sets of workers this process has left."""
    return _generation


@contextmanager
def keeping() -> Iterator[None]:
    """Keep what is in flight in elastic jobs too: whoever ends Horovod here knows of it."""
    global _keeping  # noqa: PLW0603
    _keeping = True
    try:
        yield
    finally:
        _keeping = False


def settle() -> None:
    """Before Horovod ends, wait until the other ranks have sent what this one has sent.

    Not after an exception: the others then wait for this rank, which must go.
    """
    if is_failing():
        return
    engines = [session.engine for sessions in running() for session in sessions]
    if any(engine.is_ahead() for engine in engines) and not restarts.is_elastic():
        warnings.warn(
            "training ended with averages in flight: call optimizer.synchronize() after the last "
            "step (hvd_pipe.tensorflow.drain_gradients() for a tape), or Pipe-SGD loses its last "
            "gradient and CoCoD leaves unequal replicas.",
            stacklevel=2,
        )
    for engine in engines:
        with suppress(tf.errors.OpError):  # a rank that has left before it sent as much
            engine.settle()


@contextmanager
def _joining() -> Iterator[None]:
    """Refuse to join where that would break the others: Horovod gives them zeros."""
    if any(session.refuses_join for each in running() for session in each):
        gc.collect()  # what nobody trains any more may be in a cycle
    if any(session.refuses_join for each in running() for session in each):
        raise HvdPipeError(
            "a rank that has left by hvd.join() counts as zeros, and CoCoD would average these as "
            "a model; codecs and sparse gradients cannot travel then. Give every rank the same "
            "number of steps, or use 'merged-gradient' or 'pipe-sgd' with Compression.none or "
            ".fp16 and sparse_as_dense=True."
        )
    for each in running():
        for session in each:
            session.engine.joins()
    yield


@contextmanager
def _starting() -> Iterator[None]:
    restarts.prepare(mpi_ops)
    if not mpi_ops.cuda_built():
        os.environ.setdefault(restarts.YIELD, "1")
    with _starting_to_communicate():
        yield
    _settle_at_exit()


@contextmanager
def _ending() -> Iterator[None]:
    if _leaving:
        yield
        return
    settle()
    _part()
    restarts.note_end(mpi_ops)
    watchdog.leave()
    yield
    watchdog.stop()


def _settle_at_exit() -> None:
    atexit.unregister(_leave)
    atexit.register(_leave)  # after Horovod's own, so it is called before it


def _leave() -> None:
    global _leaving  # noqa: PLW0603
    settle()
    _leaving = True


def _part() -> None:
    """Leave these workers: everything starts anew on the next ones."""
    global _generation, _watching  # noqa: PLW0603 - one a process, as Horovod itself
    drops = restarts.is_elastic() and not _keeping
    if drops and any(session.engine.is_ahead() for each in running() for session in each):
        _log.warning(
            "elastic: Horovod's own elastic.run and shutdown know nothing of averages in flight, "
            "which are dropped: take `run` and the state from hvd_pipe.tensorflow.elastic (or "
            "hvd_pipe.tensorflow.keras.elastic), which keep them."
        )
    for sessions in running():
        if drops or is_failing():
            for session in sessions:
                session.engine.forget()
        sessions.rest()
        if drops:
            sessions.go_back(None)
    trace_anew()
    _counts.clear()
    _generation += 1
    _watching = False


# How the watch sees that this rank waits for others inside TensorFlow, which does not say so. A
# step is one call, in which TensorFlow computes and waits in threads of its own. A rank waits if:
#
# 1. its main thread stays inside one call of TensorFlow's or Horovod's;
# 2. no thread runs, is about to run, or reads a disk, except those that communicate: they poll;
# 3. TensorFlow does not run Python code of the user's, such as a generator of samples.
#
# Waits in Python code are registered (`hvd_pipe.runtime.watch.waits`), and count at once. A call
# on a GPU looks like waiting, systems without /proc show no threads, and which threads communicate
# is unknown where a script started Horovod before us. There, only a call that has lasted
# HVD_PIPE_TIMEOUT counts, so a longer computation is ended while another rank is lost.

_INSIDE = ("tensorflow.", "horovod.")
_CALLS_BACK = "tensorflow.python.ops.script_ops"
_AT_WORK = "RD"  # runs, or would, and sleeps without a chance to be woken: a disk

_communicating: set[int] = set()
_missed = False


@contextmanager
def _starting_to_communicate() -> Iterator[None]:
    """Take the threads that appear within this for those that communicate."""
    global _missed  # noqa: PLW0603 - one a process, as Horovod itself
    before = waits.threads(os.getpid())
    yield
    _missed = False
    _communicating.clear()
    _communicating.update(waits.threads(os.getpid()) - before)


def _miss_start() -> None:
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
    activity = waits.activity(os.getpid(), thread.native_id or 0)
    pauses = None if activity is None else activity.pauses
    return (thread.native_id, pauses, *names)


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
        users = users or not is_library(frame.f_code.co_filename)
        frame = frame.f_back
    return False


def _is_at_work() -> bool:
    if _missed:  # a thread that polls would count as one that computes
        return False
    others = waits.threads(os.getpid()) - _communicating - {threading.get_native_id()}
    activities = (waits.activity(os.getpid(), number) for number in others)
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
