"""Horovod's functions that need another body here, under Keras 3, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import horovod.tensorflow as _horovod
import tensorflow as tf
from horovod.tensorflow import functions as _functions
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import ProcessSet, broadcast, global_process_set

from hvd_pipe.runtime.consensus import members
from hvd_pipe.tensorflow import keras_patches, workers
from hvd_pipe.tensorflow.graphs import call_name, raw


def init(*args: Any, **kwargs: Any) -> Any:
    """Initialise Horovod, with its own fusion of messages off unless the user has set it.

    hvd_pipe's buckets are merged already; fusing them again would copy every byte twice more. Set
    ``HOROVOD_FUSION_THRESHOLD`` (bytes) to turn fusion on. Where Horovod sums on the CPU, Open MPI
    yields the processor while it waits, as the computation needs it; with
    ``OMPI_MCA_mpi_yield_when_idle=0`` it polls. The arguments are those of Horovod's ``init``.

    Raises:
        HvdPipeError: Horovod was shut down in this process and cannot start again here.
    """
    workers.begin()
    keras_patches.install()
    return mpi_ops.init(*args, **kwargs)


def shutdown(*args: Any, **kwargs: Any) -> Any:
    """Shut Horovod down when the other ranks no longer need what this one has sent.

    Optimizers and tapes keep what was in flight, and go on with it after another `init`, on other
    workers if need be; their graphs are traced anew.
    """
    workers.begin()
    with workers.keeping():
        return mpi_ops.shutdown(*args, **kwargs)


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Give all ranks the values that ``root_rank`` has, at once or as operations of a graph.

    Args:
        variables: Keras' or TensorFlow's, in the same order on all ranks.
        root_rank: The rank that sends its values.
        process_set: The ranks that take part.
        inplace: Accepted for Horovod's sake.

    Returns:
        None when executed at once, else an operation.

    Example:
        >>> weights = tf.Variable([1.0, 2.0])
        >>> broadcast_variables([weights], root_rank=0)
    """
    at_once = tf.executing_eagerly()
    if len(members(process_set)) == 1 or not process_set.included():
        return None if at_once else tf.no_op()
    raws, tag = [raw(variable) for variable in variables], call_name("hvd_pipe.broadcast")

    def values() -> list[tf.Tensor]:
        results = []
        for i, variable in enumerate(raws):
            value, name = variable.read_value(), f"{tag}.{i}"
            odd = value.dtype == tf.bfloat16  # which Horovod does not know
            wire = tf.bitcast(value, tf.int16) if odd else value
            arrived = broadcast(wire, root_rank, name, True, process_set)
            results.append(tf.bitcast(arrived, value.dtype) if odd else arrived)
        return results

    send = values
    if at_once:  # in a graph all are under way at once; calls of it are not counted
        send = tf.function(values, autograph=False).get_concrete_function()
    assigned = [variable.assign(value) for variable, value in zip(raws, send(), strict=True)]
    return None if at_once else tf.group(assigned)


def broadcast_global_variables(root_rank: int) -> Any:
    """Broadcast all variables of a graph of TensorFlow 1; TensorFlow 2 has no list of all.

    Raises:
        RuntimeError: This is no such graph; the message says what to write.
    """
    if not tf.executing_eagerly() and not tf.inside_function():
        return _horovod.broadcast_global_variables(root_rank)
    raise RuntimeError(
        "hvd.broadcast_global_variables() has no variables to find in TensorFlow 2: call "
        f"hvd.broadcast_variables(model.variables + optimizer.variables, root_rank={root_rank}), "
        "or pass hvd.callbacks.BroadcastGlobalVariablesCallback to model.fit."
    )


def grouped_allreduce(tensors: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
    """As Horovod's, except that one group may have dense and sparse tensors.

    Args:
        tensors: Tensors and ``tf.IndexedSlices``.
        args, options: As Horovod's.
    """
    reduced = list(tensors)
    for is_sparse in (False, True):
        indices = [
            i for i, x in enumerate(tensors) if isinstance(x, tf.IndexedSlices) == is_sparse
        ]
        arrived = _horovod.grouped_allreduce([tensors[i] for i in indices], *args, **options)
        for index, tensor in zip(indices, arrived, strict=True):
            reduced[index] = tensor
    return reduced


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """As Horovod's, which does not know Keras 3's variables."""
    raws = [raw(variable) for variable in variables]
    values: list[tf.Tensor] = mpi_ops.broadcast_(raws, root_rank, name, process_set)
    return values


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As Horovod's; within a ``tf.function`` the objects travel at once, while it is traced.

    Example:
        >>> import hvd_pipe.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.broadcast_object({"epoch": 3})
        {'epoch': 3}
    """
    with tf.init_scope():
        return _functions.broadcast_object(obj, root_rank, session, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that broadcasts an object, as Horovod's, which needs TensorFlow 1."""
    name = name or "broadcast_object_fn"
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """As Horovod's; within a ``tf.function`` the objects travel at once, while it is traced."""
    with tf.init_scope():
        objects: list[Any] = _functions.allgather_object(obj, session, name, process_set)
        return objects


def BroadcastGlobalVariablesHook(  # noqa: N802 - Horovod's name
    root_rank: int, device: str = ""
) -> NoReturn:
    """Refuse: hooks are for estimators, which TensorFlow no longer has.

    Raises:
        RuntimeError: Always; the message says what to write.
    """
    raise RuntimeError(
        "hvd.BroadcastGlobalVariablesHook() is for tf.estimator, which TensorFlow 2.16 and newer "
        "lack: pass hvd_pipe.tensorflow.keras.callbacks.BroadcastGlobalVariablesCallback("
        f"{root_rank}) to model.fit, or call hvd.broadcast_variables(...)."
    )
