"""Names for messages that user code may send any number of times in a step."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import func_graph, ops

__all__ = ["call_name"]

_calls: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
_layers: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, int]] = (
    weakref.WeakKeyDictionary()
)


def call_name(name: str, layer: Any = None) -> str:
    """Return a name that no other message of the step has, and that all ranks have.

    The first message keeps its name, later ones are numbered. Calls count in the graph at hand and
    in those around it: a function inside another is traced twice where it creates variables, but
    once on a rank that has created them before, and each trace must give the same names. Layers
    are numbered in the order in which the outermost graph meets them: Keras' own numbers differ on
    a rank that has built one more model. Outside of graphs one call follows the other, and a name
    is good for all.

    Args:
        name: What is sent.
        layer: The layer that sends it, if layers of one kind send under one name.
    """
    if tf.executing_eagerly():
        return name
    graphs = [ops.get_default_graph()]
    # No assignment in an expression: AutoGraph, which reads this, does not know it, and says so.
    while isinstance(getattr(graphs[-1], "outer_graph", None), func_graph.FuncGraph):
        graphs.append(graphs[-1].outer_graph)
    if layer is not None:
        seen = _layers.setdefault(graphs[-1], weakref.WeakKeyDictionary())
        name = f"{name}.{seen.setdefault(layer, len(seen))}"
    before = sum(_calls.setdefault(graph, Counter())[name] for graph in graphs)
    _calls[graphs[0]][name] += 1
    return f"{name}.again.{before}" if before else name
