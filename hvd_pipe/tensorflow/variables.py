"""Variables of ours, made while a step is traced, though they outlive its graph."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

__all__ = ["variable"]


def variable(shape: Sequence[int], dtype: tf.DType, name: str) -> tf.Variable:
    """Return a variable of zeros, made outside of whatever graph is being traced.

    Not ``tf.Variable(...)``: a ``tf.function`` has its own way to make these, inside of
    ``tf.init_scope`` as well, which it refuses when it is traced anew.
    """
    with tf.init_scope():
        return ResourceVariable(tf.zeros(shape, dtype), trainable=False, name=name)
