"""The state that lasts from Horovod's start to its end, and is dropped when Horovod shuts down.

    begin()             before all else: from here on, Horovod's joins and its end are seen
    note(item)          what is distributed; it outlives the workers, and starts anew on the next
    watch()             each other, from the first that is distributed over all
    count(process set)  numbers these, so that the messages of each have names of their own
    Horovod ends        what is in flight is kept, the rest forgotten

A script may start, join and end Horovod itself, and have nothing but the optimizer from here. What
our functions do around these three, Horovod's own do as well from `begin` on.
"""

from __future__ import annotations

import abc
import atexit
import itertools
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from hvd_pipe.runtime import restarts
from hvd_pipe.runtime.consensus import answer_with
from hvd_pipe.runtime.watch import rank_side


class Lifecycle(abc.ABC):
    """One framework's Horovod in this process: its ``mpi_ops``, and how ranks watch each other."""

    adapter: ClassVar[str]

    def __init__(self, horovod: Any, job: rank_side.Job) -> None:
        self.job = job
        self._horovod = horovod
        self._running: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # The members of a process set all count the same ones.
        self._counts: defaultdict[object, Iterator[int]] = defaultdict(itertools.count)
        self._generation = 0
        self._begun = self._watching = self._exiting = False

    @abc.abstractmethod
    def on_gpu(self) -> bool:
        """Whether Horovod sums on GPUs."""

    @abc.abstractmethod
    def surround(self) -> None:
        """Have more of Horovod's functions seen than its start and end; once."""

    @abc.abstractmethod
    def settle(self) -> bool:
        """Wait until all that this rank has sent is reduced; return whether it is."""

    @abc.abstractmethod
    def release(self, settled: bool) -> None:
        """Keep what is in flight, and forget what belongs to these workers."""

    def starting(self) -> AbstractContextManager[None]:
        """Return what surrounds Horovod's start."""
        return nullcontext()

    def begin(self) -> None:
        """Observe Horovod's joins and its end from now on, also those that scripts call."""
        answer_with(self._horovod)
        if not self._begun:
            self._begun = True
            restarts.warn_of_missed_settings(self._horovod, not self.on_gpu(), self.adapter)
            restarts.observe(self._horovod, self._around_start, self._around_end)
            self.surround()
        self._register_exit()

    def note(self, item: Any) -> None:
        """Register an object that is distributed."""
        self._running[id(item)] = item

    def running(self) -> list[Any]:
        """Return the distributed objects, in the order in which they were made."""
        return list(self._running.values())

    def watch(self) -> None:
        """Have all ranks watch each other, if they do not yet; all ranks come here together."""
        if not self._watching:
            self._watching = True
            rank_side.start(self.job)

    def count(self, process_set_id: object) -> int:
        """Number what starts on these workers, for each process set apart."""
        return next(self._counts[process_set_id])

    def generation(self) -> int:
        """Return how many sets of workers this process has left."""
        return self._generation

    def leave_workers(self) -> None:
        """Leave these workers: everything starts anew on the next ones."""
        self.release(self.settle())
        self._counts.clear()
        self._generation += 1
        self._watching = False

    def _register_exit(self) -> None:
        atexit.unregister(self._exit)
        atexit.register(self._exit)  # after Horovod's own, so it is called before it

    def _exit(self) -> None:
        self._exiting = True
        if self._horovod.is_initialized():
            self.settle()

    @contextmanager
    def _around_start(self) -> Iterator[None]:
        restarts.prepare(self._horovod)
        if not self.on_gpu():
            os.environ.setdefault(restarts.YIELD, "1")
        with self.starting():
            yield
        self._register_exit()

    @contextmanager
    def _around_end(self) -> Iterator[None]:
        if not self._exiting:
            self.leave_workers()
            restarts.note_end(self._horovod)
        rank_side.leave()
        yield
        rank_side.stop()
