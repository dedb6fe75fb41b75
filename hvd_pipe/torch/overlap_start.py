"""How updates come to be deferred: after steps with the barrier, plans are tried in training.

::

    merged-gradient   until its own plan stays
    WATCH_STEPS       messages leave in the plan's order; the first use of each weight is timed
    TRIALS            plans with few and with many messages, which are timed; the best plan for the
                      times of these messages, and one with fewer
    from then on      the plan with the fastest steps, the same on all ranks: one of these, or
                      merged-gradient's with the barrier

Under ``overlap="forward"``, a plan or a bucket size that the user gives is taken as it is; under
``"auto"``, it keeps the barrier, as does what cannot be deferred, and what Horovod carries. A run
that goes on from a checkpoint sends by its plan from the first step.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hvd_pipe.measuring.step_times import FirstUses
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.overlap import PARTS, Pass, fitted, in_order, plan_overlap
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.tuner import HIDDEN, Trial, Tuner
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.torch.agree import largest, make_tuner
from hvd_pipe.torch.checkpoint import SavedState
from hvd_pipe.torch.partial_updates import updates_each_parameter, updates_quietly
from hvd_pipe.torch.strategies.base import Engine
from hvd_pipe.torch.strategies.forward_overlap import ForwardOverlapEngine
from hvd_pipe.torch.strategies.merged_gradient import MergedGradientEngine
from hvd_pipe.torch.strategies.pending_parameters import Memory, memory_of

if TYPE_CHECKING:
    from hvd_pipe.torch.arguments import Checked

WATCH_STEPS = 3
SETTLE_STEPS = 2
TIMED_STEPS = 4
TRIALS = 4
FIRST_PARTS = (6, 18)
DEARER = 2.5  # what a message costs beside its bytes, in the last trial, over what was measured
MARGIN = 1.02  # by which steps must be faster without the barrier, where nobody asked for that

_log = logging.getLogger("hvd_pipe")


class OverlapStart:
    """Changes the engine once, then its plan, unless that ``is_given`` by the user.

    Where this ``is_asked`` for by ``overlap="forward"``, a warning says why it cannot be.
    """

    def __init__(self, memory: dict[int, Memory], is_given: bool, is_asked: bool = True) -> None:
        self._is_given, self._is_asked, self._memory = is_given, is_asked, memory
        self._level = logging.WARNING if is_asked else logging.INFO
        self.is_over = False
        """Whether nothing is watched or tried any more."""
        self._since = 0
        """The round after which uses are watched, or the plan is tried; the same on all ranks."""
        self._count = 0
        """How many parameters the plans are about; 0 while they are merged-gradient's or given."""
        self._barrier: Plan | None = None
        self._raced = False
        """Whether merged-gradient's plans were tried in this run."""
        self._sparse_as_dense = False
        """As the user has it."""
        self._tuner: Tuner | None = None
        """Tries plans without the barrier; None before."""
        self._work: Pass | None = None
        self._messages: list[tuple[float, float]] = []

    @property
    def tries(self) -> bool:
        """Whether a plan is on trial, which a state that is loaded begins anew."""
        return self._tuner is not None and not self.is_over

    def after_step(self, engine: Engine) -> Engine:
        """Return the engine of the next step, at the end of ``step()``."""
        if engine.reduction.alone or not isinstance(engine, MergedGradientEngine):
            return engine
        is_forward = isinstance(engine, ForwardOverlapEngine)
        if is_forward and 0 < self._count < len(engine.settings.names):
            return self._restart(engine)
        if self.is_over:
            return engine
        if not isinstance(engine, ForwardOverlapEngine):
            if engine.measures:
                self._raced = True
                return engine
            return self._begin(engine) if engine.is_equal_everywhere else engine
        if self._tuner is None:
            self._watch(engine)
        else:
            self._time(engine, self._tuner)
        assert engine.plan is not None
        if self.is_over and engine.plan.order is None:
            return _with_barrier(engine, engine.plan, self._sparse_as_dense)
        return engine

    def close(self) -> None:
        """Watch and try nothing more."""
        self.is_over = True

    def resume(self, engine: Engine, saved: SavedState | None) -> tuple[Engine, SavedState | None]:
        """Return an engine that sends as the checkpoint's plan says, and the checkpoint."""
        settings, plan, reduction = engine.settings, None, engine.reduction
        if saved is not None and saved.strategy == engine.name and not self._is_given:
            text, alike = saved.counters.get("plan"), saved.workers == reduction.workers
            plan = Plan.from_json(text) if text and alike and not reduction.alone else None
        if plan is None or set(plan.names) != set(settings.names):
            if self._tuner is not None:  # its plan is not the state's: the trial begins anew
                self._try_from(engine.rounds, self._tuner)
            return engine, saved
        self._tuner, self._count = None, len(settings.names)
        self._raced = False  # its steps were timed in another run
        self.is_over = bool(plan.order or plan.tried_forward) or not self._is_asked
        if not isinstance(engine, ForwardOverlapEngine):
            self._sparse_as_dense = settings.sparse_as_dense
        if plan.order is None:  # with the barrier, for good where others were slower
            return _with_barrier(engine, plan, self._sparse_as_dense), saved
        return self._overlapping(engine, plan, measured=True), saved

    def _begin(self, engine: MergedGradientEngine) -> Engine:
        """Have all ranks defer updates from the next step on, or stay as they are."""
        assert engine.plan is not None
        problem, settings = refusal(engine), engine.settings
        if not self._is_asked:
            problem = problem or _futility(engine)
        if problem:
            _log.log(self._level, "overlap='forward': updates stay in step(), as %s", problem)
        tag, process_set = settings.tag, settings.reduction.process_set
        if largest([float(problem is not None)], f"{tag}.overlaps", process_set)[0]:
            self.is_over = True
            return engine
        plan = self._barrier = engine.plan
        if plan.order is None:  # until uses are timed: used in their order
            count = len(settings.names)
            every = np.arange(count, dtype=np.float64)
            sizes = np.array(settings.index.nbytes, dtype=np.float64)
            work = Pass(every[::-1].copy(), every, sizes, float(count), float(count))
            plan = in_order(plan, settings.names, work)
        self._sparse_as_dense = settings.sparse_as_dense
        successor = self._overlapping(engine, plan, measured=False)
        if self._is_given:
            self.is_over = True
            _log.info("overlap='forward' after step %d:\n%s", engine.rounds, plan)
            return successor
        successor.begin_watch()
        self._since, self._count = engine.rounds, len(settings.names)
        return successor

    def _overlapping(self, engine: Engine, plan: Plan, measured: bool) -> ForwardOverlapEngine:
        """Return an engine of this plan, for the same parameters, between two steps."""
        settings = dataclasses.replace(engine.settings, sparse_as_dense=True)
        successor = ForwardOverlapEngine(settings, plan, measured, self._memory)
        successor.said_at = self._level
        _replace(successor, engine)
        return successor

    def _watch(self, engine: ForwardOverlapEngine) -> None:
        """Note the end of a step; after some, let plans be tried."""
        first_uses, self._since = engine.ready_times, min(self._since, engine.rounds)  # joined
        if first_uses is None:  # another optimizer of these parameters has taken a turn
            self._since = engine.rounds
            engine.begin_watch()
        elif engine.rounds >= self._since + WATCH_STEPS and engine.is_equal_everywhere:
            engine.end_watch()
            self._try_plans(engine, first_uses)
        else:
            engine.watch()

    def _try_plans(self, engine: ForwardOverlapEngine, first_uses: FirstUses) -> None:
        """Have all ranks agree on the times of a step, and on the first plan."""
        assert engine.plan is not None
        settings, count = engine.settings, len(engine.settings.parameters)
        local_times = [1.0] + [0.0] * (2 + 2 * count)
        if first_uses.steps and (self._is_asked or engine.sees_all_uses):
            uses = first_uses.uses()
            times = [uses.forward_s, uses.backward_s, *uses.ready_s]
            local_times = [0.0, *times, *(-seconds for seconds in uses.needed_s)]
        unmeasured, forward_s, backward_s, *lists = largest(
            local_times, f"{settings.tag}.uses", settings.reduction.process_set
        )
        if unmeasured:
            self.is_over = True
            if not self._is_asked:
                engine.take(dataclasses.replace(engine.plan, order=None), measured=True)
            _log.info("overlap='forward' after step %d:\n%s", engine.rounds, engine.plan)
            return
        self._work = Pass(
            np.array(lists[:count]),
            np.array([-seconds for seconds in lists[count:]]),
            np.array(settings.index.nbytes, dtype=np.float64),
            forward_s,
            backward_s,
        )
        self._messages = []
        process_set = settings.reduction.process_set
        self._tuner = make_tuner(f"{settings.tag}.overlap", process_set, timed=TIMED_STEPS)
        self._take_next(engine, self._tuner)

    def _try_from(self, since: int, tuner: Tuner) -> None:
        """Try the plan from after this round on."""
        self._since = since
        tuner.begin(since + SETTLE_STEPS + 1)

    def _time(self, engine: ForwardOverlapEngine, tuner: Tuner) -> None:
        """Note the end of a step; after some of a plan, take the next one."""
        assert self._work is not None
        assert engine.plan is not None
        if engine.rounds <= self._since:
            self._try_from(engine.rounds, tuner)  # all have joined, and count anew
        if not tuner.end_step(engine.rounds, time.perf_counter()):
            return
        engine.end_round()
        if engine.is_equal_everywhere:  # else in other steps of some ranks: not now
            tuner.seen(engine.plan)
            self._messages += engine.messages.seconds()
            self._take_next(engine, tuner)

    def _restart(self, engine: MergedGradientEngine) -> Engine:
        """Plan anew, with the barrier at first, as parameters have joined."""
        engine.complete_round()
        if not engine.is_equal_everywhere:  # in other steps of some ranks: not now
            return engine
        self._tuner, self._count, self._raced, self.is_over = None, 0, False, False
        return _with_barrier(engine, None, self._sparse_as_dense)

    def _take_next(self, engine: ForwardOverlapEngine, tuner: Tuner) -> None:
        """Take the next plan to try, or the fastest."""
        plan, self.is_over = tuner.next(partial(self._propose, engine))
        engine.take(plan, measured=self.is_over)
        self._try_from(engine.rounds, tuner)
        if self.is_over:
            _log.info("overlap='forward' after step %d:\n%s", engine.rounds, engine.plan)

    def _propose(self, engine: ForwardOverlapEngine, tried: Sequence[Trial]) -> tuple[Plan, bool]:
        """The plan of a trial, or, after the last one, the fastest."""
        settings, work, number = engine.settings, self._work, len(tried)
        assert work is not None
        if number == TRIALS:
            return self._fastest(tried), True
        if number < len(FIRST_PARTS):
            busy = (work.forward_s + work.backward_s) / max(float(work.bytes.sum()), 1.0)
            comm, parts = CommModel.linear(0.0, busy), FIRST_PARTS[number : number + 1]
        else:
            starts = DEARER if number > len(FIRST_PARTS) else 1.0
            comm, parts = fitted(self._messages, starts), PARTS
        kinds = [(p.dtype, p.device) for p in settings.parameters]
        return plan_overlap(settings.names, work, comm, kinds, parts), False

    def _fastest(self, tried: Sequence[Trial]) -> Plan:
        """The plan to go on with: the barrier's where its steps were as fast."""
        best = min(tried, key=lambda trial: trial.step_s)
        tried_forward = tuple((_count(trial.plan), trial.step_s) for trial in tried)
        barrier = self._barrier
        assert barrier is not None
        before, count = barrier.tried, len(barrier.buckets)
        barrier_s = [step_s for messages, step_s in before if messages == count]
        if not self._raced or not barrier_s:
            return dataclasses.replace(best.plan, tried_forward=tried_forward)
        forward_s = best.step_s if self._is_asked else MARGIN * best.step_s + best.error_s
        kept = barrier if min(barrier_s) <= forward_s else best.plan
        return dataclasses.replace(kept, tried=before, tried_forward=tried_forward)


