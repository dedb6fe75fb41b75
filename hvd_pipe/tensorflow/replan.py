"""Plan merged-gradient's buckets from the job's own times, between two steps.

The steps of a graph cannot change, so a plan means another graph: whoever drives the steps (the
callbacks, under ``model.fit``) asks after each, and has the step traced anew when told so::

    steps 0 .. SKIP-1             default buckets; nothing is recorded
    SKIP .. SKIP+RECORD-1         traced anew, the same buckets; ready times are recorded
    then                          all-reduces are measured, rank 0 plans, all take the plan;
                                  traced anew for the last time

All ranks count the same steps, so they measure and trace at the same moment.
"""

from __future__ import annotations

import logging

import numpy as np

from hvd_pipe.planning.codec import CODECS, CodecCost
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.kinds import plan_kinds
from hvd_pipe.planning.plan import Plan
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.tensorflow.agree import found_by_first, largest
from hvd_pipe.tensorflow.compression import Int8
from hvd_pipe.tensorflow.merged_gradient import MergedGradientEngine
from hvd_pipe.tensorflow.profiler import ReadyTimes, measure_comm
from hvd_pipe.tensorflow.reduction import Reduction
from hvd_pipe.tensorflow.session import Sessions

__all__ = ["Replan"]

SKIP_STEPS = 3
RECORD_STEPS = 10

_log = logging.getLogger("hvd_pipe")


class Replan:
    """Watches the steps of one optimizer.

    Args:
        sessions: Its sessions.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions, self._steps = sessions, 0
        strategy, arguments = sessions.strategy, sessions.arguments
        self._open, self._method = False, "exact"
        if isinstance(strategy, MergedGradient) and strategy.bucket_bytes is None:
            planned = strategy.plan in ("auto", "greedy") and arguments.groups is None
            self._open = planned and not arguments.reduction().alone
            self._method = "greedy" if strategy.plan == "greedy" else "exact"

    def after_step(self) -> bool:
        """Note that a step has ended; return whether it must be traced anew."""
        if not self._open:
            return False
        self._steps += 1
        engines = [each.engine for each in self._sessions]
        merged = [each for each in engines if isinstance(each, MergedGradientEngine)]
        if self._steps == SKIP_STEPS:
            for engine in merged:
                engine.times = ReadyTimes(len(engine.settings.shapes))
            return True
        if self._steps <= SKIP_STEPS:
            return False
        for engine in merged:
            if engine.times is not None:
                engine.times.end_step()
        if self._steps < SKIP_STEPS + RECORD_STEPS:
            return False
        self._open = False
        for engine in merged:
            self._plan(engine)
        return True

    def _plan(self, engine: MergedGradientEngine) -> None:
        times, engine.times = engine.times, None
        settings, dense = engine.settings, engine.settings.dense
        process_set, reduction = settings.reduction.process_set, settings.reduction
        if times is None or not times.steps or not dense:
            return
        # A bucket leaves when the slowest rank has filled it, so that rank's times count.
        ready = np.array(largest(times.seconds(), f"{settings.tag}.ready", process_set))
        sizes = np.array(
            [
                settings.shapes.nbytes(place) * reduction.ratio(settings.shapes.dtypes[place])
                for place in range(len(settings.shapes))
            ]
        )
        comm = measure_comm(int(sizes[dense].sum()), process_set, f"{settings.tag}.measure")

        def find() -> str:
            order = sorted(dense, key=lambda place: (float(ready[place]), -place))
            kind_of = {
                place: kind
                for kind, same in enumerate(settings.shapes.kinds(dense))
                for place in same
            }
            plan = plan_kinds(
                [settings.shapes.names[place] for place in order],
                ready[order],
                sizes[order],
                [kind_of[place] for place in order],
                _with_codec(comm, reduction, engine),
                method=self._method,
            )
            return plan.to_json()

        plan = Plan.from_json(found_by_first(find, f"{settings.tag}.plan", process_set))
        engine.adopt(plan)
        _log.info("plan after step %d:\n%s", self._steps, plan)


def _with_codec(comm: CommModel, reduction: Reduction, engine: MergedGradientEngine) -> CommModel:
    """Return the times of messages whose sizes are those after compression."""
    if reduction.codec is None:
        cost = CodecCost("wire", reduction.ratio(engine.settings.shapes.dtypes[0]))
    else:
        cost = CODECS["int8" if isinstance(reduction.codec, Int8) else "bf16"]
    return comm.compressed(cost.of_encoded())
