"""Plan merged-gradient's buckets from the job's own times, between two steps.

The steps of a graph cannot change, so a plan means another graph: whoever drives the steps (the
callbacks, under ``model.fit``) asks after each, and has the step traced anew when told so::

    steps 0 .. SKIP-1             default buckets; nothing is recorded
    SKIP .. SKIP+RECORD-1         traced anew, the same buckets; times are recorded
    then                          all-reduces are measured, rank 0 plans, all take the plan; under
                                  ``auto``, it chooses (`auto`) and all follow;
                                  traced anew for the last time

All ranks count the same steps, so they measure and trace at the same moment.
"""

from __future__ import annotations

import logging

import numpy as np

from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.dtype_groups import plan_dtype_groups
from hvd_pipe.planning.methods import spell
from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import Auto, MergedGradient
from hvd_pipe.tensorflow.agree import check_alike, found_by_first, largest
from hvd_pipe.tensorflow.measuring.ready_times import JobTimes, ReadyTimes, measure_comm
from hvd_pipe.tensorflow.sessions import Sessions
from hvd_pipe.tensorflow.strategies.auto import choose_method
from hvd_pipe.tensorflow.strategies.merged_gradient import MergedGradientEngine

__all__ = ["Replan"]

SKIP_STEPS = 3
RECORD_STEPS = 10

_log = logging.getLogger("hvd_pipe")


class Replan:
    """Watches the steps of one optimizer.

    Args:
        sessions: Its sessions.
        passes: Batches that make one step.
    """

    def __init__(self, sessions: Sessions, passes: int = 1) -> None:
        self._sessions, self._batches, self._passes = sessions, 0, passes
        strategy, arguments = sessions.strategy, sessions.arguments
        steps, method = RECORD_STEPS, "exact"
        plans = arguments.groups is None
        if isinstance(strategy, Auto):
            steps, opens = strategy.steps, True
        else:
            plans &= isinstance(strategy, MergedGradient) and strategy.bucket_bytes is None
            if isinstance(strategy, MergedGradient):
                plans &= strategy.plan in ("auto", "greedy")
                method = "greedy" if strategy.plan == "greedy" else "exact"
            opens = plans
        self._fit: object = None
        self._last = SKIP_STEPS + steps * passes
        self._plans, self._method = plans, method
        self._open = opens and not arguments.reduction().alone

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
        recorded = [(engine, engine.times) for engine in merged]
        measured = [self._finish(engine) for engine in merged]
        if self._chooses:
            choose_method(
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
                settings.shapes.nbytes(place) * reduction.ratio(settings.shapes.dtypes[place])
                for place in range(len(settings.shapes))
            ]
        )
        comm = measure_comm(int(sizes[dense].sum()), process_set, f"{settings.tag}.measure")
        if not self._plans:
            return comm

        def find() -> str:
            order = sorted(dense, key=lambda place: (float(ready[place]), -place))
            kind_of = {
                place: kind
                for kind, same in enumerate(settings.shapes.kinds(dense))
                for place in same
            }
            cost = reduction.cost(settings.shapes.dtypes[dense[0]])
            plan = plan_dtype_groups(
                [settings.shapes.names[place] for place in order],
                ready[order],
                sizes[order],
                [kind_of[place] for place in order],
                comm.compressed(cost.of_encoded()),  # sizes are those after compression
                method=self._method,
            )
            return plan.to_json()

        plan = Plan.from_json(found_by_first(find, f"{settings.tag}.plan", process_set))
        engine.adopt(plan)
        _log.info("plan after step %d:\n%s", self._batches, plan)
        return comm