def start_of(checked: Checked) -> OverlapStart | None:
    """Return what may defer updates under these arguments; None where the barrier stays."""
    strategy, settings = checked.strategy, checked.settings
    if not isinstance(strategy, MergedGradient):
        return None
    is_given = not strategy.plans or settings.groups is not None
    is_asked = strategy.overlaps_forward or bool(checked.plan and checked.plan.order)
    is_tried = not is_given and settings.reduction.group is not None  # over MPI, it may be slower
    if strategy.overlap == "backward" or not (is_asked or is_tried):
        return None
    return OverlapStart(memory_of(settings.parameters), is_given, is_asked)


def _futility(engine: MergedGradientEngine) -> str | None:
    """Return why plans without the barrier can gain nothing; None where they may."""
    assert engine.plan is not None
    step_s = min((step_s for _, step_s in engine.plan.tried), default=0.0)
    if (engine.plan.exposed_s or 0.0) <= HIDDEN * step_s:
        return "backward hides the messages"
    if engine.waited_early:
        return "gradients are read before it"
    if not updates_quietly(engine.settings.optimizer):
        return "a hook is registered on the optimizer, or for all optimizers"
    return None


def _count(plan: Plan) -> int:
    return len(plan.order or plan.buckets)


def refusal(engine: MergedGradientEngine) -> str | None:
    """Return why updates cannot be deferred on this rank; None where they can be."""
    settings = engine.settings
    if settings.sparse:
        return (
            f"the gradient of {settings.names[min(settings.sparse)]!r} is sparse "
            "(sparse_as_dense=True sends it as a dense one)"
        )
    if not updates_each_parameter(settings.optimizer):
        return (
            "it is not known whether the optimizer updates each parameter by itself (as Adam "
            "does, and LBFGS does not): if it does, and draws no random numbers, set "
            "`optimizer.updates_each_parameter = True`"
        )
    return None


def _with_barrier(
    engine: Engine, plan: Plan | None, sparse_as_dense: bool
) -> MergedGradientEngine:
    """Return an engine whose updates wait in ``step()``, between two steps; it may plan anew."""
    settings = dataclasses.replace(engine.settings, sparse_as_dense=sparse_as_dense)
    successor = MergedGradientEngine(settings, MergedGradient(), None)
    _replace(successor, engine, **({} if plan is None else {"plan": plan.to_json()}))
    return successor


def _replace(successor: Engine, engine: Engine, **counters: str) -> None:
    """Let an engine take the place of one that has finished a step, with a state's counters."""
    successor.load(dataclasses.replace(engine.state(), counters=counters))
    successor.rounds, successor.held = engine.rounds, engine.held
