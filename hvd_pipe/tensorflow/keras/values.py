"""Collectives on plain values, as ``horovod.tensorflow.keras`` has them."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as _horovod
import tensorflow as tf
from horovod.tensorflow.mpi_ops import Average

from hvd_pipe.tensorflow.compression import Compression

__all__ = ["allgather", "allreduce", "broadcast", "reducescatter"]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """Return the reduction of all ranks' values; arguments as Horovod's.

    Example:
        >>> float(allreduce(2.0))
        2.0
    """
    return _value(
        _horovod.allreduce(
            tf.convert_to_tensor(value),
            average=average,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            name=name,
            op=op,
            compression=compression,
        )
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Return all ranks' values, one after the other along the first dimension."""
    return _value(_horovod.allgather(tf.convert_to_tensor(value), name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of ``root_rank``."""
    return _value(_horovod.broadcast(tf.convert_to_tensor(value), root_rank, name=name))


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> Any:
    """Return this rank's share of the reduction of all ranks' values."""
    return _value(_horovod.reducescatter(tf.convert_to_tensor(value), name=name, op=op))


def _value(tensor: Any) -> Any:
    return tensor.numpy() if tf.executing_eagerly() else tensor
