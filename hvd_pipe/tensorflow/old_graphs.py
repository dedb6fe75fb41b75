"""In TensorFlow 1's graphs nothing has a value until a session runs: say so where one is built."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["refuse_old_graphs"]


def refuse_old_graphs() -> None:
    """Raise inside of a ``tf.Graph``, where ranks cannot compare what they have.

    Raises:
        ValueError: With what to write.
    """
    with tf.init_scope():  # leaves the graphs of tf.function
        if tf.executing_eagerly():
            return
    raise ValueError(  # of the errors that autograph hands on as they are
        "hvd_pipe works in TensorFlow 2, and this is a graph of TensorFlow 1: leave the `with "
        "tf.Graph().as_default()` (or tf.compat.v1.disable_eager_execution()) and put the step "
        "into a @tf.function; or use horovod.tensorflow's own class in the graph, which has no "
        "strategies."
    )
