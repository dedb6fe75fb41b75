"""Pipe-SGD: last step's gradients are averaged behind all of this step.

    step t's graph   read pending (g[t-1]) -> all-reduce ------------------.
                     forward ... backward -> g[t] -> assign to pending     |
                                                        update with mean g[t-1]

The all-reduce depends on a variable, and on the step's data being there. So it starts with the
graph and overlaps all of it, and a step whose data has run out applies nothing. The assignment
waits for it: a message of this name must have arrived before the next is sent. The first pipelined
step has nothing to apply and makes no update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from horovod.tensorflow.mpi_ops import Sum

from hvd_pipe.planning.methods import DEFAULT_BUCKET_BYTES
from hvd_pipe.strategy import PipeSGD
from hvd_pipe.tensorflow.graphs import (
    Arrays,
    all_finite,
    branch,
    data_of_step,
    restore,
    variable,
)
from hvd_pipe.tensorflow.messages.buckets import Packing, Residuals
from hvd_pipe.tensorflow.strategies.base import Due, Engine, Gradients, OptimizerAccess, Settings

_log = logging.getLogger("hvd_pipe")


class PipeSGDEngine(Engine):
    """Staleness one on every rank: an update applies the average of the step before."""

    name = PipeSGD.name

    def __init__(self, settings: Settings, strategy: PipeSGD) -> None:
        super().__init__(settings)
        groups = settings.groups
        if groups is None:
            limit = strategy.bucket_bytes or DEFAULT_BUCKET_BYTES
            groups = settings.shapes.default_groups(settings.dense[::-1], limit)
        self._warmup_steps = strategy.warmup_steps
        self._packing = Packing(settings.shapes, groups)
        self._residuals = Residuals(settings.reduction, self._packing)
        buckets = zip(self._packing.sizes, self._packing.dtypes, strict=True)
        self._pending = [
            variable([size], dtype, f"{settings.tag}.pending.{i}")
            for i, (size, dtype) in enumerate(buckets)
        ]
        self._is_pending = variable([], tf.bool, f"{settings.tag}.is_pending")
        self._rounds = variable([], tf.int64, f"{settings.tag}.rounds")
        self._guess = strategy.prediction
        self.keeps_equal = strategy.prediction != "local"
        self._named = {
            "is_pending": self._is_pending,
            "rounds": self._rounds,
            **self._residuals.named,
        }
        """The variables that a state holds, by their names there."""
        self._prediction: Prediction | None = None
        self.predicts = strategy.prediction != "none"
        if self.predicts:
            self._prediction = Prediction(settings.variables, settings.tag)
            self._named |= self._prediction.named
        self._step: tuple[Gradients, Due] = ({}, Due({}))

    def exchange(self, gradients: Gradients) -> Due:
        with tf.control_dependencies(data_of_step()):
            fresh = self._packing.pack(gradients)
            outgoing = [pending.read_value() for pending in self._pending]
            was_pending = self._is_pending.read_value()
            warm: tf.Tensor | None = None
            if self._warmup_steps:
                # One message for both: whichever goes out, it starts as soon as it is there.
                warm = self._rounds < self._warmup_steps
                outgoing = [
                    tf.cond(warm, lambda now=now: now, lambda kept=kept: kept)
                    for now, kept in zip(fresh, outgoing, strict=True)
                ]
            arrived = self._reduce(outgoing)
            with tf.control_dependencies(arrived):
                for pending, flat in zip(self._pending, fresh, strict=True):
                    pending.assign(flat)
            self._is_pending.assign(True if warm is None else tf.logical_not(warm))
            self._rounds.assign_add(1)
            when = was_pending if warm is None else tf.logical_or(warm, was_pending)
            due = Due(self._packing.unpack(arrived), when)
            self._step = (gradients, due)
            if self._prediction is not None:
                self._prediction.restore()
            return due

    def after_step(self, access: OptimizerAccess | None = None) -> None:
        gradients, due = self._step
        self._step = ({}, Due({}))
        if self._prediction is None or access is None:
            return
        wanted = self._is_pending
        if self._guess == "previous":
            guess, wanted = due.gradients, tf.logical_and(wanted, due.when)
        else:
            factor = self.settings.reduction.workers if self.settings.reduction.op == Sum else 1
            guess = {index: factor * gradient for index, gradient in gradients.items()}
        # A guess that is not finite would ruin the next gradient, and with it the next guess.
        wanted = tf.logical_and(wanted, all_finite(guess.values()))
        predict = partial(self._prediction.predict, access.state, partial(access.update, guess))
        tf.cond(wanted, branch(predict), tf.no_op)

    def _reduce(self, flats: list[tf.Tensor]) -> list[tf.Tensor]:
        reduction, tag = self.settings.reduction, self.settings.tag
        return reduction.reduce_all(flats, f"{tag}.gradients", self._residuals.feedbacks)

    def drain(self, update: Callable[[Gradients], None]) -> None:
        if self._prediction is not None:
            self._prediction.restore()
        if not self._is_pending.numpy():  # the same on all ranks: they count the same steps
            return
        self._is_pending.assign(False)
        flats = [pending.read_value() for pending in self._pending]
        due = self._packing.unpack(self._reduce(flats))
        for pending in self._pending:  # a tape's next step returns what is here, and it is applied
            pending.assign(tf.zeros_like(pending))
        if due:
            update(due)

    def share(self) -> None:
        """Have each rank's pending gradient be the average, which comes of that once more."""
        if not self._is_pending.numpy():
            return
        reduction, tag = self.settings.reduction.lossless(), self.settings.tag
        for i, pending in enumerate(self._pending):
            arrived = reduction.reduce(pending.read_value(), f"{tag}.shared.{i}")
            pending.assign(arrived / reduction.workers if reduction.op == Sum else arrived)

    def is_ahead(self) -> bool:
        return bool(self._is_pending.numpy())

    def state(self) -> Arrays:
        """Return what is in flight: the gradient by variable, so that other buckets take it."""
        gradients = self._packing.unpack([pending.read_value() for pending in self._pending])
        return {
            **{f"gradient.{index}": gradient.numpy() for index, gradient in gradients.items()},
            **{name: variable.numpy() for name, variable in self._named.items()},
        }

    def load(self, state: Arrays) -> None:
        flats = self._flats_of(state)
        if flats is None and state.get("is_pending"):
            _log.warning(
                "the gradient that was in flight is lost, as it does not fit the variables here: "
                "load with the model, bucket_bytes and groups that it was saved with, or call "
                "optimizer.synchronize() on all ranks before saving"
            )
            state = {**state, "is_pending": np.array(False)}
        restore(self._named, state)
        for i, pending in enumerate(self._pending):
            pending.assign(tf.zeros_like(pending) if flats is None else flats[i])

    def _flats_of(self, state: Arrays) -> list[npt.NDArray[Any]] | None:
        """Return a state's gradient in the buckets of here; None where it does not fit."""
        shapes = self.settings.shapes
        gradients = {
            index: state[name]
            for index, shape in enumerate(shapes.shapes)
            if (name := f"gradient.{index}") in state and list(state[name].shape) == shape
        }
        if len(gradients) == len(shapes):
            return [
                np.concatenate([gradients[index].ravel() for index in group]).astype(
                    shapes.dtypes[group[0]].as_numpy_dtype
                )
                for group in self._packing.groups
            ]
        # Earlier versions wrote whole buckets, of which only the sizes are known.
        sizes = self._packing.sizes
        flats = [state[name] for i in range(len(sizes)) if (name := f"pending.{i}") in state]
        is_whole = f"pending.{len(sizes)}" not in state
        return flats if is_whole and [flat.size for flat in flats] == sizes else None


