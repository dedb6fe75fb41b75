"""What belongs to one set of workers, from Horovod's start to its end: it ends for all at once.

    begin()             before all else: from here on, Horovod's joins and its end are seen
    note(optimizer)     what is distributed; it outlives the workers, and starts anew on the next
    watch()             each other, from the first optimizer that is distributed over all
    count(process set)  numbers optimizers, so that the messages of each have names of their own
    Horovod ends        what is in flight is kept, the rest forgotten

A script may start, join and end Horovod by ``horovod.torch``, and have nothing but the optimizer
from here. What our functions do around these three, Horovod's own do as well from `begin` on.
"""

from __future__ import annotations

import atexit
import functools
import gc
import inspect
import itertools
import logging
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import ProcessSet, global_process_set

from hvd_pipe.errors import HvdPipeError, is_failing
from hvd_pipe.runtime import restarts
from hvd_pipe.runtime.consensus import answer_with
from hvd_pipe.runtime.watch import watchdog
from hvd_pipe.runtime.watch.waits import Wait, of_thread
from hvd_pipe.runtime.watch.watchdog import Frames, Job, horovod_call, module_of
from hvd_pipe.torch.agree import agreement
from hvd_pipe.torch.compression import codec_for
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.strategies.base import live_engines

_log = logging.getLogger("hvd_pipe")


class Distributed(Protocol):
    """What is distributed: see `hvd_pipe.torch.distributed.DistributedMixin`."""

    def _release_engine(self, keep: bool) -> object:
        """Give the engine up, and keep what it has in flight or not."""


_running: weakref.WeakSet[Distributed] = weakref.WeakSet()

# Numbers the optimizers of each process set, whose members all count the same ones.
_counts: defaultdict[object, Iterator[int]] = defaultdict(itertools.count)
_unnamed: defaultdict[object, int] = defaultdict(int)
_begun = _watching = _leaving = False


def begin() -> None:
    """Have Horovod's joins and its end seen, also where a script asks Horovod itself for them."""
    global _begun  # noqa: PLW0603 - one a process, as Horovod itself
    answer_with(mpi_ops)
    if not _begun:
        _begun = True
        restarts.warn_of_missed_settings(mpi_ops, not torch.cuda.is_available(), "hvd_pipe.torch")
        restarts.observe(mpi_ops, _starting, _ending)
        runs = mpi_ops.is_initialized
        # shutdown() calls this first, and handles mean nothing after it.
        restarts.surround(mpi_ops.mpi_lib, "horovod_torch_reset", _resetting, runs)
        restarts.surround(mpi_ops.mpi_lib, "horovod_torch_join", _joining, runs)
        for name in _COLLECTIVES:
            setattr(mpi_ops, name, _numbered(getattr(mpi_ops, name)))
    _settle_at_exit()


_COLLECTIVES = (
    "_allgather_async",
    "_allreduce_async",
    "_alltoall_async",
    "_broadcast_async",
    "_grouped_allgather_async",
    "_grouped_allreduce_async",
    "_grouped_reducescatter_async",
    "_reducescatter_async",
)
"""Horovod's functions that all of its collectives of tensors call, with positional arguments."""


def _numbered(collective: Callable[..., int]) -> Callable[..., int]:
    """Return a collective that numbers unnamed calls, where Horovod takes the handle."""
    # Messages of ours take handles, too, at other moments on each rank.
    where = list(inspect.signature(collective).parameters).index("name")

    @functools.wraps(collective)
    def call(*args: Any) -> int:
        if args[where] is not None:
            return collective(*args)
        process_set = next(arg for arg in args if isinstance(arg, ProcessSet))
        # Horovod gives the ids of sets that were removed to new ones.
        kind = (collective.__name__, *(process_set.ranks or ()))
        handle = collective(*args[:where], f"unnamed.{_unnamed[kind]}", *args[where + 1 :])
        _unnamed[kind] += 1  # what is refused on one rank is not counted there
        return handle

    return call


