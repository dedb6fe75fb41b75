"""What ``auto`` comes to under ``fit``: the first rank chooses, and all ranks follow."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hvd_pipe.planning.choice import OwnTimes, choose, least_of, predict, profile_of, report
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.methods import spell
from hvd_pipe.strategy import Auto, MergedGradient, parse
from hvd_pipe.tensorflow.agree import found_by_first, largest
from hvd_pipe.tensorflow.measuring.ready_times import JobTimes
from hvd_pipe.tensorflow.sessions import Sessions
from hvd_pipe.tensorflow.strategies.merged_gradient import MergedGradientEngine

__all__ = ["Measured", "choose_method"]

_log = logging.getLogger("hvd_pipe")

Measured = tuple[MergedGradientEngine, JobTimes | None, CommModel | None]


def choose_method(sessions: Sessions, measured: Sequence[Measured]) -> None:
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
