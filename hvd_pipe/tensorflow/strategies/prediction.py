"""Weight prediction: compute the next gradient where the missing update is expected to lead.

    w        the true weights: every rank's, after the updates that have arrived
    w + u    where forward and backward run; u: the optimizer's update with a guess of the gradient
             that is still in flight

All of it is operations of the step's graph: the true weights and the optimizer's variables are put
back, so a wrong guess is never kept. Source: Chen et al., "SAPipe" (NeurIPS 2022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_pipe.tensorflow.graphs import variable

__all__ = ["Prediction"]


class Prediction:
    """Moves weights ahead of the updates, and back.

    Args:
        weights: The variables that are trained.
        tag: Begins the names of variables.
    """

    def __init__(self, weights: Sequence[tf.Variable], tag: str) -> None:
        self._weights = list(weights)
        self._true = [
            variable(each.shape, each.dtype, f"{tag}.true.{i}") for i, each in enumerate(weights)
        ]
        self._is_predicted = variable([], tf.bool, f"{tag}.leads")

    @property
    def named(self) -> dict[str, tf.Variable]:
        """The variables, by the names that they have in a checkpoint."""
        return {f"true.{i}": each for i, each in enumerate(self._true)} | {
            "leads": self._is_predicted
        }

    def restore(self) -> None:
        """Put the true weights back."""

        def put() -> Any:
            for weight, true in zip(self._weights, self._true, strict=True):
                weight.assign(true)
            return tf.no_op()

        tf.cond(self._is_predicted, put, tf.no_op)
        self._is_predicted.assign(False)

    def predict(self, state: Sequence[tf.Variable], update: Callable[[], None]) -> None:
        """Move the weights as an update does, and leave all else as it is.

        Args:
            state: The optimizer's variables.
            update: Makes the update.
        """
        for weight, true in zip(self._weights, self._true, strict=True):
            true.assign(weight)
        kept = [each.read_value() for each in state]
        update()
        for each, value in zip(state, kept, strict=True):
            each.assign(value)
        self._is_predicted.assign(True)
