"""Horovod's callbacks, for Keras 3."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow.mpi_ops import Average as _Average
from horovod.tensorflow.mpi_ops import _allreduce, global_process_set, rank, size

from hvd_pipe.tensorflow import workers
from hvd_pipe.tensorflow.agree import check_alike, gather
from hvd_pipe.tensorflow.graphs import identity
from hvd_pipe.tensorflow.horovod_api import broadcast_variables
from hvd_pipe.tensorflow.keras.late_updates import (
    WatchedStep,
    check_eagerness,
    finish_step,
    interrupt_step,
    problem,
    retrace_train_step,
)
from hvd_pipe.tensorflow.keras.optimizer import DistributedMixin
from hvd_pipe.tensorflow.keras_patches import optimizers_of, trained_models
from hvd_pipe.tensorflow.strategies.replan import Deferral, Replan

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "PlanningCallback",
]


class PlanningCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Measure the first steps, plan from the times, and have Keras trace the step anew.

    Under ``merged-gradient`` the plan says which gradients share a message; under ``auto`` the
    callback chooses the strategy; other strategies stay as they are. Every
    `BroadcastGlobalVariablesCallback` is a `PlanningCallback`: add this class where ranks begin
    with equal variables anyway. If one call of ``fit`` has several, the first one acts.

    Example:
        >>> callback = PlanningCallback()
    """

    def __init__(self) -> None:
        super().__init__()
        self._replans: list[Replan] = []

    def on_train_begin(self, logs: Any = None) -> None:
        optimizers = _distributed(self.model)
        replans = [
            Replan.of(
                optimizer._hvd_pipe,
                optimizer._hvd_pipe_accumulation.passes,
                Deferral(partial(problem, self.model, optimizer), partial(finish_step, optimizer)),
            )
            for optimizer in optimizers
        ]
        self._replans = [replan for replan in replans if replan.takes(self.params)]
        if self._replans:
            check_eagerness(self.model, optimizers)
        self._finish_step()
        wanted = [replan.begin() for replan in self._replans]
        defers = any(optimizer._hvd_pipe.overlaps_forward for optimizer in optimizers)
        is_watched = isinstance(self.model.train_function, WatchedStep)
        self._trace_anew([*wanted, defers and not is_watched])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._trace_anew([replan.after_step() for replan in self._replans])
        # Before callbacks of one rank look at weights. An execution of several may count past it.
        if self.model.stop_training or batch + 1 >= (self.params.get("steps") or float("inf")):
            self._finish_step()

    def on_test_begin(self, logs: Any = None) -> None:
        self._finish_step()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._finish_step()

    def on_train_end(self, logs: Any = None) -> None:
        self._finish_step()
        for replan in self._replans:
            replan.takes(None)
        self._replans = []

    def _finish_step(self) -> None:
        """Make the updates that are left to the next step, on all ranks."""
        if self._replans:
            for optimizer in _distributed(self.model):
                finish_step(optimizer)

    def _trace_anew(self, wanted: list[bool]) -> None:
        """Have the next step traced, which then begins with the updates that are late."""
        if any(wanted):
            retrace_train_step(self.model, partial(_distributed, self.model))


class BroadcastGlobalVariablesCallback(PlanningCallback):
    """Give all ranks the model and the optimizer of ``root_rank`` before the first step.

    Each rank keeps the state of its own random numbers (dropout), its local variables, and the
    optimizers' variables for these. All ranks must have epochs of the same length. The callback
    plans as well, as `PlanningCallback`.

    Args:
        root_rank: The rank that sends its variables.
        device: Accepted for Horovod's sake: variables stay where they are.
        local_variables: Variables that are local, so that each rank keeps its own.

    Example:
        >>> callback = BroadcastGlobalVariablesCallback(0)
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.broadcast_done = False
        self._generation = workers.generation()
        given = local_variables if isinstance(local_variables, list | tuple) else [local_variables]
        self._local = {identity(variable) for variable in given if variable is not None}
        self._sent: set[int] = set()

    @property
    def planning(self) -> PlanningCallback:
        """This callback, which plans."""
        return self

    def register_local_var(self, var: Any) -> None:
        """Leave a variable out of the broadcast, so that each rank keeps its own."""
        self._local.add(identity(var))

    def on_train_begin(self, logs: Any = None) -> None:
        if self._generation != workers.generation():  # workers that come have done nothing yet
            self._generation = workers.generation()
            self.broadcast_done, self._sent = False, set()
        trained_models[self.model] = None
        for optimizer in _distributed(self.model):
            optimizer._hvd_pipe_kept |= self._local
            process_set = optimizer._hvd_pipe.arguments.process_set
            if process_set.included():  # where epochs are unlike, the longer one waits for ever
                steps, epochs = self.params.get("steps"), self.params.get("epochs")
                label = (
                    "the batches of an epoch (give all ranks as many, or pass steps_per_epoch=)"
                )
                lines = [(label, str(steps)), ("epochs", str(epochs))]
                check_alike(lines, f"{optimizer._hvd_pipe.tag}.steps", process_set)
        super().on_train_begin(logs)
        # `fit` has built the model, and the optimizer of Keras' own step; the rest waits a step.
        if not self.broadcast_done:
            optimizers = optimizers_of(self.model)
            parts = [*self.model._flatten_layers(include_self=False)]
            is_built = self.model.built or bool(parts and all(part.built for part in parts))
            built = [is_built, self.model.built, *(bool(opt.built) for opt in optimizers)]
            everyone = gather(built, "hvd_pipe.built", global_process_set)
            is_built, is_whole, *ready = map(all, zip(*everyone, strict=True))
            pairs = zip(optimizers, ready, strict=True)
            if is_built:
                self._broadcast([optimizer for optimizer, is_ready in pairs if is_ready])
            self.broadcast_done = is_whole and all(ready)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:
            self.broadcast_done = True
            self._broadcast(optimizers_of(self.model))
        super().on_train_batch_end(batch, logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Synchronize the optimizers that the model is not compiled with, such as a GAN's."""
        super().on_train_end(logs)
        compiled = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        for optimizer in _distributed(self.model):
            if optimizer is not compiled:
                optimizer.synchronize()
                optimizer._hvd_pipe.fit_ended = True

    def _broadcast(self, optimizers: list[Any]) -> None:
        distributed = _distributed(self.model)
        skipped = self._local | self._sent
        for optimizer in distributed:
            skipped |= optimizer._hvd_pipe_local
            skipped |= {identity(slot) for slot in optimizer._hvd_pipe_local_slots()}
        variables = [*self.model.variables, *(v for opt in optimizers for v in opt.variables)]
        shared = [
            variable
            for variable in variables
            if identity(variable) not in skipped and variable.name != "seed_generator_state"
        ]
        if not shared:
            return
        self._sent |= {identity(variable) for variable in shared}
        broadcast_variables(shared, self.root_rank)
        for optimizer in distributed:
            optimizer._hvd_pipe.agree()


