"""Pipe-SGD: this step's all-reduce travels behind the next step; two sets of buffers, no clone.

    step t-1:  backward -> set A leaves, bucket by bucket
    step t:    backward -> set B leaves; wait for A; update with A's average; A is free again
    step t+1:  backward -> set A leaves; wait for B; ...

The first pipelined step has nothing to apply and makes no update, so after ``synchronize()`` there
were as many updates as steps and every gradient was applied exactly once.

Without a bucket size, some plans are tried in training, and the one with the fewest messages stays
unless another is faster (`hvd_pipe.planning.tuner`). Each set takes a new plan when it is
free, so what is in flight arrives in the buckets in which it left::

    step t:      all have sent B and shared their times; A is free, and replaced by the new plan
    step t+1:    the new A leaves; wait for the old B, update, replace B, too
"""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from horovod.torch.mpi_ops import Sum

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.tuner import Tuner, next_given
from hvd_pipe.runtime.consensus import Description
from hvd_pipe.runtime.gradient_index import SKIP_STEPS
from hvd_pipe.strategy import PipeSGD
from hvd_pipe.torch.agree import make_tuner
from hvd_pipe.torch.messages.allreduce import of_all_ranks
from hvd_pipe.torch.messages.buckets import (
    BucketSet,
    gradients_of,
    own_gradients_of,
    residuals_of,
    restore_gradients,
    restore_residuals,
)
from hvd_pipe.torch.parameters import are_finite, unscale
from hvd_pipe.torch.strategies.base import Engine
from hvd_pipe.torch.strategies.settings import Settings, State

REFILL_STEPS = 3
"""Steps of a new plan that do not count: both sets are new, and none waits for the first one."""

_log = logging.getLogger("hvd_pipe")


