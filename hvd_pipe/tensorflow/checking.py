"""`hvd_pipe.runtime.check_mode` for TensorFlow: random delays, and replicas that must be equal.

Tensors do not change, so that there are no buffers to spoil, and none that change in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from horovod.tensorflow import allreduce
from horovod.tensorflow.mpi_ops import ProcessSet, Sum, allgather

from hvd_pipe.errors import RanksDisagreeError
from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.consensus import members
from hvd_pipe.tensorflow.graphs import call_name, variable

Array = npt.NDArray[Any]


def delayed(tensor: Any) -> Any:
    """Return the tensor after a random delay, if checks are on."""
    if not check_mode.active.on:
        return tensor
    if tf.executing_eagerly():
        check_mode.active.delay()
        return tensor

    def delay() -> Any:
        check_mode.active.delay()
        return np.int32(0)

    with tf.control_dependencies([tensor]):
        token = tf.numpy_function(delay, [], tf.int32, stateful=True)
    with tf.control_dependencies([token]):
        return tf.identity(tensor)


class Replicas:
    """Compares variables, and their gradients, over the ranks every `COMPARE_STEPS` steps."""

    def __init__(
        self, names: Sequence[str], variables: Sequence[Any], name: str, process_set: ProcessSet
    ) -> None:
        self._names, self._variables = list(names), list(variables)
        self._name, self._process_set = f"{name}.replicas", process_set
        self._steps = variable([], tf.int64, f"{name}.steps")

    def step(self, gradients: Sequence[Any]) -> None:
        """Compare, at once or in the graph of a step, if that is due; gradients are dense."""
        steps = self._steps.assign_add(1)
        due = tf.equal(steps % check_mode.COMPARE_STEPS, 0)
        tf.cond(due, lambda: self._compare_present(steps, gradients), tf.no_op)

    def restart(self) -> None:
        """Count steps anew: all ranks meet, after different numbers of steps."""
        self._steps.assign(0)

    def _compare_present(self, steps: tf.Tensor, gradients: Sequence[Any]) -> Any:
        """Compare unless a rank has left by ``hvd.join()``, which takes part in sums alone."""
        name = call_name(f"{self._name}.present")
        one = tf.cast(steps > 0, tf.float32)  # of a constant, TensorFlow would keep the first sum
        present = allreduce(one, op=Sum, name=name, process_set=self._process_set)
        everyone = tf.equal(present, float(len(members(self._process_set))))
        return tf.cond(everyone, lambda: self._compare(steps, gradients), tf.no_op)

    def _compare(self, steps: tf.Tensor, gradients: Sequence[Any]) -> Any:
        values = [variable.read_value() for variable in self._variables]
        described = [*values, *gradients]
        rows = tf.numpy_function(_described, described, tf.float64, stateful=True)
        rows = tf.ensure_shape(rows, [len(described), 2])
        name, process_set = call_name(self._name), self._process_set
        everyone = allgather(rows[None], name, ignore_name_scope=True, process_set=process_set)
        if tf.executing_eagerly():
            self._check(everyone.numpy(), steps.numpy())
            return tf.no_op()
        return tf.numpy_function(self._check, [everyone, steps], tf.int32, stateful=True).op

    def _check(self, everyone: Array, steps: Any) -> Array:
        """Raise unless all ranks have the same checksums; takes a row of them for each rank."""
        index = check_mode.first_difference(everyone[..., 0].tolist())
        if index is not None:
            sides = [
                f"checksum {int(crc):08x}, norm {norm:.9g}" for crc, norm in everyone[:, index]
            ]
            what = "weight" if index < len(self._names) else "gradient"
            label = f"the {what} of {self._names[index % len(self._names)]!r}"
            ranks = members(self._process_set)
            raise RanksDisagreeError(
                check_mode.disagreement(f"in step {int(steps)}", label, sides, ranks)
            )
        return np.int32(0)  # type: ignore[return-value]


def _described(*values: Array) -> Array:
    """Return the checksum (exact in a float64) and the norm of each value."""
    rows = []
    for value in values:
        crc = int(check_mode.checksum(np.ascontiguousarray(value).tobytes()), 16)
        rows.append([float(crc), float(np.linalg.norm(value.astype(np.float64)))])
    return np.array(rows)
