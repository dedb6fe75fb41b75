"""Choose the method for ``strategy="auto"``.

It measures while it trains synchronously, then goes on with the fastest method::

    first steps      merged-gradient with default buckets; it records when gradients are ready,
                     and `JobTimes` what a worker's own work takes
    the step after   all-reduces are measured; rank 0 predicts every method, all ranks follow it
    from then on     merged-gradient as it is, or an engine of the chosen method in its place
    some steps later one line says what was reached

All of it happens at the end of ``step()``, where a synchronous method has nothing in flight, and
at the step at which merged-gradient plans, which is the same on all ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from statistics import median

import torch

from hvd_pipe.planning.choice import (
    OwnTimes,
    choose,
    least_of,
    milliseconds,
    predict,
    profile_of,
    report,
)
from hvd_pipe.planning.methods import spell
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, Method, parse
from hvd_pipe.torch.agree import found_by_first, largest
from hvd_pipe.torch.arguments import Checked
from hvd_pipe.torch.checkpoint import SavedState
from hvd_pipe.torch.measuring.step_times import JobTimes
from hvd_pipe.torch.strategies.base import Engine
from hvd_pipe.torch.strategies.make_engine import switch
from hvd_pipe.torch.strategies.merged_gradient import MergedGradientEngine

__all__ = ["AutoChoice"]

SETTLE_STEPS = 3
REPORT_STEPS = 20

_log = logging.getLogger("hvd_pipe")


class AutoChoice:
    """Watches the steps of one optimizer, and changes its engine once.

    Args:
        checked: The arguments, with `Auto` for the strategy.
        optimizer: The distributed optimizer; not kept.
        engine: Its engine, the one that measures.
    """

    def __init__(self, checked: Checked, optimizer: torch.optim.Optimizer, engine: Engine) -> None:
        self._candidates = checked.candidates
        self._watch: Callable[[Sequence[torch.Tensor]], JobTimes] = _watcher(optimizer)
        self._times: JobTimes | None = None
        if not engine.reduction.alone:
            self._times = self._watch(engine.settings.parameters)
        self._reached: _Reached | None = None
        self.chosen: Method | None = None
        process_set = checked.settings.reduction.process_set
        self._speaks = bool(process_set.included() and process_set.rank() == 0)
        for name, why in checked.left_out.items():
            self._say("auto: %s is left out: %s", name, why)

    def after_step(self, engine: Engine) -> Engine:
        """Return the engine of the next step, at the end of ``step()``."""
        if self._reached is not None and self._reached.end_step():
            self._say("auto: %s", self._reached)
            self._reached = None
        if self._times is None or not isinstance(engine, MergedGradientEngine):
            return engine
        if engine.comm is None:
            if self._times.count != len(engine.settings.parameters):  # some have joined
                self._times.close()
                self._times = self._watch(engine.settings.parameters)
            self._times.end_step()
            return engine
        own, self._times = self._times.close(), None
        self.chosen, predicted = self._choice(engine, own)
        self._reached = _Reached(self.chosen, predicted) if predicted else None
        return engine if isinstance(self.chosen, MergedGradient) else switch(engine, self.chosen)

    def close(self) -> None:
        """Watch no more steps."""
        if self._times is not None:
            self._times.close()
        self._times = self._reached = None

    def resume(self, engine: Engine, saved: SavedState | None) -> tuple[Engine, SavedState | None]:
        """Return the engine of the choice that a checkpoint holds, and the checkpoint.

        A plan without a choice is not taken: this run is to measure and to choose.
        """
        if saved is None or saved.foreign is not None:
            return engine, saved  # `checkpoint.load` says what is lost
        text = saved.chosen
        if text is not None and saved.workers != engine.reduction.workers:
            self._say("auto: %s was chosen for %d workers: measures again", text, saved.workers)
            text = None
        method = None if text is None else parse(text)
        if method is None or method.name not in [each.name for each in self._candidates]:
            if self.chosen is None:
                counters = {k: v for k, v in saved.counters.items() if k != "plan"}
                saved = dataclasses.replace(saved, counters=counters)
            return engine, saved
        assert not isinstance(method, Auto)
        self.close()
        before, self.chosen = self.chosen or MergedGradient(), method
        self._say("auto: goes on with %s, as chosen before", text)
        return (engine if method == before else switch(engine, method)), saved

    def note(self, saved: SavedState) -> SavedState:
        """Return a checkpoint with the choice."""
        if self.chosen is None:
            return saved
        return dataclasses.replace(saved, chosen=spell(self.chosen))

    def _choice(self, engine: MergedGradientEngine, own: OwnTimes | None) -> tuple[Method, float]:
        """Let the first rank choose from the slowest rank's times; the same answer everywhere."""
        settings = engine.settings
        tag, process_set = settings.tag, settings.reduction.process_set
        mine = [0.0] * (3 + len(settings.parameters))
        if own is not None:
            mine = [1.0, own.before_s, own.update_s, *own.ready_s]
        measured, before, update, *ready = largest(mine, f"{tag}.own", process_set)
        if not measured:  # no step of any rank had an update: each overflowed, for example
            least = least_of(self._candidates)
            self._say("auto: no step could be measured: goes on with %s", spell(least))
            return least, 0.0
        own = OwnTimes(before, ready, update)
        text, seconds = found_by_first(
            lambda: self._best(engine, own), f"{tag}.choice", process_set
        )
        method = parse(text)
        assert not isinstance(method, Auto)
        return method, float(seconds)

    def _best(self, engine: MergedGradientEngine, own: OwnTimes) -> tuple[str, float]:
        """Predict every method and return the best one, spelled, and the seconds of its step."""
        settings = engine.settings
        assert engine.comm is not None
        assert engine.plan is not None
        # A sparse gradient travels by itself, in a size that the step decides.
        sizes = [
            1 if index in settings.sparse else max(1, nbytes)
            for index, nbytes in enumerate(settings.index.nbytes)
        ]
        profile = profile_of(own, settings.names, sizes)
        found = [
            predict(
                MergedGradient(plan=engine.plan)
                if isinstance(candidate, MergedGradient)
                else candidate,
                profile,
                engine.comm,
                settings.reduction.cost(settings.parameters[0]),
            )
            for candidate in self._candidates
        ]
        best = choose(found)
        self._say("auto: %s", report(best, found))
        return spell(best.method), best.seconds

    def _say(self, text: str, *values: object) -> None:
        if self._speaks:
            _log.info(text, *values)


class _Reached:
    """Times some steps of the chosen method."""

    def __init__(self, method: Method, predicted: float) -> None:
        self._method, self._predicted = method, predicted
        self._ends: list[float] = []
        self._round = method.period if isinstance(method, CoCoD) else 1

    def end_step(self) -> bool:
        """Note the end of a step; return whether there are enough."""
        self._ends.append(time.perf_counter())
        return len(self._ends) > SETTLE_STEPS + max(REPORT_STEPS, 2 * self._round)

    def __str__(self) -> str:
        """Medians over whole rounds; an evaluation or a checkpoint in between does not count."""
        ends, k = self._ends[SETTLE_STEPS:], self._round
        steps = [(end - start) / k for start, end in zip(ends, ends[k:], strict=False)]
        return (
            f"{spell(self._method)} reached {milliseconds(median(steps))} a step "
            f"(predicted {milliseconds(self._predicted)})"
        )


def _watcher(optimizer: torch.optim.Optimizer) -> Callable[[Sequence[torch.Tensor]], JobTimes]:
    reference = weakref.ref(optimizer)

    def watch(parameters: Sequence[torch.Tensor]) -> JobTimes:
        owner = reference()
        assert owner is not None
        return JobTimes(owner, parameters)

    return watch