class PipeSGDEngine(Engine):
    """Staleness one on every rank: an update applies the average of the step before."""

    name = PipeSGD.name
    has_state_in_flight = True
    needs_loss_scale = True
    takes_together = True
    current: BucketSet

    def __init__(self, settings: Settings, strategy: PipeSGD) -> None:
        super().__init__(settings)
        self._warmup_steps = strategy.warmup_steps
        self._bucket_bytes = strategy.bucket_bytes
        self._predict = strategy.prediction
        self.build()

    def build(self) -> None:
        index, groups = self.settings.index, self.settings.groups
        every = range(len(self.settings.names))
        self._tuner: Tuner | None = None
        self._is_final = False
        """Whether plans were tried and one was chosen, which a checkpoint holds."""
        if groups is not None:
            self._adopt(index.as_plan(groups, "given"))
        elif self._bucket_bytes is not None:
            plan = index.as_plan(index.default_groups(every, self._bucket_bytes), "bytes")
            self._adopt(plan)
        else:
            self._choices = index.fewer_and_fewer()
            self._adopt(self._choices[0])
            if len(self._choices) > 1 and not self.reduction.alone:
                self._tuner = make_tuner(self.settings.tag, self.reduction.process_set)
                self._restart_timing()
        self._pending: BucketSet | None = None
        self._scales: dict[BucketSet, float] = {}
        self._shown: BucketSet | None = None
        self._prediction = Prediction(self.settings)
        self._applied: list[torch.Tensor | None] = []

    def _restart_timing(self) -> None:
        """Time the plan in use from its first steps on: those of the warm-up are others."""
        if self._tuner is not None:
            self._tuner.begin(max(self.rounds, self._warmup_steps) + SKIP_STEPS)

    def _adopt(self, plan: Plan) -> None:
        """Make both sets by a plan; nothing is in flight."""
        self._set_plan(plan)
        even = self._make("even")
        self._sets = [even, self._make("odd", like=even)]
        self._outdated: set[BucketSet] = set()
        """Sets with the buckets of the plan before."""
        self.current = self._sets[0]

    def _set_plan(self, plan: Plan) -> None:
        self.plan = plan
        self._groups = self.settings.index.plan_groups(plan, range(len(self.settings.names)))

    def _make(self, suffix: str, like: BucketSet | None = None) -> BucketSet:
        return BucketSet(self.settings, self._groups, suffix, self._predict == "local", like)

    @property
    def measures(self) -> bool:
        return self._tuner is not None

    @property
    def gradient_scale(self) -> float | None:
        return None if self._shown is None else self._scales.get(self._shown)

    @property
    def is_equal_everywhere(self) -> bool:
        return self._shown is not None and self._shown.all_present

    def weights(self) -> Sequence[torch.Tensor]:
        return self._prediction.true_weights or super().weights()

    def note_scale(self, scale: float) -> None:
        self._scales[self._pending or self.current] = scale

    def position(self) -> Description:
        pending = "nothing" if self._pending is None else "a gradient"
        return [*super().position(), ("what is in flight", pending)]

    # Architecture: P1
    def prepare(self, shown_in: Mapping[int, torch.Tensor]) -> bool:
        self._prediction.restore()
        self._scales.pop(self.current, None)
        if self.rounds < self._warmup_steps:
            self.current.flush()
            return self._wait(self.current, shown_in)
        if self.current.changes is not None:
            self.current.changes = replace(self.current.changes, refused=True)
        self.current.flush()
        due, self._pending = self._pending, self.current
        if due is None:
            # Nothing to apply yet. What was just sent is on its way: p.grad must not lead to it.
            self.current = self._sets[self.current is self._sets[0]]
            if self.current in self._outdated:
                self.current = self._renewed(self.current)
            for bucket in self.current.buckets:
                bucket.flat.zero_()
            self.current.bind_gradients(shown_in)
            self._shown = None
            return False
        self.current = due  # also where its gradients are refused: the other set is being sent
        updates = self._wait(due, shown_in)
        if self._tuner is not None:
            self._time(self._tuner, self._pending)
        if self.current.stale or self.current in self._outdated:
            self.current = self._shown = self._renewed(self.current)
            self.current.copy_in()
        return updates

    # Architecture: P6
    def _time(self, tuner: Tuner, sent: BucketSet) -> None:
        """Record the end of a step; after enough steps, use the next plan on all ranks."""
        if not tuner.end_step(self.rounds, time.perf_counter()):
            return
        sent.complete_buckets()
        if not sent.mean_flags().all_present(self.reduction.workers):
            tuner.begin(self.rounds + 1)  # one that has left by hvd.join() cannot be asked
            return
        assert self.plan is not None
        tuner.seen(self.plan)
        plan, self._is_final = tuner.next(partial(next_given, self._choices))
        tuner.begin(self.rounds + REFILL_STEPS)
        if self._is_final:
            self._tuner = None
            _log.info("plan after step %d:\n%s", self.rounds, plan)
        if plan.buckets != self.plan.buckets:
            self._outdated = set(self._sets)
        self._set_plan(plan)

    def note_gradients(self) -> None:
        if self._pending is not None and self._predict == "previous":
            # The update may change gradients in place: SGD(nesterov=True, foreach=True) does.
            gradients = (p.grad for p in self.settings.parameters)
            self._applied = [None if g is None else g.detach().clone() for g in gradients]

    # Architecture: P3
    def after_update(self) -> None:
        super().after_update()
        if self._pending is None or self._predict == "none":
            return
        scale = None
        if self._predict == "previous":
            guess, self._applied = self._applied, []
        else:
            guess, scale = own_gradients_of(self._pending), self._scales.get(self._pending)
            if self.reduction.op == Sum:
                scale = (scale or 1.0) / self.reduction.workers
        present = [gradient for gradient in guess if gradient is not None]
        if present and (not self._scales or are_finite(present)):
            self._prediction.predict(guess, scale or 1.0)

    # Architecture: P4
    def drain(self) -> None:
        """Apply the pending gradient.

        A rank without a gradient takes synchronize() before step() for the end of training, so
        ranks meet under the name of a message that a rank which has a gradient sends.
        """
        self._prediction.restore()
        if self._pending is not None and not self.reduction.alone:
            self._pending.complete_buckets()
            self.meet()
        shown = [(p, p.grad) for p in self.settings.parameters]
        is_cleared = all(g is None or not (g.is_sparse or g.any()) for _, g in shown)
        self._apply_pending()
        for parameter, gradient in shown if is_cleared else ():
            parameter.grad = gradient  # else the next pass adds to what was applied

    # Architecture: P5
    def _apply_pending(self) -> None:
        if self._pending is None:
            return
        due, self._pending = self._pending, None
        if not self._wait(due, {}):
            return
        scale = self.gradient_scale
        if scale is not None:
            if not are_finite(p.grad for p in self.settings.parameters if p.grad is not None):
                warnings.warn("the last gradient overflowed and is left out", stacklevel=4)
                return
            unscale(self.settings.parameters, scale)
        self.settings.optimizer._update()

    def skip_round(self) -> None:
        if self.rounds >= self._warmup_steps:
            self.current = self._sets[self.current is self._sets[0]]
            if self.current in self._outdated:
                self.current = self._renewed(self.current)
        self.rounds += 1

    def complete_round(self) -> None:
        self._prediction.restore()
        self._apply_pending()

    def after_join(self) -> None:
        self.current = self._sets[0]
        if self.current in self._outdated:
            self.current = self._renewed(self.current)
        self.settings.optimizer._note_old()
        self.rounds = self._warmup_steps
        self._restart_timing()

    def state(self) -> State:
        due = self._pending
        if due is not None:
            due.complete()
        counters: dict[str, Any] = {"rounds": self.rounds}
        tensors = dict(residuals_of(self.current))
        if due is not None:
            counters["scale"] = self._scales.get(due)
            tensors["pending"] = gradients_of(due)
        if self._prediction.true_weights is not None:
            tensors["weights"] = [value.clone() for value in self._prediction.true_weights]
        if self.plan is not None and self._is_final:
            counters["plan"] = self.plan.to_json()
        return State(counters, tensors)

    def load(self, state: State) -> None:
        self.rounds = state.counters["rounds"]
        text = state.counters.get("plan")
        is_free = self.settings.groups is None and self._bucket_bytes is None
        plan = Plan.from_json(text) if text is not None and is_free else None
        if plan is not None and set(plan.names) == set(self.settings.names):
            self._tuner, self._is_final = None, True  # others were tried against it
            self._adopt(plan)
        else:
            self._restart_timing()
        self.current = self._sets[0]
        restore_residuals(self._sets[0], state.tensors)
        if "weights" in state.tensors:
            self._prediction.load(state.tensors["weights"])
        if "pending" in state.tensors:
            self._pending, self.current = self._sets
            self.current.copy_in()  # p.grad must not lead to the pending gradient
            restore_gradients(self._pending, state.tensors["pending"])
            scale = state.counters["scale"]
            if scale is not None:
                self._scales[self._pending] = scale

    def discard(self) -> None:
        super().discard()
        self._prediction.true_weights = None  # others were loaded
        for buckets in self._sets:
            buckets.discard()
        self._pending = self._shown = None
        self._scales.clear()
        self.current, self.rounds = self._sets[0], 0
        if self._outdated:
            assert self.plan is not None
            self._adopt(self.plan)
        self._restart_timing()

    # Architecture: P2
    def _wait(self, due: BucketSet, shown_in: Mapping[int, torch.Tensor]) -> bool:
        """Wait for an average and make it the gradient; return whether it is to be applied."""
        due.wait()
        updates = not due.is_dropped
        due.bind_gradients(shown_in)
        self._shown = due
        return updates

    def _renewed(self, before: BucketSet) -> BucketSet:
        """Return a new set in place of a free one: by the plan, without sparse gradients."""
        if before.stale and self._predict != "none":
            name = self.settings.names[min(self.settings.sparse)]
            raise HvdPipeError(
                f"prediction={self._predict!r} needs dense gradients, but that of {name!r} is "
                "sparse: pass sparse_as_dense=True, or prediction='none'."
            )
        index = self._sets.index(before)
        other = self._sets[1 - index]
        unlike = other.stale or other in self._outdated
        renewed = self._make(("even", "odd")[index], like=None if unlike else other)
        renewed.flags = before.flags
        if unlike and self.remembers_residuals:
            other.complete_buckets()  # it was sent last, and has the newest residuals
            name = f"{self.settings.tag}.residuals"
            left = of_all_ranks(residuals_of(other), self.reduction, name)
            restore_residuals(renewed, left)
        if before in self._scales:
            self._scales[renewed] = self._scales.pop(before)
        self._outdated.discard(before)
        self._sets[index] = renewed
        return renewed


