"""`hvd_pipe.runtime.lifecycle` of torch's Horovod."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import ProcessSet, global_process_set

from hvd_pipe.errors import HvdPipeError, is_failing
from hvd_pipe.runtime import restarts
from hvd_pipe.runtime.lifecycle import Lifecycle
from hvd_pipe.runtime.watch.rank_side import Frames, Job, module_of
from hvd_pipe.runtime.watch.waits import Wait, of_thread, sleep_between_polls, waiting_for
from hvd_pipe.torch.agree import agreement
from hvd_pipe.torch.compression import codec_for
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.allreduce import launch_zeros
from hvd_pipe.torch.messages.group import open_groups
from hvd_pipe.torch.strategies.base import Engine, live_engines

_log = logging.getLogger("hvd_pipe")

_unnamed: defaultdict[object, int] = defaultdict(int)

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
    # Our messages take handles, too, at different moments on each rank.
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


def finish_all() -> None:
    """Apply what this rank's optimizers have deferred; sends nothing."""
    for engine in live_engines():
        engine.finish()


def refuse_join() -> None:
    """Raise HvdPipeError where a rank that joins would break others: it can all-reduce only."""
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
        is_encoded = any(
            codec_for(reduction.compression, p.dtype) for p in engine.settings.parameters
        )
        if not reduction.alone and (is_encoded or engine.settings.sparse):
            return (
                "hvd.join() needs dense gradients that travel as they are: use Compression.none "
                "or .fp16, parameters that are not bfloat16, and sparse_as_dense=True; or give "
                "every rank the same number of steps."
            )
    return ""


class _Lifecycle(Lifecycle):
    """Keeps optimizers (`hvd_pipe.torch.distributed.DistributedMixin`) over sets of workers."""

    adapter = "hvd_pipe.torch"

    def on_gpu(self) -> bool:
        return torch.cuda.is_available()

    def surround(self) -> None:
        runs = mpi_ops.is_initialized
        # shutdown() calls this first, and handles mean nothing after it.
        restarts.surround(mpi_ops.mpi_lib, "horovod_torch_reset", self._resetting, runs)
        restarts.surround(mpi_ops.mpi_lib, "horovod_torch_join", _joining, runs)
        for name in _COLLECTIVES:
            setattr(mpi_ops, name, _numbered(getattr(mpi_ops, name)))

    def settle(self) -> bool:
        if not is_failing():  # else others are gone
            try:
                finish_all()
            except Exception as error:  # whatever it is, Horovod must end
                _log.warning("the last update, which was deferred, is lost: %s", error)
        return pending.settle()

    def release(self, settled: bool) -> None:
        for optimizer in self.running():
            optimizer._release_engine(settled)
        self._running.clear()
        _unnamed.clear()

    @contextmanager
    def _resetting(self) -> Iterator[None]:
        self.leave_workers()
        yield


@contextmanager
def _joining() -> Iterator[None]:
    """Join when all messages of this rank have been reduced; see `hvd_pipe.torch.join`."""
    refuse_join()
    finish_all()
    pending.complete_all()
    for engine in live_engines():
        engine.complete_round()
        if engine.reduction.group is None:
            engine.joined()
    yield
    _take_part([group.user for group in open_groups if group.user is not None])
    _unnamed.clear()  # all ranks have met


def _take_part(engines: list[Engine]) -> None:
    """Send zeros with the ranks that have not joined, until all have."""
    rounds = {engine: launch_zeros(engine.next_messages) for engine in engines}
    begun = time.monotonic()
    with waiting_for("ranks that have not joined"):
        while rounds:
            for engine, messages in tuple(rounds.items()):
                if not all(message.arrived for message in messages):
                    continue
                words = [word for message in messages for word in message.wait()]
                begun = time.monotonic()
                if not any(words):  # all have joined
                    del rounds[engine]
                    if engine in live_engines():
                        engine.joined()
                    continue
                if words[-1] == 0.0:  # a round, and no meeting of the others
                    engine.skip_round()
                rounds[engine] = launch_zeros(engine.next_messages)
            sleep_between_polls(begun)


# How the watch learns that this rank waits for others. Our own code registers its waits
# (`hvd_pipe.runtime.watch.waits`). The user's calls of Horovod are recognised by the modules on
# the thread's stack.

_WAITING = ("horovod.torch.mpi_ops", "horovod.common.basics")  # the latter for shutdown()
_FOR_THREADS = ("threading", "torch.autograd.graph")  # the latter's own run hooks on a GPU


def waits_for(frames: Frames) -> Wait | None:
    """Return the wait for other ranks of the main thread, or of a thread that it waits for."""
    main = threading.main_thread().ident or 0
    frame = frames.get(main)
    wait = _wait_of(main, frame)
    if wait is None and (frame is None or module_of(frame) in _FOR_THREADS):
        wait = next(filter(None, (_wait_of(thread, f) for thread, f in frames.items())), None)
    return wait


def _wait_of(thread: int, frame: FrameType | None) -> Wait | None:
    registered = of_thread(thread)
    if registered is not None or frame is None or module_of(frame) not in _WAITING:
        return registered
    return ("Horovod", *pending.known())


def _failed_elsewhere(error: BaseException) -> bool:
    return isinstance(error, HorovodInternalError)


_lifecycle = _Lifecycle(mpi_ops, Job(global_process_set, agreement, waits_for, _failed_elsewhere))
begin, note, watch = _lifecycle.begin, _lifecycle.note, _lifecycle.watch
count = _lifecycle.count