def note(optimizer: Distributed) -> None:
    """Remember what is distributed."""
    _running.add(optimizer)


def watch() -> None:
    """Have all ranks watch each other, if they do not yet; all ranks come here together."""
    global _watching  # noqa: PLW0603
    if not _watching:
        _watching = True
        watchdog.start(_JOB)


def count(process_set_id: object) -> int:
    """Number what starts on these workers, for each process set apart."""
    return next(_counts[process_set_id])


def finish_all() -> None:
    """Apply what this rank's optimizers have deferred; sends nothing."""
    for engine in live_engines():
        engine.finish()


def refuse_join() -> None:
    """Raise where a rank that joins would break the others: Horovod knows all-reduces only then.

    Raises:
        HvdPipeError: An optimizer sends encoded or sparse gradients, or some within a node.
    """
    if _against_join():
        gc.collect()  # an optimizer that the script has dropped may wait for that, on this rank
        if problem := _against_join():
            raise HvdPipeError(problem)


def _against_join() -> str:
    for engine in live_engines():
        reduction = engine.reduction
        if not engine.can_join and not reduction.alone:
            return (
                "hvd.join() does not go with within='node', whose gradients travel over process "
                "sets: give every rank the same number of steps."
            )
        encoded = any(
            codec_for(reduction.compression, p.dtype) for p in engine.settings.parameters
        )
        if not reduction.alone and (encoded or engine.settings.sparse):
            return (
                "hvd.join() needs dense gradients that travel as they are: use Compression.none "
                "or .fp16, parameters that are not bfloat16, and sparse_as_dense=True; or give "
                "every rank the same number of steps."
            )
    return ""


def _settle_at_exit() -> None:
    atexit.unregister(_leave)
    atexit.register(_leave)  # after Horovod's own, so it is called before it


def _leave() -> None:
    global _leaving  # noqa: PLW0603
    _leaving = True
    if mpi_ops.is_initialized():
        _finish_deferred()
        pending.settle()


def _finish_deferred() -> None:
    """Let optimizers apply what has been deferred; not after an exception: others are gone."""
    if is_failing():
        return
    try:
        finish_all()
    except Exception as error:  # whatever it is, Horovod must end
        _log.warning("the last update, which was deferred, is lost: %s", error)


@contextmanager
def _starting() -> Iterator[None]:
    restarts.prepare(mpi_ops)
    if not torch.cuda.is_available():
        os.environ.setdefault(restarts.YIELD, "1")
    yield
    _settle_at_exit()


@contextmanager
def _joining() -> Iterator[None]:
    """Join when all that this rank has sent has been reduced; see `hvd_pipe.torch.join`."""
    refuse_join()
    finish_all()
    pending.complete_all()
    for engine in live_engines():
        engine.joined()
    yield
    _unnamed.clear()  # all ranks have met


@contextmanager
def _resetting() -> Iterator[None]:
    _leave_workers()
    yield


@contextmanager
def _ending() -> Iterator[None]:
    if not _leaving:
        _leave_workers()
        restarts.note_end(mpi_ops)
    watchdog.leave()
    yield
    watchdog.stop()


def _leave_workers() -> None:
    """Leave these workers: everything starts anew on the next ones."""
    global _watching  # noqa: PLW0603
    _finish_deferred()
    keep = pending.settle()
    for optimizer in list(_running):
        optimizer._release_engine(keep)
    _running.clear()
    _counts.clear()
    _unnamed.clear()
    _watching = False


# How the watch sees that this rank waits for others. What is ours registers its waits
# (`hvd_pipe.runtime.watch.waits`). The user's own calls of Horovod are known by the modules that
# the thread is in.

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
    return (names[-1], *pending.known())


def _failed_elsewhere(error: BaseException) -> bool:
    return isinstance(error, HorovodInternalError)


_JOB = Job(global_process_set, agreement, waits_for, _failed_elsewhere)