# Weight prediction of Pipe-SGD.


class Prediction:
    """Weight prediction: compute the next gradient where the missing update is expected to lead.

        w        the true weights: every rank's, after the updates that have arrived
        w + u    where forward and backward run; u: the optimizer's update with a guess of the
                 gradient that is still in flight

    Before the next true update the weights go back to w, so a wrong guess is never kept. Source:
    Chen et al., "SAPipe" (NeurIPS 2022); papers call the guesses "local" and "previous
    synchronised".
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._parameters = settings, settings.parameters
        self.true_weights: list[torch.Tensor] | None = None
        """The true weights, while the parameters are ahead of them."""
        self._versions: list[int] | None = None

    def predict(self, guess: Sequence[torch.Tensor | None], scale: float) -> None:
        """Move the weights by an update with ``guess / scale``; it may write to the guess."""
        self.true_weights = [value.clone() for value in self._values()]
        shown = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, guess, strict=True):
            parameter.grad = gradient if gradient is None or scale == 1.0 else gradient / scale
        self._update(self._settings.optimizer)
        for parameter, gradient in zip(self._parameters, shown, strict=True):
            parameter.grad = gradient
        self._versions = self._current_versions()

    def _update(self, optimizer: Any) -> None:
        """Make an update that moves the weights only: without hooks, on a copy of the state."""
        saved, groups = dict(optimizer.state), [dict(group) for group in optimizer.param_groups]
        optimizer.state.clear()
        for parameter, state in saved.items():
            optimizer.state[parameter] = {key: _copied(value) for key, value in state.items()}
        try:
            optimizer._step_without_hooks()
        finally:
            optimizer.state.clear()
            optimizer.state.update(saved)
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.update(before)

    def restore(self) -> None:
        """Put the true weights back; raise where the script has changed the weights since."""
        if self.true_weights is None:
            return
        if self._versions is not None and self._versions != self._current_versions():
            self.true_weights = None
            raise HvdPipeError(
                "weights were changed between two steps, while they were ahead of the updates "
                "(prediction): call optimizer.synchronize() before changing them."
            )
        torch._foreach_copy_(self._values(), self.true_weights)
        self.true_weights = None

    def load(self, weights: Sequence[torch.Tensor | None]) -> None:
        """Set the true weights; None for a parameter that has its true weight."""
        self._versions = None
        self.true_weights = [
            value.clone() if true is None else true.to(value)
            for true, value in zip(weights, self._values(), strict=True)
        ]

    def _current_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def _values(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self._parameters]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
