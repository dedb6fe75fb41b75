"""XLA cannot compile Horovod's operations: say so where a step is traced for it."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import control_flow_util

__all__ = ["refuse_xla"]


def refuse_xla() -> None:
    """Raise where the graph being traced is for XLA.

    Raises:
        ValueError: With the line to write.
    """
    if tf.executing_eagerly():
        return
    if control_flow_util.GraphOrParentsInXlaContext(ops.get_default_graph()):
        raise ValueError(  # of the errors that autograph hands on as they are
            "XLA cannot compile Horovod's messages: write model.compile(..., jit_compile=False), "
            "or @tf.function(jit_compile=False) around your own step."
        )
