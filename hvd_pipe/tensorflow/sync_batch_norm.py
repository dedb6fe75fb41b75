"""Batch normalization with the statistics of all ranks' batches together, under Keras 3.

Horovod's class fails under Keras 3: it overrides a method that has other arguments now.

With n_i the elements that rank i has in a channel, m_i and v_i their mean and variance::

    message    n_i,  n_i m_i,  n_i (v_i + m_i^2)      summed over ranks: N, S, Q
    all ranks  mean = S / N,  variance = Q / N - mean^2

The message is float64, so that the difference loses nothing where the mean is far from zero.
"""

from __future__ import annotations

import itertools
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from keras.src import api_export

from hvd_pipe.tensorflow.graphs import call_name, check_graph


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """Keras' BatchNormalization over the batches of all ranks, which may differ in size.

    Keras saves the layer as ``BatchNormalization(synchronized=True)``, so that models load without
    hvd_pipe. With hvd_pipe, a layer that was loaded so does the same as this one.

    Args:
        fused: Accepted for Horovod's sake; must be False.
        options: As Keras' BatchNormalization: ``axis``, ``momentum``, ``epsilon``, ...

    Raises:
        ValueError: ``fused`` is not False, or ``synchronized`` is not True.

    Example:
        >>> import hvd_pipe.tensorflow as hvd
        >>> hvd.init()
        >>> layer = hvd.SyncBatchNormalization(momentum=0.9)
        >>> layer(tf.constant([[1.0], [3.0]]), training=True).numpy().round(2).tolist()
        [[-1.0], [1.0]]
    """

    def __init__(self, fused: bool = False, **options: Any) -> None:
        if fused is not False:
            raise ValueError(
                f"SyncBatchNormalization has no fused kernel, got fused={fused!r}: leave it out. "
                "What Keras' BatchNormalization takes is given by name, such as axis=1."
            )
        if not options.setdefault("synchronized", True):
            raise ValueError(
                "SyncBatchNormalization(synchronized=False) is keras.layers.BatchNormalization."
            )
        super().__init__(**options)

    def _moments(self, inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        if not mpi_ops.is_initialized():
            raise ValueError("Horovod is not initialised: call hvd.init() before training.")
        return moments_of_all(self, inputs, mask)


# What Keras saves a layer as, and its weights under.
SyncBatchNormalization.__name__ = "BatchNormalization"
api_export.REGISTERED_OBJS_TO_NAMES[SyncBatchNormalization] = "keras.layers.BatchNormalization"


_moments_here = keras.layers.BatchNormalization._moments


def moments_of_all(layer: Any, inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance of each channel over all ranks; differentiable."""
    axes = layer._reduction_axes
    if mask is None:
        mean, variance = tf.nn.moments(inputs, axes)
        channels = tf.size(mean)
        count = tf.fill([channels], tf.size(inputs) // channels)
    else:
        mean, variance = _moments_here(layer, inputs, mask)
        there = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
        count = tf.reduce_sum(tf.cast(there, tf.int32), axes)
    if mpi_ops.size() == 1:
        return mean, variance
    check_graph()
    # Keras' masked moments of one channel are scalars.
    n, m, v = (tf.cast(tf.reshape(part, [-1]), tf.float64) for part in (count, mean, variance))
    # A rank without any elements has no mean.
    local = tf.stack([n, tf.math.multiply_no_nan(m, n), tf.math.multiply_no_nan(v + m * m, n)])
    total, first, second = tf.unstack(_sum(local, call_name("hvd_pipe.batch_norm", layer)))
    mean = tf.math.divide_no_nan(first, total)
    variance = tf.maximum(tf.math.divide_no_nan(second, total) - mean * mean, 0.0)
    return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


def _sum(values: tf.Tensor, name: str) -> tf.Tensor:
    """Return the sum over ranks; its gradient is the sum of all ranks' gradients."""
    again = itertools.count()

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # as Horovod's own cannot be named
    def summed(values: tf.Tensor) -> tuple[tf.Tensor, Any]:
        total = mpi_ops._allreduce(values, name=name, op=mpi_ops.Sum, ignore_name_scope=True)
        return total, lambda upstream: _sum(upstream, f"{name}.gradient.{next(again)}")

    return summed(values)
