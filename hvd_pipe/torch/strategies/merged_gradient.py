"""MG-WFBP: gradients travel in the groups that finish first, found from the job's own times.

Steps of a run with ``plan="auto"``::

    0 .. SKIP-1                 safe default buckets; nothing is recorded (caches, lazy set-up)
    SKIP .. SKIP+RECORD-1       the same buckets; ready times are recorded
    end of the last of these    all-reduces are measured, rank 0 plans, all ranks take the plan
    after                       the plan, until gradients keep coming in another order

All ranks count the same steps, so they measure and change buckets at the same moment. A rank whose
gradients come in another order says so in the control word; all ranks then record anew.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.kinds import plan_kinds
from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.torch.agree import found_by_first, largest
from hvd_pipe.torch.measuring.probes import measure_comm
from hvd_pipe.torch.measuring.step_times import ReadyTimes
from hvd_pipe.torch.messages.buckets import BucketSet
from hvd_pipe.torch.messages.reduction import Message
from hvd_pipe.torch.messages.residuals import of_all_ranks
from hvd_pipe.torch.strategies.engine import DEFAULT_BUCKET_BYTES, Engine, Settings, State, kinds
from hvd_pipe.torch.strategies.plans import default_groups, plan_groups

__all__ = ["MergedGradientEngine"]

SKIP_STEPS = 3
RECORD_STEPS = 10
PATIENCE_STEPS = 5

_GIVEN = "given"

FloatArray = npt.NDArray[np.float64]

_log = logging.getLogger("hvd_pipe")


class MergedGradientEngine(Engine):
    """Synchronous SGD: all buckets of a step are averaged before its update."""

    name = MergedGradient.name
    needs_loss_scale = False
    _buckets: BucketSet

    def __init__(
        self,
        settings: Settings,
        strategy: MergedGradient,
        plan: Plan | None,
        measure_steps: int | None = None,
    ) -> None:
        super().__init__(settings)
        self._bucket_bytes = strategy.bucket_bytes
        self._method = _method(strategy, settings)
        if measure_steps is not None and self._method is None:
            self._method = _GIVEN  # nothing to plan, and yet to measure
        self._record_steps = RECORD_STEPS if measure_steps is None else measure_steps
        self.comm: CommModel | None = None
        """What `measure_comm` has found; the same on all ranks, from the same step on."""
        self._times: ReadyTimes | None = None
        self._record_from: int | None = None if self._method is None else SKIP_STEPS
        self._patience = PATIENCE_STEPS
        self._drifted_steps = 0
        self._control: float | None = 0.0
        self._drains = self._stepped = False
        self._planned = self._adopted = False
        self.plan = _first_plan(strategy, settings) if plan is None else plan
        self.build()

    @property
    def current(self) -> BucketSet:
        return self._buckets

    @property
    def next_message(self) -> Message:
        return self._buckets.last_message

    def build(self) -> None:
        """Parameters that have joined get buckets behind the plan's, and it is made anew."""
        assert self.plan is not None
        planned, names = len(self.plan.names), self.settings.names
        if planned < len(names):
            joined = default_groups(self.settings, DEFAULT_BUCKET_BYTES, planned)
            buckets = [tuple(names[place] for place in group) for group in joined]
            self.plan = Plan((*self.plan.buckets, *buckets), self.plan.method)
            self._measure_anew()
        self._count = self._usual_count = len(names)
        self._adopt(self.plan)

    def _measure_anew(self) -> None:
        self._times = None
        self._record_from = None if self._method is None else self.rounds + SKIP_STEPS

    def on_gradient(self, place: int) -> None:
        super().on_gradient(place)
        if self._times is not None:
            self._times.mark(place)

    def prepare(self) -> bool:
        if self._times is not None:
            self._times.end_step()
        self._note_order()
        stepped, self._stepped = self._stepped, False
        self._buckets.launch_rest(
            says=float(self._drifted_steps >= self._patience),
            drains=self._drains,
            stepped=stepped,
        )
        self._buckets.wait()
        if self._buckets.some_stepped:
            raise HvdPipeError(_APART)
        # A rank that drains alone makes no update after this, and so no plan.
        self._control = None if self._buckets.some_drained else self._buckets.control()
        self._buckets.show()
        if self._buckets.stale:
            assert self.plan is not None
            self._replace_buckets(self.plan)  # without room for what turned out to be sparse
        return True

    @property
    def is_equal_everywhere(self) -> bool:
        return self._control is not None

    def before_update(self) -> bool:
        has_update = super().before_update()
        self._stepped = True
        return has_update

    def drain(self) -> None:
        # A rank without a gradient still takes part, as in Horovod: others may have one.
        self._drains = True
        try:
            self._prepare()
        finally:
            self._drains = False
        # Where no rank had a gradient, the next ones, which may be set by hand, are to be sent.
        self.synchronized = not self._buckets.all_drained

    def state(self) -> State:
        counters = {"plan": self.plan.to_json()} if self._planned and self.plan else {}
        return State(counters, self._buckets.residuals())

    def load(self, state: State) -> None:
        """Take a plan that was measured: the same buckets add up in the same order."""
        if "plan" in state.counters and self._method is not None:
            plan = Plan.from_json(state.counters["plan"])
            if set(plan.names) == set(self.settings.names):
                self._planned, self._record_from, self._times = True, None, None
                self._adopt(plan)
        self._buckets.restore_residuals(state.tensors)

    def discard(self) -> None:
        super().discard()
        self._stepped = False

    def after_join(self) -> None:
        self.rounds = 0
        self._stepped = False
        if self._planned:  # it needs all ranks, so either all have done it or none has
            self._times, self._record_from = None, None
        else:
            self._measure_anew()

    def after_update(self) -> None:
        super().after_update()
        if self._method is None or self.settings.reduction.alone:
            return
        if self._control is None:
            return  # planning asks all ranks: one has joined, or may not come here
        if self._times is not None:
            if self._times.steps >= self._record_steps:
                self._plan_anew(self._times.seconds())
                self._times = None
            return
        if self._control != 0.0 and self._record_from is None:
            _log.info("gradients come in another order: measuring again for a new plan")
            self._patience *= 2  # a model whose order never settles must not measure for ever
            self._record_from = self.rounds
        if self._record_from is not None and self.rounds >= self._record_from:
            self._record_from = None
            self._times = ReadyTimes(
                len(self.settings.parameters), self.settings.parameters[0].device
            )

    def _note_order(self) -> None:
        """Count the steps in a row in which buckets filled in another order than planned."""
        sparse = self.settings.sparse
        filled = [self._bucket_of[p] for p in self._buckets.completed if p not in sparse]
        order = list(dict.fromkeys(reversed(filled)))[::-1]  # by each bucket's last gradient
        self._count = len(filled)
        as_planned = order == sorted(order) and self._count == self._usual_count
        self._drifted_steps = 0 if as_planned else self._drifted_steps + 1

    def _plan_anew(self, seconds: Sequence[float]) -> None:
        settings, process_set = self.settings, self.settings.reduction.process_set
        # A bucket leaves when the slowest rank has filled it, so that rank's times count.
        ready = np.array(largest(seconds, f"{settings.tag}.ready", process_set))
        if self._method != "bytes" and self.comm is None:
            total = sum(settings.wire_bytes())
            device = settings.parameters[0].device
            self.comm = measure_comm(total, device, process_set, f"{settings.tag}.measure")
        plan = Plan.from_json(
            found_by_first(
                lambda: self._best(ready).to_json(), f"{settings.tag}.plan", process_set
            )
        )
        if self.plan is not None and plan.buckets == self.plan.buckets:
            self.plan = plan
        else:
            self._replace_buckets(plan)
        self._planned = True
        if self._method == _GIVEN:
            self._method = None
        self._drifted_steps = 0
        self._usual_count = self._count  # some parameters may never get a gradient
        _log.info("plan after step %d:\n%s", self.rounds, plan)

    def _best(self, ready: FloatArray) -> Plan:
        """Plan all gradients together; those of one kind (dtype, device) may share a bucket."""
        settings = self.settings
        if self._method == _GIVEN:
            assert self.plan is not None
            return self.plan
        order = sorted(range(len(ready)), key=lambda place: (float(ready[place]), -place))
        kind_of = {
            p: kind for kind, places in enumerate(kinds(settings.parameters)) for p in places
        }
        wire_bytes = np.array(settings.wire_bytes(), dtype=np.float64)
        codec = settings.reduction.cost(settings.parameters[0]).of_encoded()
        plan = plan_kinds(
            [settings.names[place] for place in order],
            ready[order],
            wire_bytes[order],
            [kind_of[place] for place in order],
            (self.comm or CommModel.linear(0.0, 0.0)).compressed(codec),
            method=self._method or "exact",
            bucket_bytes=self._bucket_bytes,
        )
        return plan if self.comm else replace(plan, predicted_s=None, exposed_s=None)

    def _replace_buckets(self, plan: Plan) -> None:
        """Take other buckets in mid-run, residuals along; all ranks call this."""
        name = f"{self.settings.tag}.residuals"
        residuals = of_all_ranks(self._buckets.residuals(), self.reduction, name)
        self._adopt(plan)
        self._buckets.restore_residuals(residuals)

    def _adopt(self, plan: Plan) -> None:
        """Take the plan's buckets; gradients that users can see move over with their values."""
        groups = plan_groups(plan, self.settings)
        # Under the same names: ranks with different plans must meet, to be told.
        buckets = self.settings.make_buckets(groups, "gradients")
        if self._adopted:
            buckets.move_in()
        self._adopted = True
        self._buckets, self.plan = buckets, plan
        self._bucket_of = {place: i for i, group in enumerate(groups) for place in group}


