"""`hvd_pipe.runtime.lifecycle` of TensorFlow's Horovod.

Graphs hold numbers of one set of workers: they are traced anew on the next. New workers have made
nothing, so that counting begins again as well.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import global_process_set

from hvd_pipe.errors import HvdPipeError, is_failing
from hvd_pipe.runtime import restarts
from hvd_pipe.runtime.lifecycle import Lifecycle
from hvd_pipe.runtime.watch import waits
from hvd_pipe.runtime.watch.rank_side import Frames, Job, is_library, module_of
from hvd_pipe.runtime.watch.waits import Wait, of_thread
from hvd_pipe.tensorflow.agree import agreement
from hvd_pipe.tensorflow.graphs import trace_anew

_log = logging.getLogger("hvd_pipe")


class _Lifecycle(Lifecycle):
    """Keeps `hvd_pipe.tensorflow.sessions.Sessions` from one set of workers to the next.

    Ranks do not watch each other from ``hvd.init()`` on: to connect, they use TensorFlow, and
    scripts must choose their devices before anybody does.
    """

    adapter = "hvd_pipe.tensorflow"
    _keeping = False

    def on_gpu(self) -> bool:
        return bool(mpi_ops.cuda_built())

    def surround(self) -> None:
        if mpi_ops.is_initialized():
            _miss_start()
        restarts.surround(mpi_ops.MPI_LIB, "horovod_join", _joining, mpi_ops.is_initialized)

    def starting(self) -> AbstractContextManager[None]:
        return _starting_to_communicate()

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep the state in flight when Horovod ends within this, in elastic jobs too."""
        self._keeping = True
        try:
            yield
        finally:
            self._keeping = False

    def settle(self) -> bool:
        """Not after an exception: the others then wait for this rank, which must go."""
        if is_failing():
            return False
        engines = [session.engine for sessions in self.running() for session in sessions]
        if any(engine.is_ahead() for engine in engines) and not restarts.is_elastic():
            warnings.warn(
                "training ended with averages in flight: call optimizer.synchronize() after the "
                "last step (hvd_pipe.tensorflow.drain_gradients() for a tape), or Pipe-SGD loses "
                "its last gradient and CoCoD leaves unequal replicas.",
                stacklevel=2,
            )
        for engine in engines:
            with suppress(tf.errors.OpError):  # a rank that has left before it sent as much
                engine.settle()
        return True

    def release(self, settled: bool) -> None:
        drops = restarts.is_elastic() and not self._keeping
        every = [session for sessions in self.running() for session in sessions]
        if drops and any(session.engine.is_ahead() for session in every):
            _log.warning(
                "elastic: Horovod's own elastic.run and shutdown know nothing of averages in "
                "flight, which are dropped: take `run` and the state from "
                "hvd_pipe.tensorflow.elastic (or hvd_pipe.tensorflow.keras.elastic), which keep "
                "them."
            )
        if drops or not settled:
            for session in every:
                session.engine.forget()
        for sessions in self.running():
            sessions.rest()
            if drops:
                sessions.go_back(None)
        trace_anew()


@contextmanager
def _joining() -> Iterator[None]:
    """Refuse to join where that would break the others: Horovod gives them zeros."""

    def refused() -> bool:
        return any(session.refuses_join for sessions in running() for session in sessions)

    if refused():
        gc.collect()  # what nobody trains any more may be in a cycle
    if refused():
        raise HvdPipeError(
            "a rank that has left by hvd.join() counts as zeros, and CoCoD would average these as "
            "a model; codecs and sparse gradients cannot travel then. Give every rank the same "
            "number of steps, or use 'merged-gradient' or 'pipe-sgd' with Compression.none or "
            ".fp16 and sparse_as_dense=True."
        )
    for sessions in running():
        for session in sessions:
            session.engine.joins()
    yield


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

_communicating: set[int] = set()
_missed = False


@contextmanager
def _starting_to_communicate() -> Iterator[None]:
    """Record the threads that start within this as those that communicate."""
    global _missed  # noqa: PLW0603 - one a process, as Horovod itself
    before = waits.threads(os.getpid())
    yield
    _missed = False
    _communicating.clear()
    _communicating.update(waits.threads(os.getpid()) - before)


def _miss_start() -> None:
    """Record that it is not known which threads communicate."""
    global _missed  # noqa: PLW0603
    _missed = True


def waits_for(frames: Frames) -> Wait | None:
    """Return what the main thread, or one that it waits for, is inside of while nothing works.

    It changes whenever that thread has run.
    """
    thread = threading.main_thread()
    registered = of_thread(thread.ident)
    if registered is not None:
        return registered
    frame = _python(frames.get(thread.ident or 0))
    if frame is not None and module_of(frame) == "threading":  # it waits for another
        for other in threading.enumerate():
            place = _python(frames.get(other.ident or 0))
            if place is not None and module_of(place).startswith(_INSIDE):
                thread, frame = other, place
                break
    if frame is None or not module_of(frame).startswith(_INSIDE):
        return None
    if any(map(_calls_back, frames.values())) or _is_at_work():
        return None
    activity = waits.activity(os.getpid(), thread.native_id or 0)
    return (thread.native_id, None if activity is None else activity.pauses)


def _python(frame: FrameType | None) -> FrameType | None:
    """Leave out the functions that TensorFlow makes for operations from C++."""
    while frame is not None and frame.f_code.co_filename.startswith("<"):
        frame = frame.f_back
    return frame


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
    return any(activity is not None and activity.works for activity in activities)


def _is_sure() -> bool:
    return sys.platform == "linux" and not _missed and not tf.config.list_logical_devices("GPU")


def _failed_elsewhere(error: BaseException) -> bool:
    """Whether an operation of Horovod's has failed; TensorFlow has no class for that.

    >>> _failed_elsewhere(tf.errors.UnknownError(None, None, "Horovod has been shut down. This"))
    True
    >>> _failed_elsewhere(tf.errors.InvalidArgumentError(None, None, "{{node horovod.py}} shapes"))
    False
    """
    words = r"Horovod has been shut down|\{\{(?:function_)?node [^}]*(?:hvd_pipe\.|Horovod)"
    of_horovod = isinstance(error, tf.errors.OpError) and re.search(words, error.message)
    return isinstance(error, HorovodInternalError) or bool(of_horovod)


JOB = Job(global_process_set, agreement, waits_for, _failed_elsewhere, _is_sure)
_lifecycle = _Lifecycle(mpi_ops, JOB)
begin, note, watch = _lifecycle.begin, _lifecycle.note, _lifecycle.watch
count, running, generation = _lifecycle.count, _lifecycle.running, _lifecycle.generation
keeping = _lifecycle.keeping