class Prediction:
    """Weight prediction: compute the next gradient where the missing update is expected to lead.

        w        the true weights: every rank's, after the updates that have arrived
        w + u    where forward and backward run; u: the optimizer's update with a guess of the
                 gradient that is still in flight

    All of it is operations of the step's graph: the true weights and the optimizer's variables are
    put back, so a wrong guess is never kept. Source: Chen et al., "SAPipe" (NeurIPS 2022).
    """

    def __init__(self, weights: Sequence[tf.Variable], tag: str) -> None:
        self._weights = list(weights)
        self._true = [variable(w.shape, w.dtype, f"{tag}.true.{i}") for i, w in enumerate(weights)]
        self._is_predicted = variable([], tf.bool, f"{tag}.leads")
        true = {f"true.{i}": weight for i, weight in enumerate(self._true)}
        self.named = {"leads": self._is_predicted, **true}
        """The variables, by the names that they have in a checkpoint."""

    def restore(self) -> None:
        """Put the true weights back."""

        def put() -> None:
            for weight, true in zip(self._weights, self._true, strict=True):
                weight.assign(true)

        tf.cond(self._is_predicted, branch(put), tf.no_op)
        self._is_predicted.assign(False)

    def predict(self, state: Sequence[tf.Variable], update: Callable[[], None]) -> None:
        """Move the weights as an update does, and leave all else as it is."""
        for weight, true in zip(self._weights, self._true, strict=True):
            true.assign(weight)
        before = [state_variable.read_value() for state_variable in state]
        update()
        for state_variable, value in zip(state, before, strict=True):
            state_variable.assign(value)
        self._is_predicted.assign(True)
