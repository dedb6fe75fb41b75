"""Choose the method for ``strategy="auto"``.

It measures while it trains synchronously, then goes on with the fastest method::

    first steps      merged-gradient with default buckets; it records when gradients are ready,
                     and `JobTimes` what a worker's own work takes
    the step after   all-reduces are measured; rank 0 predicts every method, all ranks follow it
    from then on     merged-gradient as it is, or an engine of the chosen method in its place;
                     for overlap=forward, `OverlapStart` takes over
    some steps later one line says what was reached; where pipe-sgd tries plans, after that

All of it happens at the end of ``step()``, where a synchronous method has nothing in flight, and
at the step at which merged-gradient plans, which is the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Sequence
from statistics import median

import torch

from hvd_pipe.measuring.step_times import JobTimes
from hvd_pipe.planning.choice import (
    OwnTimes,
    choose,
    kind_of,
    least_of,
    milliseconds,
    predict,
    profile_of,
    report,
)
from hvd_pipe.planning.methods import spell
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, Method, PipeSGD, parse
from hvd_pipe.torch.agree import found_by_first, largest
from hvd_pipe.torch.arguments import Checked
from hvd_pipe.torch.checkpoint import SavedState
from hvd_pipe.torch.overlap_start import OverlapStart, refusal, start_of
from hvd_pipe.torch.strategies.base import Engine
from hvd_pipe.torch.strategies.make_engine import switch
from hvd_pipe.torch.strategies.merged_gradient import MergedGradientEngine
from hvd_pipe.torch.strategies.pending_parameters import memory_of

SETTLE_STEPS = 3
REPORT_STEPS = 20

_log = logging.getLogger("hvd_pipe")


class AutoChoice:
    """Watches the steps of one optimizer, and changes its engine, which measures, once."""

    tries = True
    """Whether a state that is loaded may change what ranks do alike."""

    def __init__(self, checked: Checked, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        self._candidates, self._optimizer = checked.candidates, weakref.ref(optimizer)
        self._times = None if engine.reduction.alone else self._watch(engine)
        self._predicted_s = 0.0
        """Predicted seconds of a step of the choice, until the times reached are logged."""
        self._step_ends: list[float] = []
        self._overlap: OverlapStart | None = None
        """What tunes overlap=forward, where that was chosen."""
        self._has_groups = checked.settings.groups is not None
        self._memory = memory_of(checked.settings.parameters)
        self.chosen: Method | None = None
        self._is_first_rank = _is_first_rank(checked)

    def after_step(self, engine: Engine) -> Engine:
        """Return the engine of the next step, at the end of ``step()``."""
        settled = not engine.measures and (self._overlap is None or self._overlap.is_over)
        if self.chosen is not None and self._predicted_s and settled:
            self._end_step(self.chosen)
        if self._times is not None and isinstance(engine, MergedGradientEngine):
            engine = self._measure(engine, self._times)
        # It begins in the step of the choice, which all ranks make together.
        return engine if self._overlap is None else self._overlap.after_step(engine)

    def _watch(self, engine: Engine) -> JobTimes:
        optimizer = self._optimizer()
        assert optimizer is not None
        return JobTimes(optimizer, engine.settings.parameters)

    def _measure(self, engine: MergedGradientEngine, times: JobTimes) -> Engine:
        """Record the end of a step, or choose after the last one to measure."""
        if engine.comm is None:
            if times.count != len(engine.settings.parameters):  # some have joined
                times.close()
                self._times = times = self._watch(engine)
            times.end_step()
            return engine
        self._times = None
        self.chosen, self._predicted_s = self._choice(engine, times.close())
        self._overlap = self._overlap_start(self.chosen)
        return engine if isinstance(self.chosen, MergedGradient) else switch(engine, self.chosen)

    def _end_step(self, chosen: Method) -> None:
        """Record the end of a step; at last log the median step time over whole rounds."""
        self._step_ends.append(time.perf_counter())
        k = chosen.period if isinstance(chosen, CoCoD) else 1
        if len(self._step_ends) <= SETTLE_STEPS + max(REPORT_STEPS, 2 * k):
            return
        ends = self._step_ends[SETTLE_STEPS:]
        seconds = median((end - start) / k for start, end in zip(ends, ends[k:], strict=False))
        reached, predicted = milliseconds(seconds), milliseconds(self._predicted_s)
        self._say("auto: %s reached %s a step (predicted %s)", spell(chosen), reached, predicted)
        self._predicted_s = 0.0

    def close(self) -> None:
        """Watch no more steps."""
        if self._times is not None:
            self._times.close()
        if self._overlap is not None:
            self._overlap.close()
        self._times, self._predicted_s = None, 0.0

    def resume(self, engine: Engine, saved: SavedState | None) -> tuple[Engine, SavedState | None]:
        """Return the engine of the choice that a checkpoint holds, and the checkpoint."""
        if saved is not None and saved.foreign is None:  # else `checkpoint.load` says what is lost
            engine, saved = self._follow(engine, saved)
        return (engine, saved) if self._overlap is None else self._overlap.resume(engine, saved)

    def _follow(self, engine: Engine, saved: SavedState) -> tuple[Engine, SavedState]:
        """Go on with a checkpoint's choice, if it is allowed and was made for as many workers."""
        text = saved.chosen
        if text is not None and saved.workers != engine.reduction.workers:
            self._say("auto: %s was chosen for %d workers: measures again", text, saved.workers)
            text = None
        method = None if text is None else parse(text)
        assert not isinstance(method, Auto)
        if method is None or kind_of(method) not in map(kind_of, self._candidates):
            if self.chosen is None:
                counters = {k: v for k, v in saved.counters.items() if k != "plan"}
                saved = dataclasses.replace(saved, counters=counters)
            return engine, saved
        self.close()
        before, self.chosen = self.chosen or MergedGradient(), method
        self._say("auto: goes on with %s, as chosen before", text)
        if method != before:
            engine, self._overlap = switch(engine, method), self._overlap_start(method)
        return engine, saved

    def _overlap_start(self, method: Method) -> OverlapStart | None:
        return OverlapStart(self._memory, self._has_groups) if _is_forward(method) else None

    def _choice(
        self, engine: MergedGradientEngine, local: OwnTimes | None
    ) -> tuple[Method, float]:
        """Let the first rank choose from the slowest rank's times; the same answer everywhere."""
        settings = engine.settings
        tag, process_set = settings.tag, settings.reduction.process_set
        local_times = [0.0] * (3 + len(settings.parameters))
        if local is not None:
            local_times = [1.0, local.before_s, local.update_s, *local.ready_s]
        local_times = [float(self._allowed(engine) != self._candidates), *local_times]
        unfit, measured, before, update, *ready = largest(local_times, f"{tag}.own", process_set)
        candidates = _without_forward(self._candidates) if unfit else self._candidates
        if not measured:  # no step of any rank had an update: each overflowed, for example
            least = least_of(candidates)
            self._say("auto: no step could be measured: goes on with %s", spell(least))
            return least, 0.0
        slowest = OwnTimes(before, ready, update)
        text, seconds = found_by_first(
            lambda: self._best(engine, slowest, candidates), f"{tag}.choice", process_set
        )
        method = parse(text)
        assert not isinstance(method, Auto)
        return method, float(seconds)

    def _best(
        self, engine: MergedGradientEngine, times: OwnTimes, candidates: Sequence[Method]
    ) -> tuple[str, float]:
        """Predict every method and return the best one, spelled, and the seconds of its step."""
        settings = engine.settings
        assert engine.comm is not None
        assert engine.plan is not None
        # A sparse gradient travels by itself, in a size that the step decides.
        sizes = [
            1 if index in settings.sparse else max(1, nbytes)
            for index, nbytes in enumerate(settings.index.nbytes)
        ]
        profile = profile_of(times, settings.names, sizes)
        cost = settings.reduction.cost(settings.parameters[0])
        predictions = []
        for method in candidates:
            planned = method
            if isinstance(method, MergedGradient) and (
                self._has_groups or not _is_forward(method)
            ):
                planned = dataclasses.replace(method, plan=engine.plan)
            prediction = predict(planned, profile, engine.comm, cost)
            if isinstance(prediction.method, PipeSGD):  # it tries sizes of buckets in training
                raced = dataclasses.replace(prediction.method, bucket_bytes=None)
                prediction = dataclasses.replace(prediction, method=raced)
            predictions.append(prediction)
        best = choose(predictions)
        self._say("auto: %s", report(best, predictions))
        return spell(best.method), best.seconds

    def _allowed(self, engine: MergedGradientEngine) -> Sequence[Method]:
        """Return the candidates, without overlap=forward where this rank cannot defer updates."""
        others = _without_forward(self._candidates)
        obstacle = refusal(engine) if 0 < len(others) < len(self._candidates) else None
        if obstacle is None:
            return self._candidates
        _log.info("auto: merged-gradient:overlap=forward is left out: %s", obstacle)
        return others

    def _say(self, text: str, *values: object) -> None:
        if self._is_first_rank:
            _log.info(text, *values)


def chooser_of(
    checked: Checked, optimizer: torch.optim.Optimizer, engine: Engine
) -> AutoChoice | OverlapStart | None:
    """Return what may change the engine after some steps, if anything may."""
    if isinstance(checked.strategy, Auto):
        return AutoChoice(checked, optimizer, engine)
    return start_of(checked)


def _is_forward(method: Method) -> bool:
    return kind_of(method) == spell(MergedGradient(overlap="forward"))


def _without_forward(methods: Sequence[Method]) -> Sequence[Method]:
    return tuple(method for method in methods if not _is_forward(method))


def _is_first_rank(checked: Checked) -> bool:
    """Return whether this is the first rank, which logs what `Auto` does."""
    process_set = checked.settings.reduction.process_set
    return bool(process_set.included() and process_set.rank() == 0)


def say_left_out(checked: Checked) -> None:
    """Log the methods that `Auto` may choose from, and that the other arguments rule out."""
    for name, why in checked.left_out.items():
        if _is_first_rank(checked):
            _log.info("auto: %s is left out: %s", name, why)
