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
from functools import partial
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
    Tuner,
    next_plan,
)
from hvd_pipe.runtime.consensus import answer_with
from hvd_pipe.runtime.gradient_index import SKIP_STEPS, measured_method
from hvd_pipe.strategy import Auto, MergedGradient, parse
from hvd_pipe.tensorflow import pending
from hvd_pipe.tensorflow.agree import check_alike, found_by_first, gather, largest
from hvd_pipe.tensorflow.measuring.ready_times import ReadyTimes, measure_comm
from hvd_pipe.tensorflow.sessions import Sessions
from hvd_pipe.tensorflow.strategies.forward_overlap import ForwardOverlapEngine
from hvd_pipe.tensorflow.strategies.merged_gradient import MergedGradientEngine

_log = logging.getLogger("hvd_pipe")

PLANS = 3
"""How many plans are tried."""


class Deferral(NamedTuple):
    """What ``overlap="forward"`` needs of the code that drives the steps."""

    problem: Callable[[], str | None]
    """Returns why updates cannot be made layer by layer, None where they can."""
    finish: Callable[[], None]
    """Makes the updates that are left to the next step."""


class Replan:
    """Watches the steps of one optimizer, each of some ``passes``, over all calls of ``fit``.

    ``deferral`` is None where a step cannot begin with updates of the one before.
    """

    def __init__(
        self, sessions: Sessions, passes: int = 1, deferral: Deferral | None = None
    ) -> None:
        self._sessions, self._batches, self._passes = sessions, 0, passes
        self._deferral = deferral
        self._said: str | None = None
        """Why updates stay in their step, as was logged last."""
        self._tuners: dict[str, Tuner] = {}
        self._barriers: dict[str, Plan] = {}
        """By session whose updates are deferred on trial, the plan with the barrier."""
        self._fit: object = None
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
        self._last = SKIP_STEPS + steps * passes
        plans = is_auto or self._given or self._method is not None
        self._open = plans and not arguments.reduction().alone

    @classmethod
    def of(cls, sessions: Sessions, passes: int = 1, deferral: Deferral | None = None) -> Replan:
        """Return the instance for these sessions, one for all calls of ``fit``."""
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
        """Apply deferred updates, on all ranks."""
        if self._deferral is not None:
            self._deferral.finish()

    def delay(self) -> None:
        """Begin trials without the barrier anew: steps have been finished one by one."""
        for session in self._sessions:
            times = getattr(session.engine, "times", None)
            if session.tag in self._barriers and times is not None:
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
        engines = [session.engine for session in self._sessions]
        merged = [engine for engine in engines if isinstance(engine, MergedGradientEngine)]
        if not (self._open and merged):  # a checkpoint has brought a choice, where there are none
            self._open = False
            return self._stale()
        self._batches += 1
        chooses = isinstance(self._sessions.strategy, Auto) and self._sessions.chosen is None
        if self._batches == SKIP_STEPS:
            if self._given or all(getattr(engine, "has_saved_plan", False) for engine in merged):
                self._open = False
                return self._permitted_anew()
            for engine in merged:
                engine.times = ReadyTimes(len(engine.settings.shapes), chooses)
            return True
        for engine in merged:
            if engine.times is not None:
                engine.times.end_step()
        if self._batches < self._last:
            return self._stale()
        answer_with(mpi_ops)  # another framework may have been imported since the first step
        if chooses:
            self._open = False
            self._choose(merged)
        else:
            stays = [self._take_next(engine) for engine in merged]
            self._open = not all(stays)
            self._last += (SETTLE_STEPS + TRIAL_STEPS) * self._passes
        self._sessions.is_stale = False
        return True

    def _stale(self) -> bool:
        stale, self._sessions.is_stale = self._sessions.is_stale, False
        return stale

    def _tuner(self, engine: MergedGradientEngine) -> Tuner:
        tag, process_set = engine.settings.tag, engine.settings.reduction.process_set
        if tag not in self._tuners:
            seen = partial(largest, name=f"{tag}.ready", process_set=process_set)
            plan = partial(found_by_first, name=f"{tag}.plan", process_set=process_set)
            self._tuners[tag] = Tuner(seen, plan)
        return self._tuners[tag]

    def _recorded(self, engine: MergedGradientEngine) -> list[float] | None:
        """Record the times of the plan; return ready times, or None where no rank had a step."""
        times, engine.times = engine.times, None
        if not engine.settings.dense or engine.plan is None:
            return None
        steps, waits = [0.0], [math.inf] * TRIAL_STEPS
        local = [0.0] * (1 + len(engine.settings.shapes))
        if times is not None and times.steps:
            steps = times.step_s or steps
            waits = [*waits, *times.waits][-TRIAL_STEPS:]
            local = [1.0, *times.seconds()]
        tuner = self._tuner(engine)
        is_measured, *ready = tuner.seen(engine.plan, steps, waits, local)
        if is_measured:
            return ready
        tuner.tried.pop()
        return None

    def _take_next(self, engine: MergedGradientEngine) -> bool:
        """Take the next plan to try, or the one that stays; return whether it does."""
        settings, method, tuner = engine.settings, self._method, self._tuner(engine)
        pending.settle()  # other ranks may have, by reading
        ready = self._recorded(engine)
        if settings.tag in self._barriers:
            return self._end_deferral(engine, tuner, ready is not None)
        if ready is None or method is None:
            return True
        shapes, dense, sizes = settings.shapes, settings.dense, engine.wire_bytes
        names = [shapes.names[index] for index in dense]
        kinds = [shapes.kinds[index] for index in dense]
        gradients = Gradients(names, np.array(ready)[dense], sizes[dense], kinds)

        def best(comm: CommModel, method: str, limit: int | None) -> Plan:
            return shapes.best_plan(dense, np.array(ready), sizes, comm, method, limit)

        def without_barrier(tried: Sequence[Trial]) -> tuple[Plan, bool]:
            forward = deferring_plan(tried, gradients)
            return (plan, True) if forward is None else (forward, False)

        plan, stays = tuner.next(
            lambda tried: next_plan(tried, gradients, best, method, most=PLANS)
        )
        if stays and isinstance(engine, ForwardOverlapEngine):
            forward, stays = tuner.next(without_barrier)
            stays = stays or not self._permit(engine)
            if not stays:
                self._barriers[settings.tag], plan = plan, forward
        engine.adopt(plan)
        if stays:
            _log.info("plan after step %d:\n%s", self._batches, engine.plan)
        else:
            engine.times = ReadyTimes(len(shapes))
        return stays

    def _permitted_anew(self) -> bool:
        """Return whether steps leave messages now and did not before, or the other way round."""
        engines = [session.engine for session in self._sessions]
        wanting = [
            engine
            for engine in engines
            if isinstance(engine, ForwardOverlapEngine)
            if not engine.settings.reduction.alone
            if engine.plan is not None and engine.plan.order is not None
        ]
        before = [engine.may_defer for engine in wanting]
        return [self._permit(engine) for engine in wanting] != before

    def _permit(self, engine: ForwardOverlapEngine) -> bool:
        """Let updates be deferred unless some rank has found that they cannot be."""
        problem = engine.problem() or (self._deferral and self._deferral.problem())
        process_set = engine.settings.reduction.process_set
        gathered = gather(problem, f"{engine.settings.tag}.defers", process_set)
        problems = [reason for reason in gathered if reason is not None]
        engine.may_defer = self._deferral is not None and not problems
        if problems and process_set.rank() == 0 and problems[0] != self._said:
            self._said = problems[0]
            _log.warning("overlap='forward': updates stay in their step, as %s", self._said)
        return engine.may_defer

    def _end_deferral(self, engine: MergedGradientEngine, tuner: Tuner, is_measured: bool) -> bool:
        """Take the plan on trial if its steps were faster than all with the barrier."""
        assert isinstance(engine, ForwardOverlapEngine)
        assert self._deferral is not None
        assert engine.plan is not None
        barrier = plan = self._barriers.pop(engine.settings.tag)
        if is_measured and self._permit(engine):
            *before, last = tuner.tried
            if last.step_s < min(trial.step_s for trial in before):
                plan = replace(engine.plan, predicted_s=last.step_s, exposed_s=None)
            tried = ((len(engine.plan.order or ()), last.step_s),)
            plan = replace(plan, tried=barrier.tried, tried_forward=tried)
        if plan.order is None:
            self._deferral.finish()
            engine.may_defer = False
            engine.adopt(plan)
        else:
            engine.plan = plan
        _log.info("overlap='forward' after step %d:\n%s", self._batches, engine.plan)
        return True

    # What ``auto`` comes to under ``fit``: the first rank chooses, and all ranks follow.

    def _measured(self, engine: MergedGradientEngine) -> CommModel | None:
        """Measure all-reduces and plan; None where there was nothing to measure on any rank."""
        settings, method = engine.settings, self._method
        ready = self._recorded(engine)
        if ready is None:
            return None
        sizes, dense = engine.wire_bytes, settings.dense
        process_set = settings.reduction.process_set
        comm = measure_comm(int(sizes[dense].sum()), process_set, f"{settings.tag}.measure")
        if method is None:
            return comm

        def best(_: Sequence[Trial]) -> tuple[Plan, bool]:
            codec = settings.reduction.cost(settings.shapes.dtypes[dense[0]]).of_encoded()
            link, times = comm.compressed(codec), np.array(ready)
            return settings.shapes.best_plan(dense, times, sizes, link, method), True

        plan, _ = self._tuner(engine).next(best)
        engine.adopt(plan)
        _log.info("plan after step %d:\n%s", self._batches, plan)
        return comm

    def _choose(self, merged: Sequence[MergedGradientEngine]) -> None:
        sessions, engine = self._sessions, merged[0]
        assert isinstance(sessions.strategy, Auto)
        times = None if engine.times is None else engine.times.own()
        comm, *others = [self._measured(engine) for engine in merged]
        candidates, left_out = sessions.arguments.candidates(sessions.strategy)
        process_set, tag = sessions.arguments.process_set, f"{sessions.tag}.auto"
        log = _log.info if process_set.rank() == 0 else _log.debug
        for name, why in left_out.items():
            log("auto: %s is left out: %s", name, why)
        shapes, dense = engine.settings.shapes, engine.settings.dense
        local = [0.0] * (3 + len(shapes))
        if times is not None:
            local = [1.0, times.before_s, times.update_s, *times.ready_s]
        is_measured, before, update, *ready = largest(local, f"{tag}.own", process_set)
        if not is_measured or comm is None or others:
            why = "gradients come in several parts" if others else "no step could be measured"
            least = least_of(candidates)
            log("auto: %s: goes on with %s", why, spell(least))
            sessions.follow(least)
            return

        def find() -> str:
            # A sparse gradient travels by itself, in a size that the step decides, and not in the
            # plan; other methods than merged-gradient send it as a dense one.
            planned, whole = (
                profile_of(
                    OwnTimes(before, [ready[i] for i in indices], update),
                    [shapes.names[i] for i in indices],
                    [shapes.nbytes[i] for i in indices],
                )
                for indices in (dense, range(len(shapes)))
            )
            cost = engine.settings.reduction.cost(shapes.dtypes[dense[0]])
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