def _distributed(model: Any) -> list[Any]:
    inner = [getattr(opt, "inner_optimizer", opt) for opt in optimizers_of(model)]
    return [opt for opt in inner if isinstance(opt, DistributedMixin)]


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Average the metrics over all ranks at the end of an epoch.

    Put it before callbacks that look at metrics (ReduceLROnPlateau, EarlyStopping), so that these
    decide alike on all ranks.

    Args:
        device: Accepted for Horovod's sake.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
        if not names:
            return
        values = tf.constant([float(logs[name]) for name in names], tf.float64)
        means = _allreduce(values, name="hvd_pipe.metrics", op=_Average).numpy()
        logs.update({name: float(mean) for name, mean in zip(names, means, strict=True)})


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Set the learning rate to ``initial_lr * multiplier(epoch)`` from epoch to epoch.

    Args:
        initial_lr: The learning rate at the start of training.
        multiplier: A function of the epoch, or a number m for ``m ** (epoch - start_epoch)``.
        start_epoch: The first epoch in which the callback acts.
        end_epoch: The first epoch after that in which it no longer acts; None for no end.
        staircase: Whether the rate changes at the beginning of epochs only; else it changes before
            every batch, and ``epoch`` has a fraction.
        momentum_correction: Whether SGD's velocities are scaled with the learning rate that they
            contain.
        steps_per_epoch: Batches of an epoch, needed where Keras does not know their number.

    Source: Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677).
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is needed: the learning rate that multiplier multiplies.")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch, self.current_epoch = steps_per_epoch, 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = float(multiplier)
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        if isinstance(
            getattr(self.model.optimizer, "_learning_rate", None),
            keras.optimizers.schedules.LearningRateSchedule,
        ):
            raise ValueError(
                f"{type(self).__name__} and the optimizer's LearningRateSchedule both set the "
                "learning rate: give the optimizer a number, or leave this callback out."
            )
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"Keras does not know how many batches an epoch has: pass steps_per_epoch= to "
                    f"{type(self).__name__}."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if not self.momentum_correction or not isinstance(inner, keras.optimizers.SGD):
            return
        velocities = getattr(inner, "momentums", []) if old and new != old else []
        if velocities and isinstance(inner, DistributedMixin):
            interrupt_step(inner)
        for velocity in velocities:  # Keras' holds the learning rate: v = mu v - lr g
            velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from ``initial_lr / size`` to ``initial_lr`` in the first epochs.

    Args:
        initial_lr: The rate after the warmup, usually that of one worker times ``hvd.size()``.
        warmup_epochs: How many epochs the warmup takes.
        momentum_correction, steps_per_epoch: As `LearningRateScheduleCallback`.
        verbose: 1 prints a line on rank 0 at the end of the warmup.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            epoch += 1.0 / self.steps_per_epoch  # so that an epoch ends at a round number
            return float((epoch * (size() - 1) / warmup_epochs + 1) / size())

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch == epoch + 1 and self.verbose and rank() == 0:
            lr = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {lr:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keras' ModelCheckpoint that saves the best model only.

    Args:
        monitor, verbose, save_weights_only, mode, save_freq: As Keras'.
        filepath: The file to write; Keras 3 requires it, Horovod's callback does not have it.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        *,
        filepath: str = "best_model.keras",
    ) -> None:
        super().__init__(filepath, monitor, verbose, True, save_weights_only, mode, save_freq)
