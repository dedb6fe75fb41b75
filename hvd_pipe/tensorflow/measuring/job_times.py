"""What a worker's own part of a step takes, from moments that the step's own graph notes.

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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_pipe.planning.choice import OwnTimes
from hvd_pipe.tensorflow.measuring.profiler import ReadyTimes, noted

__all__ = ["JobTimes"]


class JobTimes(ReadyTimes):
    """Ready times of gradients, and what comes before and after them.

    Steps are told apart by the ends of their updates, so several steps an execution
    (``steps_per_execution``), and passes that only accumulate, are counted as they are.

    Args:
        places: How many gradients there are.
    """

    def __init__(self, places: int) -> None:
        super().__init__(places)
        self._previous: float | None = None
        self._averaged: float | None = None
        self._around: list[tuple[float, float]] = []

    def arrived(self, gradients: Mapping[int, Any]) -> Mapping[int, Any]:
        """Return the averages, none of which is there before the last one."""
        dense = {
            place: each
            for place, each in gradients.items()
            if not isinstance(each, tf.IndexedSlices)
        }
        if not dense:
            return gradients
        found = noted(list(dense.values()), self._note_averages)
        return {**gradients, **dict(zip(dense, found, strict=True))}

    def updated(self, variables: Sequence[tf.Variable]) -> None:
        """Note when all variables have been written; a read waits for the writes before it."""
        some = [tf.reshape(each.read_value(), [-1])[:1] for each in variables]
        tf.numpy_function(self._note_update, some, tf.int32, stateful=True)

    def end_step(self) -> None:
        """Do nothing: a step is closed by the end of its update."""

    def own(self) -> OwnTimes | None:
        """Return medians over the steps; None without any."""
        if not self._around:
            return None
        before, update = np.median(np.array(self._around), axis=0).tolist()
        return OwnTimes(before, self.seconds(), update)

    def _note_averages(self) -> None:
        self._averaged = time.perf_counter()

    def _note_update(self, *some: Any) -> Any:
        now, first = time.perf_counter(), min(self._moments.values(), default=None)
        if first is not None and self._previous is not None and self._averaged is not None:
            self._around.append((max(0.0, first - self._previous), now - self._averaged))
        super().end_step()
        self._previous, self._averaged = now, None
        return np.int32(0)
