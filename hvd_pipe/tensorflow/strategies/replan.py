"""Plan merged-gradient's buckets from the job's own times, between two steps.

The steps of a graph cannot change, so a plan means another graph: whoever drives the steps (the
callbacks, under ``model.fit``) asks after each, and has the step traced anew when told so::

    SKIP steps      default buckets; nothing is recorded
    TRIAL steps     traced anew, the same buckets; ready times and waits are recorded
    TRIAL steps     traced anew, in many messages; the same is recorded
    TRIAL steps     traced anew with the best plan for messages that cost what both waits show
    from then on    traced anew with the fastest of the three, and nothing is recorded

    where the user names another method than "exact"
                    its plan stays after two trials

    under ``auto``
    SKIP steps      as before
    its steps       traced anew, the same buckets; times are recorded
    then            all-reduces are measured, rank 0 plans and chooses, all follow;
                    traced anew for the last time

More plans are not tried, as to trace a step takes seconds. What records takes time, too, so all
trials record, and steps without it are not compared with them. All ranks count the same steps, so
they measure and trace at the same moment.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np
from horovod.tensorflow import mpi_ops

from hvd_pipe.planning.choice import OwnTimes, choose, least_of, predict, profile_of, report
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.methods import spell
from hvd_pipe.planning.overlap import deferring_plan
from hvd_pipe.planning.plan import Plan
from hvd_pipe.planning.tuner import (
    SETTLE_STEPS,
    TRIAL_STEPS,
    Gradients,
    Trial,
    error_of,
    next_plan,
)
from hvd_pipe.runtime.bucket_planner import SKIP_STEPS, measured_method
from hvd_pipe.runtime.consensus import answer_with
from hvd_pipe.strategy import Auto, MergedGradient, parse
from hvd_pipe.tensorflow import pending
from hvd_pipe.tensorflow.agree import check_alike, found_by_first, gather, largest
from hvd_pipe.tensorflow.measuring.ready_times import JobTimes, ReadyTimes, measure_comm
from hvd_pipe.tensorflow.sessions import Sessions
from hvd_pipe.tensorflow.strategies.forward_overlap import (
    ForwardOverlapEngine,
    MergedGradientEngine,
)

_log = logging.getLogger("hvd_pipe")

PLANS = 3
"""How many plans are tried."""


class Deferral(NamedTuple):
    """What ``overlap="forward"`` asks of whoever drives the steps.

    Args:
        problem: Returns why updates cannot be made layer by layer, None where they can.
        finish: Makes the updates that are left to the next step.
    """

    problem: Callable[[], str | None]
    finish: Callable[[], None]


class Replan:
    """Watches the steps of one optimizer.

    Args:
        sessions: Its sessions.
        passes: Batches that make one step.
        deferral: None where a step cannot begin with updates of the one before.
    """

    def __init__(
        self, sessions: Sessions, passes: int = 1, deferral: Deferral | None = None
    ) -> None:
        self._sessions, self._batches, self._passes = sessions, 0, passes
        self._deferral = deferral
        self._said: str | None = None
        """Why updates stay in their step, as was logged last."""
        self._barriers: dict[int, Plan] = {}
        """By session whose updates are deferred on trial, the plan with the barrier."""
        strategy, arguments = sessions.strategy, sessions.arguments
        steps, is_auto = SETTLE_STEPS + TRIAL_STEPS, isinstance(strategy, Auto)
        self._given = False
        """Whether the user has given a plan for messages behind the next forward pass."""
        self._method: str | None = None
        """How plans are made; None where the plan is fixed."""
        if isinstance(strategy, Auto):
            steps, strategy = strategy.steps, MergedGradient()
        if isinstance(strategy, MergedGradient) and strategy.bucket_bytes is None:
            self._method = measured_method(strategy, arguments.groups)
            self._given = strategy.overlaps_forward and strategy.load_plan() is not None
        self._tried: dict[int, list[Trial]] = {}
        """By session, what was seen of the plans before; the same on all ranks."""
        self._fit: object = None
        self._last = SKIP_STEPS + steps * passes
        plans = is_auto or self._given or self._method is not None
        self._open = plans and not arguments.reduction().alone

    @classmethod
    def of(cls, sessions: Sessions, passes: int = 1, deferral: Deferral | None = None) -> Replan:
        """Return what watches these sessions; one for all calls of ``fit``."""
        if sessions.watcher is None:
            sessions.watcher = cls(sessions, passes, deferral)
        watcher: Replan = sessions.watcher
        watcher._deferral = deferral
        return watcher

    def takes(self, fit: object) -> bool:
        """Return whether nobody drives the steps of this call of ``fit`` yet."""
        before, self._fit = self._fit, fit
        return before is not fit

    @property
    def is_driven(self) -> bool:
        """Whether a call of ``fit`` goes on."""
        return self._fit is not None

    def finish(self) -> None:
        """Make the updates that are left to the next step, on all ranks."""
        if self._deferral is not None:
            self._deferral.finish()

    def delay(self) -> None:
        """Begin trials without the barrier anew: steps have been finished one by one."""
        for number, session in enumerate(self._sessions):
            times = getattr(session.engine, "times", None)
            if number in self._barriers and times is not None:
                times.restart()
                self._last = self._batches + (SETTLE_STEPS + TRIAL_STEPS) * self._passes

    def begin(self) -> bool:
        """Note that training goes on; return whether the step must be traced anew."""
        sessions = self._sessions
        process_set = sessions.arguments.process_set
        answer_with(mpi_ops)
        if isinstance(sessions.strategy, Auto) and process_set.included():
            chosen = "nothing yet" if sessions.chosen is None else spell(sessions.chosen)
            check_alike([("what auto has chosen", chosen)], f"{sessions.tag}.resumed", process_set)
        # Callbacks and the model may be others than in the call of fit before.
        if (self._barriers or not self._open) and self._permitted_anew():
            return True
        return self._stale()

    def after_step(self) -> bool:
        """Note that a batch has been trained; return whether the step must be traced anew."""
        if not self._open:
            return self._stale()
        self._batches += 1
        engines = [each.engine for each in self._sessions]
        merged = [each for each in engines if isinstance(each, MergedGradientEngine)]
        if not merged:  # a checkpoint has brought a choice
            self._open = False
            return self._stale()
        saved = all(getattr(each, "has_saved_plan", False) for each in merged)
        if self._batches == SKIP_STEPS and (self._given or saved):
            self._open = False
            return self._permitted_anew()
        if self._batches == SKIP_STEPS:
            times = JobTimes if self._chooses else ReadyTimes
            for engine in merged:
                engine.times = times(len(engine.settings.shapes))
            return True
        if self._batches < SKIP_STEPS:
            return self._stale()
        for engine in merged:
            if engine.times is not None:
                engine.times.end_step()
        if self._batches < self._last:
            return self._stale()
        answer_with(mpi_ops)  # another framework may have been imported since the first step
        if self._chooses:
            self._open = False
            recorded = [(engine, engine.times) for engine in merged]
            measured = [self._measured(engine) for engine in merged]
            choose_method(
                self._sessions,
                [
                    (engine, times if isinstance(times, JobTimes) else None, comm)
                    for (engine, times), comm in zip(recorded, measured, strict=True)
                ],
            )
        else:
            stays = [self._take_next(engine, i) for i, engine in enumerate(merged)]
            self._open = not all(stays)
            self._last += (SETTLE_STEPS + TRIAL_STEPS) * self._passes
        self._sessions.is_stale = False
        return True

    @property
    def _chooses(self) -> bool:
        return isinstance(self._sessions.strategy, Auto) and self._sessions.chosen is None

    def _stale(self) -> bool:
        stale, self._sessions.is_stale = self._sessions.is_stale, False
        return stale

    def _recorded(self, engine: MergedGradientEngine) -> tuple[list[float], Trial] | None:
        """Return ready times, and what was seen of the plan; None where no rank saw a step."""
        times, engine.times = engine.times, None
        settings, plan = engine.settings, engine.plan
        waits = [-math.inf] * TRIAL_STEPS
        mine = [0.0, 0.0, 0.0, *waits, *([0.0] * len(settings.shapes))]
        if times is not None and times.steps:
            # A bucket leaves when the slowest rank has filled it, so that rank's times count. In
            # each step, the rank that is last waits for messages alone.
            waits = [*waits, *(-wait for wait in times.waits)][-TRIAL_STEPS:]
            steps = times.step_s or [0.0]
            mine = [1.0, median(steps), error_of(steps), *waits, *times.seconds()]
        found, step_s, error_s, *rest = largest(
            mine, f"{settings.tag}.ready", settings.reduction.process_set
        )
        if not found or not settings.dense or plan is None:
            return None
        least = [-wait for wait in rest[:TRIAL_STEPS] if math.isfinite(wait)]
        return rest[TRIAL_STEPS:], Trial(plan, step_s, median(least), error_s)

    def _measured(self, engine: MergedGradientEngine) -> CommModel | None:
        """Measure all-reduces and plan; None where there was nothing to measure on any rank."""
        settings, method = engine.settings, self._method
        recorded = self._recorded(engine)
        if recorded is None:
            return None
        sizes, process_set = engine.wire_bytes, settings.reduction.process_set
        total = int(sizes[settings.dense].sum())
        comm = measure_comm(total, process_set, f"{settings.tag}.measure")
        if method is None:
            return comm

        def find() -> str:
            codec = settings.reduction.cost(settings.shapes.dtypes[settings.dense[0]]).of_encoded()
            link, ready = comm.compressed(codec), np.array(recorded[0])
            return settings.shapes.best_plan(settings.dense, ready, sizes, link, method).to_json()

        plan = Plan.from_json(found_by_first(find, f"{settings.tag}.plan", process_set))
        engine.adopt(plan)
        _log.info("plan after step %d:\n%s", self._batches, plan)
        return comm

    def _take_next(self, engine: MergedGradientEngine, number: int) -> bool:
        """Take the next plan to try, or the one that stays; return whether it does."""
        settings, method = engine.settings, self._method
        pending.settle()  # other ranks may have, by reading
        recorded = self._recorded(engine)
        if number in self._barriers:
            return self._end_deferral(engine, number, recorded)
        if recorded is None or method is None:
            return True
        ready, seen = recorded
        tried = self._tried.setdefault(number, [])
        tried.append(seen)
        shapes, dense, sizes = settings.shapes, settings.dense, engine.wire_bytes

        def best(comm: CommModel, method: str, limit: int | None) -> Plan:
            return shapes.best_plan(dense, np.array(ready), sizes, comm, method, limit)

        def find() -> tuple[str, bool, str | None]:
            names = [shapes.names[index] for index in dense]
            kinds = [shapes.kinds[index] for index in dense]
            gradients = Gradients(names, np.array(ready)[dense], sizes[dense], kinds)
            plan, stays = next_plan(tried, gradients, best, method, most=PLANS)
            wanted = stays and isinstance(engine, ForwardOverlapEngine)
            forward = deferring_plan(tried, gradients) if wanted else None
            return plan.to_json(), stays, None if forward is None else forward.to_json()

        process_set = settings.reduction.process_set
        text, stays, forward = found_by_first(find, f"{settings.tag}.plan", process_set)
        plan = Plan.from_json(text)
        if forward is not None and self._permit(engine):
            self._barriers[number] = plan
            plan, stays = Plan.from_json(forward), False
        engine.adopt(plan)
        if stays:
            _log.info("plan after step %d:\n%s", self._batches, engine.plan)
        else:
            engine.times = ReadyTimes(len(shapes))
        return bool(stays)

    def _permitted_anew(self) -> bool:
        """Return whether steps leave messages now and did not before, or the other way round."""
        engines = [each.engine for each in self._sessions]
        found = [each for each in engines if isinstance(each, ForwardOverlapEngine)]
        wanting = [
            each
            for each in found
            if not (each.settings.reduction.alone or each.plan is None or each.plan.order is None)
        ]
        before = [each.may_defer for each in wanting]
        return [self._permit(each) for each in wanting] != before

    def _permit(self, engine: MergedGradientEngine) -> bool:
        """Let updates be deferred unless some rank has found that they cannot be."""
        if not isinstance(engine, ForwardOverlapEngine):
            return False
        problem = engine.problem() or (self._deferral and self._deferral.problem())
        process_set = engine.settings.reduction.process_set
        found = gather(problem, f"{engine.settings.tag}.defers", process_set)
        problems = [each for each in found if each is not None]
        engine.may_defer = self._deferral is not None and not problems
        if problems and process_set.rank() == 0 and problems[0] != self._said:
            self._said = problems[0]
            _log.warning("overlap='forward': updates stay in their step, as %s", self._said)
        return engine.may_defer

    def _end_deferral(
        self,
        engine: MergedGradientEngine,
        number: int,
        recorded: tuple[list[float], Trial] | None,
    ) -> bool:
        """Take the plan on trial if its steps were faster than all with the barrier."""
        assert isinstance(engine, ForwardOverlapEngine)
        assert self._deferral is not None
        assert engine.plan is not None
        before = min(each.step_s for each in self._tried[number])
        barrier = kept = self._barriers.pop(number)
        if recorded is not None and self._permit(engine):
            plan, step_s = engine.plan, recorded[1].step_s
            seen = ((len(plan.order or ()), step_s),)
            if step_s < before:
                kept = replace(plan, predicted_s=step_s, exposed_s=None)
            kept = replace(kept, tried=barrier.tried, tried_forward=seen)
        if kept.order is None:
            self._deferral.finish()
            engine.may_defer = False
            engine.adopt(kept)
        else:
            engine.plan = kept
        _log.info("overlap='forward' after step %d:\n%s", self._batches, engine.plan)
        return True


# What ``auto`` comes to under ``fit``: the first rank chooses, and all ranks follow.


Measured = tuple[MergedGradientEngine, JobTimes | None, CommModel | None]


def choose_method(sessions: Sessions, measured: Sequence[Measured]) -> None:
    """Let the first rank choose, and all sessions of all ranks follow."""
    assert isinstance(sessions.strategy, Auto)
    candidates, left_out = sessions.arguments.candidates(sessions.strategy)
    process_set = sessions.arguments.process_set
    speaks = process_set.rank() == 0
    for name, why in left_out.items():
        if speaks:
            _log.info("auto: %s is left out: %s", name, why)
    (engine, times, comm), *more = measured
    tag = f"{sessions.tag}.auto"
    settings = engine.settings
    mine = [0.0] * (3 + len(settings.shapes))
    own = None if times is None else times.own()
    if own is not None:
        mine = [1.0, own.before_s, own.update_s, *own.ready_s]
    found, before, update, *ready = largest(mine, f"{tag}.own", process_set)
    if not found or comm is None or more:
        why = "gradients come in several parts" if more else "no step could be measured"
        least = least_of(candidates)
        if speaks:
            _log.info("auto: %s: goes on with %s", why, spell(least))
        sessions.follow(least)
        return

    def find() -> str:
        reduction, shapes = settings.reduction, settings.shapes
        sizes = shapes.nbytes
        # A sparse gradient travels by itself, in a size that the step decides, and not in the
        # plan; other methods than merged-gradient send it as a dense one.
        dense = settings.dense
        planned = profile_of(
            OwnTimes(before, [ready[index] for index in dense], update),
            [shapes.names[index] for index in dense],
            [sizes[index] for index in dense],
        )
        whole = profile_of(OwnTimes(before, ready, update), shapes.names, sizes)
        cost = reduction.cost(shapes.dtypes[dense[0]])
        predictions = [
            predict(MergedGradient(plan=engine.plan), planned, comm, cost)
            if isinstance(candidate, MergedGradient) and engine.plan is not None
            else predict(candidate, whole, comm, cost)
            for candidate in candidates
        ]
        best = choose(predictions)
        _log.info("auto: %s", report(best, predictions))
        return spell(best.method)

    method = parse(found_by_first(find, f"{tag}.choice", process_set))
    assert not isinstance(method, Auto)
    sessions.follow(method)
