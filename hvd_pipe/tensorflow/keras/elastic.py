"""``hvd.elastic`` for ``model.fit``: `hvd_pipe.tensorflow.elastic`, and Horovod's callbacks."""

from __future__ import annotations

from typing import Any

import keras

from hvd_pipe.tensorflow.elastic import TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


_EPOCH_ENDS = object()
"""Ends the loop over batches, as True does, which would end training as well."""


class KerasState(TensorFlowKerasState):
    """`TensorFlowKerasState` under the name that Horovod gives it for Keras.

    Args:
        model, optimizer, kwargs: As `TensorFlowKerasState`.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commit the state every few batches, and at the end of each epoch.

    Put it after callbacks that change the state.

    Args:
        state: The elastic state, which the function decorated by `run` takes.
        batches_per_commit: Batches from one commit to the next; a commit copies all variables.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Count batches in ``state.batch``, from 0 in each epoch.

    With ``fit(steps_per_epoch=...)``, an interrupted epoch has only its remaining batches when
    training goes on.

    Args:
        state: The elastic state, which the function decorated by `run` takes.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self._before = state, 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = self._before + batch + 1
        steps = self.params.get("steps")
        if self._before and steps and self.state.batch >= steps:
            self.model.stop_training = _EPOCH_ENDS

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = self._before = 0
        if self.model.stop_training is _EPOCH_ENDS:  # else somebody wants to end training
            self.model.stop_training = False


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Count epochs in ``state.epoch``, and go on counting when workers have changed.

    Args:
        state: The elastic state, which the function decorated by `run` takes.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self.initial_epoch = state, state.epoch
        self._first: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch, self._first = self.state.epoch, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._first is None:
            self._first = epoch  # 0, or fit's initial_epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert self._first is not None
        self.state.epoch = self.initial_epoch + epoch - self._first + 1
