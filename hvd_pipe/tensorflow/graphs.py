"""TensorFlow's graphs: which are refused, and the variables and message names made in them."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

Arrays = dict[str, npt.NDArray[Any]]
"""What is in flight, by name; of this rank."""


def variable(shape: Sequence[int], dtype: tf.DType, name: str) -> tf.Variable:
    """Return a variable of zeros, made outside of whatever graph is being traced.

    Not ``tf.Variable(...)``: a ``tf.function`` has its own way to make these, inside of
    ``tf.init_scope`` as well, which it refuses when it is traced anew.
    """
    with tf.init_scope():
        return ResourceVariable(tf.zeros(shape, dtype), trainable=False, name=name)


_Function: Any = type(tf.function(lambda: None))
_TRACER = inspect.unwrap(_Function.__call__).__code__.co_filename

_traced: weakref.WeakSet[Any] = weakref.WeakSet()


def check_graph() -> None:
    """Raise where no gradient can travel; remember every ``tf.function`` that is traced here.

    TensorFlow does not tell which these are; the calls that trace them are on the stack.
    """
    if tf.executing_eagerly():
        return
    with tf.init_scope():  # leaves the graphs of tf.function
        is_old = not tf.executing_eagerly()
    if is_old:
        raise ValueError(  # of the errors that autograph hands on as they are
            "hvd_pipe works in TensorFlow 2, and this is a graph of TensorFlow 1: leave the `with "
            "tf.Graph().as_default()` (or tf.compat.v1.disable_eager_execution()) and put the "
            "step into a @tf.function; or use horovod.tensorflow's own class in the graph, which "
            "has no strategies."
        )
    if control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()):
        raise ValueError(
            "XLA cannot compile Horovod's messages: write model.compile(..., jit_compile=False), "
            "or @tf.function(jit_compile=False) around your own step."
        )
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == _TRACER:
            function = frame.f_locals.get("self")
            if isinstance(function, _Function):
                _traced.add(function)
        frame = frame.f_back  # type: ignore[assignment]


def trace_anew() -> None:
    """Drop all remembered graphs: they hold numbers of workers that have ended."""
    for function in _traced:
        function._function_cache.clear()
    _traced.clear()


def data_of_step() -> list[tf.Operation]:
    """Return what brings data into the graph that is being traced: arguments, and iterators.

    Where a dataset has run out, what depends on these does not run, and all else may: Keras ends
    an epoch of unknown length by such a step.
    """
    if tf.executing_eagerly():
        return []
    graph = ops.get_default_graph()
    captured = {tensor.op for tensor in graph.internal_captures}
    kinds = ("Placeholder", "IteratorGetNext")
    return [op for op in graph.get_operations() if op.type in kinds and op not in captured]


def used_since(graph: Any, count: int, outer: Sequence[tf.Tensor]) -> list[int]:
    """Return which tensors from outside of a graph its operations use, but for the first ones."""
    later = set(graph.get_operations()[count:])
    inside = {id(tensor): inner for tensor, inner in graph.captures}
    handles = [inside.get(id(tensor)) for tensor in outer]
    return [
        index
        for index, handle in enumerate(handles)
        if handle is not None and not later.isdisjoint(handle.consumers())
    ]


def branch(what: Callable[..., None], *arguments: Any) -> Callable[[], Any]:
    """Return what ``tf.cond`` wants: a function without arguments that returns an operation."""

    def run() -> Any:
        what(*arguments)
        return tf.no_op()

    return run


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
    """
    if tf.executing_eagerly():
        return name
    graphs = [ops.get_default_graph()]
    # No assignment in an expression: AutoGraph, which reads this, does not know it, and says so.
    while isinstance(getattr(graphs[-1], "outer_graph", None), func_graph.FuncGraph):
        graphs.append(graphs[-1].outer_graph)
    if layer is not None:
        counts = _layers.setdefault(graphs[-1], weakref.WeakKeyDictionary())
        name = f"{name}.{counts.setdefault(layer, len(counts))}"
    before = sum(_calls.setdefault(graph, Counter())[name] for graph in graphs)
    _calls[graphs[0]][name] += 1
    return f"{name}.again.{before}" if before else name


def all_finite(values: Iterable[tf.Tensor]) -> tf.Tensor:
    """Return whether all values of all tensors are finite; also where there are no tensors."""
    are_finite = [tf.reduce_all(tf.math.is_finite(value)) for value in values]
    return tf.reduce_all(tf.stack([tf.constant(True), *are_finite]))


def raw(variable: Any) -> Any:
    """Return the ``tf.Variable`` of a Keras variable."""
    is_keras = hasattr(variable, "value") and not callable(variable.value)
    return variable.value if is_keras else variable


def identity(variable: Any) -> int:
    """Return a number that a Keras variable has in common with its ``tf.Variable`` alone."""
    return id(raw(variable))


def by_index(state: Arrays, begin: str) -> dict[int, Any]:
    """Return what has names of this beginning, by the index that follows it."""
    names = [name for name in state if name.startswith(begin)]
    return {int(name.removeprefix(begin)): state[name] for name in names}


def restore(variables: Mapping[str, tf.Variable], state: Arrays) -> None:
    """Give variables the arrays of their names; what is missing, or of other workers, is zero."""
    for name, variable in variables.items():
        saved = state.get(name)
        if saved is None or tuple(saved.shape) != tuple(variable.shape):
            saved = np.zeros(variable.shape)
        variable.assign(saved.astype(variable.dtype.as_numpy_dtype))
