"""Names for messages that user code may send any number of times in a step."""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import func_graph, ops

__all__ = ["name_here", "next_name"]

_calls: weakref.WeakKeyDictionary[Any, defaultdict[str, Iterator[int]]] = (
    weakref.WeakKeyDictionary()
)


def next_name(kind: str) -> str:
    """Return a name that no other message of the step has, and that all ranks have.

    Calls are counted in the outermost graph. The names of layers would not do: Keras numbers them,
    and a rank that has built one more model has other numbers. Neither would a count of all calls,
    as a rank whose last batch is smaller traces its step once more. Outside of graphs there are no
    names, and one call after the other.

    Args:
        kind: What is sent; each kind is counted for itself.
    """
    if tf.executing_eagerly():
        return kind
    return f"{kind}.{_count(kind)}"


def name_here(name: str) -> str:
    """Return a name as it is, or with a number where the graph has a message of that name."""
    if tf.executing_eagerly():
        return name
    count = _count(name)
    return f"{name}.again.{count}" if count else name


def _count(kind: str) -> int:
    graph = ops.get_default_graph()
    # No assignment in an expression: AutoGraph, which reads this, does not know it, and says so.
    while isinstance(getattr(graph, "outer_graph", None), func_graph.FuncGraph):
        graph = graph.outer_graph
    counts = _calls.setdefault(graph, defaultdict(itertools.count))
    return next(counts[kind])
