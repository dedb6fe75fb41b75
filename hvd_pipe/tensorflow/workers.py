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
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_pipe.errors import HvdPipeError, is_failing
from hvd_pipe.runtime import restarts
from hvd_pipe.runtime.agreement import answer_with
from hvd_pipe.runtime.watch import watchdog
from hvd_pipe.tensorflow.graphs import trace_anew
from hvd_pipe.tensorflow.waiting import JOB, missed_start, starting_to_communicate

__all__ = [
    "begin",
    "count",
    "generation",
    "keeping",
    "note",
    "running",
    "settle",
    "watch",
]

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
            missed_start()
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
    """Refuse to join where that would break the others: Horovod gives them zeros.

    Raises:
        HvdPipeError: Something sends models, or encoded or sparse gradients.
    """
    if any(session.refuses_join for each in running() for session in each):
        gc.collect()  # what nobody trains any more may be in a cycle
    if any(session.refuses_join for each in running() for session in each):
        raise HvdPipeError(
            "a rank that has left by hvd.join() counts as zeros, and CoCoD would average these as "
            "a model; codecs and sparse gradients cannot travel then. Give every rank the same "
            "number of steps, or use 'merged-gradient' or 'pipe-sgd' with Compression.none or "
            ".fp16 and sparse_as_dense=True."
        )
    yield


@contextmanager
def _starting() -> Iterator[None]:
    restarts.prepare(mpi_ops)
    if not mpi_ops.cuda_built():
        os.environ.setdefault(restarts.YIELD, "1")
    with starting_to_communicate():
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
