"""Plan merged-gradient's buckets from the job's own times, between two steps.

The steps of a graph cannot change, so a plan means another graph: whoever drives the steps (the
callbacks, under ``model.fit``) asks after each, and has the step traced anew when told so::

    steps 0 .. SKIP-1             default buckets; nothing is recorded
    SKIP .. SKIP+RECORD-1         traced anew, the same buckets; times are recorded
    then                          all-reduces are measured, rank 0 plans, all take the plan; under
                                  ``auto``, it chooses and all follow;
                                  traced anew for the last time

All ranks count the same steps, so they measure and trace at the same moment.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from horovod.tensorflow import mpi_ops

from hvd_pipe.planning.choice import OwnTimes, choose, least_of, predict, profile_of, report
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.methods import spell
from hvd_pipe.planning.plan import Plan
from hvd_pipe.runtime.bucket_planner import RECORD_STEPS, SKIP_STEPS, measured_method
from hvd_pipe.runtime.consensus import answer_with
from hvd_pipe.strategy import Auto, MergedGradient, parse
from hvd_pipe.tensorflow.agree import check_alike, found_by_first, largest
from hvd_pipe.tensorflow.measuring.ready_times import JobTimes, ReadyTimes, measure_comm
from hvd_pipe.tensorflow.sessions import Sessions
from hvd_pipe.tensorflow.strategies.merged_gradient import MergedGradientEngine

__all__ = ["Replan"]

_log = logging.getLogger("hvd_pipe")

Measured = tuple[MergedGradientEngine, JobTimes | None, CommModel | None]


class Replan:
    """Watches the steps of one optimizer.

    Args:
        sessions: Its sessions.
        passes: Batches that make one step.
    """

    def __init__(self, sessions: Sessions, passes: int = 1) -> None:
        self._sessions, self._batches, self._passes = sessions, 0, passes
        strategy, arguments = sessions.strategy, sessions.arguments
        steps, is_auto = RECORD_STEPS, isinstance(strategy, Auto)
        self._method: str | None = None
        """How plans are made; None where the plan is fixed."""
        if isinstance(strategy, Auto):
            steps, strategy = strategy.steps, MergedGradient()
        if isinstance(strategy, MergedGradient) and strategy.bucket_bytes is None:
            self._method = measured_method(strategy, arguments.groups)
        self._fit: object = None
        self._last = SKIP_STEPS + steps * passes
        self._open = (is_auto or self._method is not None) and not arguments.reduction().alone

    @classmethod
    def of(cls, sessions: Sessions, passes: int = 1) -> Replan:
        """Return what watches these sessions; one for all calls of ``fit``."""
        if sessions.watcher is None:
            sessions.watcher = cls(sessions, passes)
        watcher: Replan = sessions.watcher
        return watcher

    def takes(self, fit: object) -> bool:
        """Return whether nobody drives the steps of this call of ``fit`` yet.

        Args:
            fit: The parameters that all callbacks of one call share.
        """
        before, self._fit = self._fit, fit
        return before is not fit

    def begin(self) -> bool:
        """Note that training goes on; return whether the step must be traced anew.

        Raises:
            RanksDisagreeError: Some ranks have loaded a choice of ``auto`` that others have not.
        """
        sessions = self._sessions
        process_set = sessions.arguments.process_set
        answer_with(mpi_ops)
        if isinstance(sessions.strategy, Auto) and process_set.included():
            chosen = "nothing yet" if sessions.chosen is None else spell(sessions.chosen)
            check_alike([("what auto has chosen", chosen)], f"{sessions.tag}.resumed", process_set)
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
        self._open = False
        answer_with(mpi_ops)  # another framework may have been imported since the first step
        recorded = [(engine, engine.times) for engine in merged]
        measured = [self._finish(engine) for engine in merged]
        if self._chooses:
            _choose_method(
                self._sessions,
                [
                    (engine, times if isinstance(times, JobTimes) else None, comm)
                    for (engine, times), comm in zip(recorded, measured, strict=True)
                ],
            )
        self._sessions.is_stale = False
        return True

    @property
    def _chooses(self) -> bool:
        return isinstance(self._sessions.strategy, Auto) and self._sessions.chosen is None

    def _stale(self) -> bool:
        stale, self._sessions.is_stale = self._sessions.is_stale, False
        return stale

    def _finish(self, engine: MergedGradientEngine) -> CommModel | None:
        """Measure all-reduces and plan; None where there was nothing to measure on any rank."""
        times, engine.times = engine.times, None
        settings, dense = engine.settings, engine.settings.dense
        process_set, reduction = settings.reduction.process_set, settings.reduction
        mine = [0.0] * (1 + len(settings.shapes))
        if times is not None and times.steps:
            mine = [1.0, *times.seconds()]
        # A bucket leaves when the slowest rank has filled it, so that rank's times count.
        measured, *slowest = largest(mine, f"{settings.tag}.ready", process_set)
        if not measured or not dense:
            return None
        ready = np.array(slowest)
        sizes = np.array(
            [
                settings.shapes.nbytes[index] * reduction.ratio(settings.shapes.dtypes[index])
                for index in range(len(settings.shapes))
            ]
        )
        comm = measure_comm(int(sizes[dense].sum()), process_set, f"{settings.tag}.measure")
        if self._method is None:
            return comm
        method = self._method

        def find() -> str:
            codec = reduction.cost(settings.shapes.dtypes[dense[0]]).of_encoded()
            plan = settings.shapes.best_plan(dense, ready, sizes, comm.compressed(codec), method)
            return plan.to_json()

        plan = Plan.from_json(found_by_first(find, f"{settings.tag}.plan", process_set))
        engine.adopt(plan)
        _log.info("plan after step %d:\n%s", self._batches, plan)
        return comm


def _choose_method(sessions: Sessions, measured: Sequence[Measured]) -> None:
    """Let the first rank choose, and all sessions of all ranks follow.

    Args:
        sessions: Of one optimizer, under ``auto``.
        measured: For each: its engine, its times, and what an all-reduce costs; all ranks have
            None for that where no rank could measure.
    """
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
