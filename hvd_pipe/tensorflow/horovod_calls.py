"""Horovod's calls that break on this stack, repaired thinly, or refused with what to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import horovod.tensorflow as _horovod
import tensorflow as tf
from horovod.tensorflow import functions as _functions
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set

from hvd_pipe.tensorflow.strategies.engine import raw

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "grouped_allreduce",
]


def grouped_allreduce(tensors: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
    """As Horovod's, whose group must be all dense or all sparse: here both may come together.

    Args:
        tensors: Tensors and ``tf.IndexedSlices``.
        args, options: As Horovod's.
    """
    found = list(tensors)
    for kind in (False, True):
        places = [i for i, x in enumerate(tensors) if isinstance(x, tf.IndexedSlices) == kind]
        arrived = _horovod.grouped_allreduce([tensors[i] for i in places], *args, **options)
        for place, tensor in zip(places, arrived, strict=True):
            found[place] = tensor
    return found


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """As Horovod's, which does not know Keras 3's variables."""
    kept = [raw(each) for each in variables]
    found: list[tf.Tensor] = mpi_ops.broadcast_(kept, root_rank, name, process_set)
    return found


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """As Horovod's; within a ``tf.function`` at once, while that is traced.

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
    """As Horovod's; within a ``tf.function`` at once, while that is traced."""
    with tf.init_scope():
        found: list[Any] = _functions.allgather_object(obj, session, name, process_set)
        return found


def BroadcastGlobalVariablesHook(  # noqa: N802 - Horovod's name
    root_rank: int, device: str = ""
) -> NoReturn:
    """Refuse: hooks are for estimators, which TensorFlow no longer has.

    Raises:
        RuntimeError: Always, with what to write.
    """
    raise RuntimeError(
        "hvd.BroadcastGlobalVariablesHook() is for tf.estimator, which TensorFlow 2.16 and newer "
        "lack: pass hvd_pipe.tensorflow.keras.callbacks.BroadcastGlobalVariablesCallback("
        f"{root_rank}) to model.fit, or call hvd.broadcast_variables(...)."
    )
