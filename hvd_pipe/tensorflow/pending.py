"""Variables whose update is left to the next step: reading one makes the update first.

All code that uses a variable reads its attribute ``_handle``, and so does TensorFlow's C++. A
graph has read handles when it was traced, so calls of graphs are handled separately.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

due: dict[int, Callable[[], None]] = {}
"""By the id of an optimizer's sessions, a function that makes its pending updates."""

_lock = threading.RLock()
_OWNERS = "_hvd_pipe_owners"


def settle(owners: Iterable[int] | None = None) -> None:
    """Make the updates that are due. Other ranks send their part now, or in their next step."""
    with _lock:
        for owner in list(due if owners is None else owners):
            if owner in due:
                due[owner]()


@contextmanager
def settling(owner: object) -> Iterator[bool]:
    """Mark the updates of an owner as made, unless this block raises."""
    with _lock:
        finish = due.pop(id(owner), None)  # first, as updates use the variables
        try:
            yield finish is not None
        except BaseException:
            if finish is not None:
                due[id(owner)] = finish
            raise


class _Watched:
    @property
    def _handle(self) -> Any:
        if due and tf.executing_eagerly():
            settle(getattr(self.__dict__["_handle"], _OWNERS, ()))
        return self.__dict__["_handle"]


@functools.cache
def _watched(cls: Any) -> Any:
    return type(cls.__name__, (_Watched, cls), {"__module__": cls.__module__})


def watch(variables: Iterable[Any], owner: object) -> None:
    """Have an owner's updates made before one of these variables is used outside of a graph."""
    for variable in variables:
        cls: Any = type(variable)
        handle = variable.__dict__["_handle"]
        setattr(handle, _OWNERS, {*getattr(handle, _OWNERS, ()), id(owner)})
        if not issubclass(cls, _Watched):
            variable.__class__ = _watched(cls)


def looked_at(call: Callable[..., Any]) -> Callable[..., Any]:
    """Have updates made before a call of a graph that uses such a variable."""

    @functools.wraps(call)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if due and tf.executing_eagerly():
            for handle in self.captured_inputs:
                settle(getattr(handle, _OWNERS, ()))
        return call(self, *args, **kwargs)

    return called
