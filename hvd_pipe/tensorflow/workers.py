"""What belongs to one set of workers, from Horovod's start to its end: it ends for all at once.

    note(sessions)      what is distributed; it outlives the workers, and starts anew on the next
    watch()             each other, from the first that is distributed over all
    note_graphs()       graphs hold numbers of these workers, so they are traced anew on the next
    part()              Horovod is about to end: keep what is in flight, forget the rest

New workers have made nothing, so that counting begins again as well.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvd_pipe.tensorflow.waiting import JOB
from hvd_pipe.watch import watchdog

__all__ = ["count", "generation", "note", "note_graphs", "part", "running", "watch"]

_Function: Any = type(tf.function(lambda: None))
_TRACER = inspect.unwrap(_Function.__call__).__code__.co_filename

_running: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()

# Numbers what is distributed over each process set, whose members all count the same ones.
_counts: defaultdict[object, Iterator[int]] = defaultdict(itertools.count)

_graphs: weakref.WeakSet[Any] = weakref.WeakSet()
_generation = 0
_watching = False


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


def note_graphs() -> None:
    """Remember every ``tf.function`` that is being traced here.

    TensorFlow does not tell which these are; the calls that trace them are on the stack.
    """
    if tf.executing_eagerly():
        return
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == _TRACER:
            found = frame.f_locals.get("self")
            if isinstance(found, _Function):
                _graphs.add(found)
        frame = frame.f_back  # type: ignore[assignment]


def part() -> None:
    """Leave these workers: everything starts anew on the next ones."""
    global _generation, _watching  # noqa: PLW0603 - one a process, as Horovod itself
    for sessions in running():
        sessions.rest()
    for function in _graphs:
        function._function_cache.clear()
    _graphs.clear()
    _counts.clear()
    _generation += 1
    _watching = False
