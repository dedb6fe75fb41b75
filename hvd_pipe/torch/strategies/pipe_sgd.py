"""Pipe-SGD: this step's all-reduce travels behind the next step; two sets of buffers, no clone.

    step t-1:  backward -> set A leaves, bucket by bucket
    step t:    backward -> set B leaves; wait for A; update with A's average; A is free again
    step t+1:  backward -> set A leaves; wait for B; ...

The first pipelined step has nothing to apply and makes no update, so after ``synchronize()`` there
were as many updates as steps and every gradient was applied exactly once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from horovod.torch.mpi_ops import Sum

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.strategy import PipeSGD
from hvd_pipe.torch.agree import Description
from hvd_pipe.torch.messages.buckets import BucketSet
from hvd_pipe.torch.messages.reduction import Message
from hvd_pipe.torch.messages.residuals import of_all_ranks
from hvd_pipe.torch.parameters import are_finite, unscale
from hvd_pipe.torch.strategies.engine import DEFAULT_BUCKET_BYTES, Engine, Settings, State
from hvd_pipe.torch.strategies.plans import default_groups
from hvd_pipe.torch.strategies.prediction import Prediction

__all__ = ["PipeSGDEngine"]


class PipeSGDEngine(Engine):
    """Staleness one on every rank: an update applies the average of the step before."""

    name = PipeSGD.name
    keeps = True

    def __init__(self, settings: Settings, strategy: PipeSGD) -> None:
        super().__init__(settings)
        self._warmup_steps = strategy.warmup_steps
        self._bucket_bytes = strategy.bucket_bytes or DEFAULT_BUCKET_BYTES
        self._predict = strategy.prediction
        self.build()

    def build(self) -> None:
        groups, method = self.settings.groups, "given"
        if groups is None:
            groups, method = default_groups(self.settings, self._bucket_bytes), "bytes"
        self.plan = self.settings.as_plan(groups, method)
        self._groups = groups
        even = self._make("even")
        self._sets = [even, self._make("odd", like=even)]
        self._filling = self._sets[0]
        self._pending: BucketSet | None = None
        self._scales: dict[BucketSet, float] = {}
        self._shown: BucketSet | None = None
        self._ahead = Prediction(self.settings.parameters, self.settings.owner)
        self._applied: list[torch.Tensor | None] = []

    def _make(self, suffix: str, like: BucketSet | None = None) -> BucketSet:
        keep_local = self._predict == "local"
        return self.settings.make_buckets(self._groups, suffix, keep_local, like)

    @property
    def current(self) -> BucketSet:
        return self._filling

    @property
    def next_message(self) -> Message:
        return self._filling.last_message

    @property
    def gradient_scale(self) -> float | None:
        return None if self._shown is None else self._scales.get(self._shown)

    @property
    def is_equal_everywhere(self) -> bool:
        return self._shown is not None and self._shown.control() is not None

    def weights(self) -> Sequence[torch.Tensor]:
        if not self._ahead.leading:
            return super().weights()
        return [weight for weight in self._ahead.weights() if weight is not None]

    def note_scale(self, scale: float) -> None:
        self._scales[self._pending or self._filling] = scale

    def position(self) -> Description:
        pending = "nothing" if self._pending is None else "a gradient"
        return [*super().position(), ("what is in flight", pending)]

    def prepare(self) -> bool:
        self._ahead.back()
        self._scales.pop(self._filling, None)
        self._filling.launch_rest()
        if self.rounds < self._warmup_steps:
            self._wait(self._filling)
            return True
        due, self._pending = self._pending, self._filling
        if due is None:
            # Nothing to apply yet. What was just sent is on its way: p.grad must not lead to it.
            self._filling = self._sets[self._filling is self._sets[0]]
            self._filling.zero()
            self._filling.show()
            self._shown = None
            return False
        self._wait(due)
        self._filling = due
        self._leave_sparse_out()
        return True

    def note_gradients(self) -> None:
        if self._pending is not None and self._predict == "previous":
            # The update may change gradients in place: SGD(nesterov=True, foreach=True) does.
            gradients = (p.grad for p in self.settings.parameters)
            self._applied = [None if g is None else g.detach().clone() for g in gradients]

    def after_update(self) -> None:
        super().after_update()
        if self._pending is None or self._predict == "none":
            return
        scale = None
        if self._predict == "previous":
            guess, self._applied = self._applied, []
        else:
            guess, scale = self._pending.local(), self._scales.get(self._pending)
            if self.reduction.op == Sum:
                scale = (scale or 1.0) / self.reduction.workers
        present = [gradient for gradient in guess if gradient is not None]
        if present and (not self._scales or are_finite(present)):
            self._ahead.lead(guess, scale or 1.0)

    def drain(self) -> None:
        """Apply the pending gradient.

        A rank on which no gradient was computed takes synchronize() before step() for the end of
        training. So ranks meet under the name of a message that a rank which has a gradient sends.
        """
        self._ahead.back()
        if self._pending is not None and not self.reduction.alone:
            self._pending.land()
            self.next_message.meet()
        self._apply_pending()

    def _apply_pending(self) -> None:
        if self._pending is None:
            return
        due, self._pending = self._pending, None
        self._wait(due)
        scale = self.gradient_scale
        if scale is not None:
            if not are_finite(p.grad for p in self.settings.parameters if p.grad is not None):
                warnings.warn("the last gradient overflowed and is left out", stacklevel=4)
                return
            unscale(self.settings.parameters, scale)
        self.settings.owner.update()

    def after_join(self) -> None:
        self._ahead.back()
        self._apply_pending()
        self.settings.owner.note_old()
        self._filling = self._sets[0]
        self.rounds = self._warmup_steps

    def state(self) -> State:
        counters: dict[str, Any] = {"rounds": self.rounds}
        if self._pending is not None:
            self._pending.arrive()
        tensors = self._sets[0].residuals()
        if self._pending is not None:
            tensors["pending"] = self._pending.values()
            counters["scale"] = self._scales.get(self._pending)
        if self._ahead.leading:
            tensors["weights"] = self._ahead.weights()
        return State(counters, tensors)

    def load(self, state: State) -> None:
        self.rounds = state.counters["rounds"]
        self._filling = self._sets[0]
        self._sets[0].restore_residuals(state.tensors)
        if "weights" in state.tensors:
            self._ahead.restore(state.tensors["weights"])
        if "pending" in state.tensors:
            self._pending, self._filling = self._sets
            self._filling.move_in()  # p.grad must not lead to the pending gradient
            self._pending.restore(state.tensors["pending"])
            if state.counters["scale"] is not None:
                self._scales[self._pending] = state.counters["scale"]

    def discard(self) -> None:
        super().discard()
        self._ahead.forget()
        for buckets in self._sets:
            buckets.give_up()
            buckets.forget_residuals()
        self._pending = self._shown = None
        self._scales.clear()
        self._filling, self.rounds = self._sets[0], 0

    def _wait(self, due: BucketSet) -> None:
        """Wait for an average and make it the gradient."""
        due.wait()
        due.show()
        self._shown = due

    def _leave_sparse_out(self) -> None:
        """Make the free set anew, without room for what turned out to be sparse."""
        if not self._filling.stale:
            return
        if self._predict != "none":
            name = self.settings.names[min(self.settings.sparse)]
            raise HvdPipeError(
                f"prediction={self._predict!r} needs dense gradients, but that of {name!r} is "
                "sparse: pass sparse_as_dense=True, or prediction='none'."
            )
        before = self._filling
        place = self._sets.index(before)
        other = self._sets[1 - place]
        fresh = self._make(("even", "odd")[place], like=None if other.stale else other)
        fresh.move_in()
        if other.stale and self.remembers_residuals:
            other.land()  # both sets share them
            name = f"{self.settings.tag}.residuals"
            fresh.restore_residuals(of_all_ranks(before.residuals(), self.reduction, name))
        if before in self._scales:
            self._scales[fresh] = self._scales.pop(before)
        self._sets[place] = self._filling = self._shown = fresh
