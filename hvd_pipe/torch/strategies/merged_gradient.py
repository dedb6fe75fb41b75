"""MG-WFBP: gradients travel in the groups that finish first, found from the job's own times.

A run with ``plan="auto"``::

    SKIP steps      default buckets; nothing is recorded (caches, lazy set-up)
    TRIAL steps     the same buckets; ready times, waits and steps are recorded
                    all ranks take the next plan of `hvd_pipe.planning.tuner`, and record again;
                    the last one stays
    after           that plan, until gradients keep coming in another order: then the same again,
                    with the plan's buckets; or `hvd_pipe.torch.overlap_start` takes over

Any other ``plan``, or groups, are never measured. With ``bucket_bytes``, and under ``auto``, there
is one trial. All ranks count the same steps, so they measure at the same time. A rank whose
gradients come in another order sets the control flag ``reordered``; all ranks then record anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average

from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.measuring.step_times import ReadyTimes
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.tuner import (
    SETTLE_STEPS,
    TRIAL_STEPS,
    Gradients,
    Trial,
    Tuner,
    next_plan,
)
from hvd_pipe.runtime.gradient_index import SKIP_STEPS, measured_method
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.torch.agree import make_tuner
from hvd_pipe.torch.measuring.probes import measure_comm
from hvd_pipe.torch.messages.allreduce import of_all_ranks
from hvd_pipe.torch.messages.buckets import BucketSet, residuals_of, restore_residuals
from hvd_pipe.torch.messages.control_flags import ControlFlags
from hvd_pipe.torch.strategies.base import Engine
from hvd_pipe.torch.strategies.settings import Settings, State

PATIENCE_STEPS = 5

_GIVEN = "given"

FloatArray = npt.NDArray[np.float64]

_log = logging.getLogger("hvd_pipe")


class MergedGradientEngine(Engine):
    """Synchronous SGD: all buckets of a step are averaged before its update."""

    name = MergedGradient.name
    takes_together = True
    current: BucketSet
    _sends_in_order = False
    """Whether its plans may have an order."""

    def __init__(
        self,
        settings: Settings,
        strategy: MergedGradient,
        plan: Plan | None,
        measure_steps: int | None = None,
    ) -> None:
        super().__init__(settings)
        self._bucket_bytes = strategy.bucket_bytes
        self._method = measured_method(strategy, settings.groups)
        if measure_steps is not None and self._method is None:
            self._method = _GIVEN  # nothing to plan, and yet to measure
        self._measures_comm = measure_steps is not None
        self._timed = TRIAL_STEPS if measure_steps is None else measure_steps
        self.comm: CommModel | None = None
        """The result of `measure_comm`, under ``auto``; the same on all ranks and steps."""
        self._tuner: Tuner | None = None
        """Times the plan; None where it stays."""
        self._waits: list[float] = []
        """Of steps that are timed, seconds from the last gradient to the last average."""
        self._measure(SKIP_STEPS)
        self._drifted_steps = 0
        """The steps in a row in which buckets filled in another order than planned."""
        self._measured = False
        """Whether the plan comes from measured times: a checkpoint holds it then."""
        self._patience = PATIENCE_STEPS
        self._flags = ControlFlags()
        self._all_updated = True
        """Whether all ranks have made the same round, and will make the same update."""
        self._drains = self._adopted = False
        self._sent_s = 0.0
        if plan is None:
            every = range(len(settings.names))
            plan = settings.index.first_plan(strategy, settings.groups, every)
        self.plan = plan
        self.build()

    @property
    def measures(self) -> bool:
        return self._tuner is not None

    def build(self) -> None:
        """Make buckets by the plan; parameters that have joined get others, until a new plan."""
        assert self.plan is not None
        planned, names = len(self.plan.names), self.settings.names
        if planned < len(names):
            index = self.settings.index
            joined = index.as_plan(index.default_groups(range(planned, len(names))), "bytes")
            buckets, order = (*self.plan.buckets, *joined.buckets), self.plan.order
            if order is not None:
                order = (*order, *range(len(self.plan.buckets), len(buckets)))
            self.plan = Plan(buckets, self.plan.method, order=order)
            self._measure(self.rounds + SKIP_STEPS)
        self._count = self._usual_count = len(names)
        self._adopt(self.plan)

    def _measure(self, begin: int, tuner: Tuner | None = None) -> None:
        """Record steps from a round on, unless the plan is fixed, for this tuner or a new one."""
        if self._method is None:
            return
        if tuner is None:
            settings = self.settings
            tuner = make_tuner(settings.tag, settings.reduction.process_set, timed=self._timed)
        tuner.begin(begin)
        self._tuner, self._waits, self.ready_times = tuner, [], None

    def _end_trials(self) -> None:
        self._tuner = self.ready_times = None
        self._measured, self._drifted_steps = True, 0

    # Architecture: G6
    def prepare(self, shown_in: Mapping[int, torch.Tensor]) -> bool:
        self.send()
        self._receive()
        updates = not self.current.is_dropped
        self.current.bind_gradients(shown_in)
        if self.current.stale:
            assert self.plan is not None
            self._replace_buckets(self.plan)  # without room for what turned out to be sparse
        return updates

    def give_up(self) -> None:
        super().give_up()
        self._read_flags()

    @property
    def accumulates(self) -> bool:
        """A sum of averages is equal on all ranks, but for what a codec adds to it."""
        reduction = self.reduction
        return bool(reduction.op == Average) and reduction.compression is Compression.none

    def send(self) -> None:
        if self.current.is_flushed:
            return
        if self.ready_times is not None:
            self.ready_times.end_step()
        self._sent_s = time.perf_counter()
        reordered = self._check_order()
        stepped, self.stepped = self.stepped, False
        self.current.flush(
            ControlFlags(float(reordered), drains=float(self._drains), stepped=float(stepped))
        )

    def _receive(self) -> None:
        """Wait for the averages, and read the control flags of all ranks."""
        try:
            self.current.wait()
        except RanksDisagreeError:
            self.stepped = False  # no rank has moved
            raise
        if self._tuner is not None and self.ready_times is not None:
            self._waits.append(time.perf_counter() - self._sent_s)
        self._read_flags()

    def _read_flags(self) -> None:
        flags, workers = self.current.flags, self.reduction.workers
        self._flags = flags
        if flags.some_stepped(workers):
            raise HvdPipeError(_APART)
        # A rank that drains alone makes no update after this, and so no plan.
        self._all_updated = flags.all_present(workers) and not flags.some_drained(workers)

    @property
    def is_equal_everywhere(self) -> bool:
        return self._all_updated

    def drain(self) -> None:
        # A rank without a gradient still takes part, as in Horovod: others may have one.
        self._drains = True
        try:
            self.prepare_now()
        finally:
            self._drains = False
        # Where no rank had a gradient, the next ones, which may be set by hand, are to be sent.
        self.synchronized = not self._flags.all_drained(self.reduction.workers)

    def state(self) -> State:
        # A plan on trial may be a bad one.
        keeps = self._measured and self._tuner is None
        counters = {"plan": self.plan.to_json()} if self.plan is not None and keeps else {}
        return State(counters, residuals_of(self.current))

    def load(self, state: State) -> None:
        """Take a plan that was measured: the same buckets add up in the same order."""
        text = None if self._method is None else state.counters.get("plan")
        plan = None if text is None else Plan.from_json(text)
        fits = plan is not None and (plan.order is None or self._sends_in_order)
        if plan is not None and fits and set(plan.names) == set(self.settings.names):
            self._end_trials()
            self._adopt(plan)
            self._usual_count = 0  # as many as the first step has
        restore_residuals(self.current, state.tensors)

    def discard(self) -> None:
        super().discard()
        self.stepped = False

    def after_join(self) -> None:
        self.rounds = 0
        self.stepped = False
        if self._tuner is not None:
            # Trials end where all ranks are present, so all have tried the same plans.
            self._measure(SETTLE_STEPS if self._tuner.tried else SKIP_STEPS, self._tuner)

    # Architecture: G12
    def after_update(self) -> None:
        super().after_update()
        if self.reduction.alone or not self._all_updated:
            return  # planning asks all ranks: one has joined, or may not come here
        if not self.measures and self._flags.reordered != 0.0:
            _log.info("gradients come in another order: measuring again for a new plan")
            self._patience *= 2  # a model whose order never settles must not measure for ever
            self._measure(self.rounds)
        if self._tuner is None:
            return
        self._tuner.end_step(self.rounds, time.perf_counter())
        if self.ready_times is None:
            if self.rounds >= self._tuner.first:
                parameters = self.settings.parameters
                self.ready_times = ReadyTimes(len(parameters), parameters[0].device)
            return
        if self.ready_times.steps >= self._timed:
            self._next_plan(self._tuner, self.ready_times.seconds())

    def _check_order(self) -> bool:
        """Return whether buckets have filled in another order than planned for some steps."""
        if self._method is None:
            return False
        sparse = self.settings.sparse
        filled = [self._bucket_of[i] for i in self.current.completed if i not in sparse]
        self._count = len(filled)
        if self._tuner is not None:
            return False
        order = list(dict.fromkeys(reversed(filled)))[::-1]  # by each bucket's last gradient
        self._usual_count = self._usual_count or self._count
        as_planned = order == sorted(order) and self._count == self._usual_count
        self._drifted_steps = 0 if as_planned else self._drifted_steps + 1
        return self._drifted_steps >= self._patience

    # Architecture: G13
    def _next_plan(self, tuner: Tuner, seconds: Sequence[float]) -> None:
        settings = self.settings
        assert self.plan is not None
        ready = tuner.seen(self.plan, waits=self._waits[-self._timed :], ready=seconds)
        if self._measures_comm and self.comm is None:
            total, reduction = sum(settings.wire_bytes()), settings.reduction
            device, tag = settings.parameters[0].device, f"{settings.tag}.measure"
            self.comm = measure_comm(total, device, reduction.process_set, tag, reduction.group)
        plan, stays = tuner.next(partial(self._propose, np.array(ready)))
        if plan.buckets == self.plan.buckets:
            self.plan = plan
        else:
            self._replace_buckets(plan)
        self._usual_count = self._count  # some parameters may never get a gradient
        if not stays:
            self._measure(self.rounds + SETTLE_STEPS, tuner)
            return
        self._end_trials()
        if self._method == _GIVEN:
            self._method = None
        _log.info("plan after step %d:\n%s", self.rounds, plan)

    def _propose(self, ready: FloatArray, tried: Sequence[Trial]) -> tuple[Plan, bool]:
        """Return the plan of the next steps, and whether it stays."""
        settings = self.settings
        if self._method == _GIVEN:
            return tried[-1].plan, True
        sizes = np.array(settings.wire_bytes(), dtype=np.float64)
        find = partial(settings.index.best_plan, range(len(ready)), ready, sizes)
        if self._method == "bytes":
            plan = find(CommModel.linear(0.0, 0.0), "bytes", self._bucket_bytes)
            return replace(plan, predicted_s=None, exposed_s=None), True
        method = self._method or "exact"
        if self.comm is not None:
            codec = settings.reduction.cost(settings.parameters[0]).of_encoded()
            return find(self.comm.compressed(codec), method, None), True
        gradients = Gradients(settings.names, ready, sizes, settings.index.kinds)
        return next_plan(tried, gradients, find, method)

    def _replace_buckets(self, plan: Plan) -> None:
        """Change the buckets in mid-run, with their residuals; all ranks call this."""
        name = f"{self.settings.tag}.residuals"
        residuals = of_all_ranks(residuals_of(self.current), self.reduction, name)
        self._adopt(plan)
        restore_residuals(self.current, residuals)

    def _adopt(self, plan: Plan) -> None:
        """Make the plan's buckets; gradients that users can see are copied into them."""
        groups = self.settings.index.plan_groups(plan, range(len(self.settings.names)))
        self.plan = plan
        buckets = self._make_buckets(groups)
        if self._adopted:
            buckets.copy_in()
        self._adopted, self.current = True, buckets
        self._bucket_of = {index: i for i, group in enumerate(groups) for index in group}

    def _make_buckets(self, groups: Sequence[Sequence[int]]) -> BucketSet:
        # Under the same names, so that ranks with different plans get an error.
        return BucketSet(self.settings, groups, "gradients")


_APART = (
    "ranks have gone apart: after the gradients before these had been averaged, some ranks called "
    "step() and others did not. Most likely synchronize() was called without a backward pass on "
    "one rank alone (`if hvd.rank() == 0: optimizer.synchronize()`, before evaluation), or a "
    "state was loaded there: do the same on every rank, and leave to one only what follows it. "
    "After this error, go on from a state (optimizer.load_state_dict) that every rank loads."
)
