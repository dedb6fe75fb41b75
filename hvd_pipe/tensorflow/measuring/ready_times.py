"""Measure a running job: ready times, a worker's own part of a step, what an all-reduce costs.

    end of last update | first gradient | ... last gradient | (waits) | averages | update | its end
    ----- before_s ----|---------- ready_s -----------------|                    |-update_s-|

Compute is before_s, the last ready time and update_s; waits for averages are left out. It rests on
three assumptions:

- What the host does between two steps (data, callbacks) is part of each step, so it counts as
  before_s; an evaluation in between does not, as medians are taken.
- While this measures, updates wait for the last average, and are thus timed as a whole.
- The measured steps send their gradients behind backward. Where that takes cores from backward,
  times are too long, for all strategies alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import ProcessSet, Sum

from hvd_pipe.planning.choice import OwnTimes
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.runtime import comm_probe
from hvd_pipe.runtime.consensus import allocated_everywhere
from hvd_pipe.tensorflow.agree import largest


class ReadyTimes:
    """Moments at which gradients become ready, and their averages, over some steps of a graph.

    For ``own`` times, steps are told apart by the ends of their updates, so several steps an
    execution (``steps_per_execution``), and passes that only accumulate, are counted as they are.
    """

    def __init__(self, count: int, own: bool = False) -> None:
        self._count, self._own = count, own
        self.restart()

    def restart(self) -> None:
        """Forget what has been recorded."""
        self._moments: dict[int, float] = {}
        self._averaged: float | None = None
        self._averages = 0
        self._seconds_by_step: list[list[float]] = []
        self.waits: list[float] = []
        """By step, seconds from the last gradient to the last average."""
        self.step_s: list[float] = []
        """Seconds of each step but the first."""
        self._end: float | None = None
        self._around: list[tuple[float, float]] = []
        """By step, seconds before the first gradient, and of the update."""

    @property
    def steps(self) -> int:
        """Steps recorded so far."""
        return len(self._seconds_by_step)

    def watched(self, gradients: Mapping[int, Any]) -> dict[int, Any]:
        """Return the gradients, each behind an operation that notes when it is there."""
        return {
            index: gradient
            if isinstance(gradient, tf.IndexedSlices)
            else noted([gradient], partial(self._note, index))[0]
            for index, gradient in gradients.items()
        }

    def _note(self, index: int) -> None:
        self._moments[index] = time.perf_counter()

    def arrived(self, gradients: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return the averages, none of which is there before the last one."""
        dense = {i: g for i, g in gradients.items() if not isinstance(g, tf.IndexedSlices)}
        if not dense:
            return gradients
        together = noted(list(dense.values()), self._note_averages)
        return {**gradients, **dict(zip(dense, together, strict=True))}

    def _note_averages(self) -> None:
        self._averaged = time.perf_counter()
        self._averages += 1  # more than one where an execution makes several steps

    def updated(self, variables: Sequence[tf.Variable]) -> None:
        """Note when all variables have been written; a read waits for the writes before it."""
        if self._own:
            some = [tf.reshape(variable.read_value(), [-1])[:1] for variable in variables]
            tf.numpy_function(self._note_update, some, tf.int32, stateful=True)

    def _note_update(self, *some: Any) -> Any:
        now, first = time.perf_counter(), min(self._moments.values(), default=None)
        if first is not None and self._end is not None and self._averaged is not None:
            self._around.append((max(0.0, first - self._end), now - self._averaged))
        self._close(now)
        return np.int32(0)

    def end_step(self) -> None:
        """Close a step, which an update does by itself where own times are wanted."""
        if not self._own and self._moments:
            self._close(time.perf_counter())

    def _close(self, now: float) -> None:
        begun, self._end, steps, self._averages = self._end, now, self._averages, 0
        moments, self._moments = self._moments, {}
        averaged, self._averaged = self._averaged, None
        if not moments:
            return
        first, last = min(moments.values()), max(moments.values())
        self.waits.append(0.0 if averaged is None else max(0.0, averaged - last))
        if begun is not None:
            self.step_s.append((now - begun) / max(steps, 1))
        # A gradient that was not computed counts as ready with the last.
        self._seconds_by_step.append([moments.get(i, last) - first for i in range(self._count)])

    def seconds(self) -> list[float]:
        """Return the median over steps of each gradient's ready time, from the first one's."""
        medians: list[float] = np.median(np.array(self._seconds_by_step), axis=0).tolist()
        return medians

    def own(self) -> OwnTimes | None:
        """Return medians over the steps; None without any."""
        if not self._around:
            return None
        before, update = np.median(np.array(self._around), axis=0).tolist()
        return OwnTimes(before, self.seconds(), update)


def noted(tensors: Sequence[tf.Tensor], note: Callable[[], None]) -> list[tf.Tensor]:
    """Return the tensors as they are, each of them there when all are, and that has been noted.

    TensorFlow gives what has effects an order of its own, that of the program, in which a gradient
    would wait for all that were traced before. So the note claims to have none, and a zero that it
    returns is added: what no value depends on is not computed.
    """

    def call(*some: Any) -> Any:
        note()
        return np.int32(0)

    some = [tf.reshape(tensor, [-1])[:1] for tensor in tensors]
    zero = tf.numpy_function(call, some, tf.int32, stateful=False)
    zero.set_shape([])
    return [tensor + tf.cast(zero, tensor.dtype) for tensor in tensors]


def measure_comm(largest_bytes: int, process_set: ProcessSet, tag: str) -> CommModel:
    """Time all-reduces as `runtime.comm_probe.measure_comm` does; on all ranks, outside a graph.

    ``largest_bytes`` is the size of the largest message that matters. ``tag`` begins the names.
    """
    return comm_probe.measure_comm(largest_bytes, _Sender(process_set, tag))


class _Sender:
    """Sends messages through TensorFlow's Horovod; see `hvd_pipe.runtime.comm_probe.Sender`."""

    def __init__(self, process_set: ProcessSet, tag: str) -> None:
        self._process_set, self._tag = process_set, tag
        self._buffer = tf.zeros([0])

    def allocate(self, count: int) -> None:
        self._buffer = allocated_everywhere(
            lambda: tf.zeros([count]), 4 * count, self._process_set, self.largest
        )

    def seconds(self, size: int, n: int) -> float:
        @tf.function  # type: ignore[untyped-decorator]
        def send(*parts: tf.Tensor) -> list[tf.Tensor]:
            return [
                mpi_ops._allreduce(
                    part,
                    name=f"{self._tag}.{part.shape[0]}.{i}",
                    op=Sum,
                    prescale_factor=1.0 + i,  # Horovod does not fuse messages that differ in this
                    ignore_name_scope=True,
                    process_set=self._process_set,
                )
                for i, part in enumerate(parts)
            ]

        parts = tf.split(self._buffer[: n * size // 4], n)
        send.get_concrete_function(*parts)  # traced before the clock starts
        start = time.perf_counter()
        tf.group(send(*parts))
        return time.perf_counter() - start

    def largest(self, values: Sequence[float]) -> list[float]:
        return largest(values, f"{self._tag}.largest", self._process_set)

    def is_beside_negotiation(self) -> bool:
        return "GPU" in self._buffer.device and bool(mpi_ops.nccl_built())