_APART = (
    "ranks have gone apart: after the gradients before these had been averaged, some ranks called "
    "step() and others did not. Most likely synchronize() was called without a backward pass on "
    "one rank alone (`if hvd.rank() == 0: optimizer.synchronize()`, before evaluation): call "
    "optimizer.synchronize() on every rank, and leave to one only what follows it. After this "
    "error, go on from a state (optimizer.load_state_dict) that every rank loads."
)


def _method(strategy: MergedGradient, settings: Settings) -> str | None:
    """Return how plans are made from measured times; None where the plan is fixed."""
    if settings.groups is not None:
        return None
    if strategy.bucket_bytes is not None:
        return "bytes"
    return {"auto": "exact", "greedy": "greedy"}.get(str(strategy.plan))


def _first_plan(strategy: MergedGradient, settings: Settings) -> Plan:
    """Return the plan that needs no measurement."""
    if settings.groups is not None:
        return settings.as_plan(settings.groups, "given")
    if strategy.plan in ("wfbp", "single"):
        limit = 1 if strategy.plan == "wfbp" else None
        return settings.as_plan(default_groups(settings, limit), str(strategy.plan))
    limit = strategy.bucket_bytes or DEFAULT_BUCKET_BYTES
    return settings.as_plan(default_groups(settings, limit), "bytes")
