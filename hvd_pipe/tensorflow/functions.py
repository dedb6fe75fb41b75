"""Horovod's functions that need another body under Keras 3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import horovod.tensorflow as _horovod
import tensorflow as tf
from horovod.tensorflow.mpi_ops import ProcessSet, broadcast, global_process_set

from hvd_pipe.tensorflow.messages.call_names import call_name
from hvd_pipe.tensorflow.strategies.engine import raw

__all__ = ["broadcast_global_variables", "broadcast_variables"]


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Give all ranks the values that ``root_rank`` has, at once or as operations of a graph.

    Args:
        variables: Keras' or TensorFlow's, in the same order on all ranks.
        root_rank: Whose values count.
        process_set: The ranks that take part.
        inplace: Accepted for Horovod's sake.

    Returns:
        None when executed at once, else an operation.

    Example:
        >>> weights = tf.Variable([1.0, 2.0])
        >>> broadcast_variables([weights], root_rank=0)
    """
    if process_set.size() == 1 or not process_set.included():
        return None if tf.executing_eagerly() else tf.no_op()
    kept = [raw(each) for each in variables]
    if tf.executing_eagerly():
        _broadcast_all(kept, root_rank, process_set)
        return None
    return tf.group(_broadcast_all(kept, root_rank, process_set))


def _broadcast_all(
    variables: list[tf.Variable], root_rank: int, process_set: ProcessSet
) -> list[Any]:
    tag = call_name("hvd_pipe.broadcast")

    def values() -> list[tf.Tensor]:
        found = []
        for i, each in enumerate(variables):
            value = each.read_value()
            odd = value.dtype == tf.bfloat16  # which Horovod does not know
            wire = tf.bitcast(value, tf.int16) if odd else value
            arrived = broadcast(
                wire,
                root_rank,
                name=f"{tag}.{i}",
                ignore_name_scope=True,
                process_set=process_set,
            )
            found.append(tf.bitcast(arrived, value.dtype) if odd else arrived)
        return found

    if tf.executing_eagerly():  # in a graph all are under way at once; calls of it are not counted
        arrived = tf.function(values, autograph=False).get_concrete_function()()
    else:
        arrived = values()
    return [each.assign(value) for each, value in zip(variables, arrived, strict=True)]


def broadcast_global_variables(root_rank: int) -> Any:
    """Broadcast the variables of a graph of TensorFlow 1's; else nothing knows all variables.

    Raises:
        RuntimeError: Not in such a graph; with what to write.
    """
    if not tf.executing_eagerly() and not tf.inside_function():
        return _horovod.broadcast_global_variables(root_rank)
    raise RuntimeError(
        "hvd.broadcast_global_variables() has no variables to find in TensorFlow 2: call "
        f"hvd.broadcast_variables(model.variables + optimizer.variables, root_rank={root_rank}), "
        "or pass hvd.callbacks.BroadcastGlobalVariablesCallback to model.fit."
    )
