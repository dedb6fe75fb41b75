"""Times of an optimizer's steps: when gradients are ready, and a worker's own work.

The optimizer knows no layers. `JobTimes` divides a worker's part of a step at these moments::

    end of the last step | first gradient | ... last gradient | (waits) | update | end of the step
    ------ before_s -----|---------- ready_s -----------------|         |update_s|

Forward, and what the script does between its steps (data, ``zero_grad()``), are one number. Waits
for averages lie between the last gradient and the update, or after it, and are left out. A process
that is alone waits for nobody: there, what lies before the update (clipping) belongs to it.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from hvd_pipe.measuring.clock import Moment, Stopwatch
from hvd_pipe.planning.choice import OwnTimes, profile_of
from hvd_pipe.runtime.gradient_index import RECORD_STEPS, SKIP_STEPS

if TYPE_CHECKING:
    from horovod.torch.mpi_ops import ProcessSet

ENVIRONMENT_VARIABLE = "HVD_PIPE_PROFILE"

MOST_STEPS = 64
STEPS = SKIP_STEPS + RECORD_STEPS
_LEAST_STEPS, _LIMIT_S = SKIP_STEPS + 2, 45.0  # of slow steps, a profile has fewer

_log = logging.getLogger("hvd_pipe")


class ReadyTimes:
    """Moments at which gradients become ready; on CUDA, the host waits for them once a step."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.steps = count, 0
        """How many gradients there are, and backward passes closed so far."""
        self._stopwatch = Stopwatch(device)
        self._ready_s: list[list[float]] = []
        self._moments: list[Moment | None] = [None] * count

    def mark(self, index: int) -> None:
        """Note that the gradient at ``index`` is ready now."""
        self._moments[index] = self._stopwatch.now()

    def end_step(self) -> tuple[Moment, Moment] | None:
        """Close a pass; return the moments of its first gradient and of its end."""
        self.steps += 1
        present = [moment for moment in self._moments if moment is not None]
        if not present:
            return None
        end = self._stopwatch.now()
        Stopwatch.wait(end)
        first = min(present, key=lambda moment: Stopwatch.seconds(present[0], moment))
        moments = [end if moment is None else moment for moment in self._moments]
        self._ready_s.append([Stopwatch.seconds(first, moment) for moment in moments])
        self._moments = [None] * self.count
        return first, end

    def seconds(self) -> list[float]:
        """Return the median over steps of each gradient's ready time, from the first one's."""
        if not self._ready_s:
            return [0.0] * self.count
        medians: list[float] = np.median(np.array(self._ready_s), axis=0).tolist()
        return medians


class Uses(NamedTuple):
    """Seconds of some steps; lists are by the parameters' index."""

    needed_s: list[float]
    """After the end of a step, when each is needed: the earliest of all steps."""
    ready_s: list[float]
    """After the first gradient, when each gradient is ready."""
    forward_s: float
    """From the end of a step to the first gradient."""
    backward_s: float
    """From there to the next call of ``step()``."""


class FirstUses(ReadyTimes):
    """Notes also when each parameter is first used between the end of ``step()`` and the next."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(len(parameters), parameters[0].device)
        self._begun: Moment | None = None
        self._used: dict[int, Moment] = {}
        self._passes: list[tuple[float, float]] = []
        self._needed_s: list[list[float]] = []
        self._in_backward = False

    def begin(self) -> None:
        """Note that a step has ended."""
        self._in_backward = False
        self._used.clear()
        self._moments = [None] * self.count
        self._begun = self._stopwatch.now()

    def mark(self, index: int) -> None:
        self._in_backward = True
        super().mark(index)

    def use(self, indices: Iterable[int]) -> None:
        """Note that parameters are about to be used; the first time counts."""
        new = [index for index in indices if index not in self._used]
        if new and not self._in_backward:
            self._used.update(dict.fromkeys(new, self._stopwatch.now()))

    def end_step(self) -> tuple[Moment, Moment] | None:
        """Note that the next ``step()`` is called."""
        begun, self._begun = self._begun, None
        if begun is None or all(moment is None for moment in self._moments):
            return None
        ends = super().end_step()
        assert ends is not None
        forward_s = Stopwatch.seconds(begun, ends[0])
        needed = {index: Stopwatch.seconds(begun, moment) for index, moment in self._used.items()}
        self._needed_s.append([needed.get(index, forward_s) for index in range(self.count)])
        self._passes.append((forward_s, Stopwatch.seconds(*ends)))
        return ends

    def uses(self) -> Uses:
        """Return the earliest need of all steps, and the medians of the rest."""
        needed = [max(0.0, min(values)) for values in zip(*self._needed_s, strict=True)]
        forward_s, backward_s = (median(values) for values in zip(*self._passes, strict=True))
        return Uses(needed, self.seconds(), forward_s, backward_s)


class JobTimes:
    """Measures steps of an optimizer, beside whatever engine it has."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        *,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self.count = len(parameters)
        """How many parameters are watched."""
        self._stopwatch = Stopwatch(parameters[0].device)
        self._ready: list[Moment | None] = [None] * self.count
        self._previous: Moment | None = None
        self._begun: Moment | None = None
        self._updated: Moment | None = None
        self._steps: deque[tuple[Moment, list[Moment | None], Moment, Moment]] = deque(
            maxlen=MOST_STEPS
        )
        handles = ExitStack()
        handles.callback(optimizer.register_step_pre_hook(self._begin).remove)
        handles.callback(optimizer.register_step_post_hook(self._update).remove)
        # Parameters may outlive the optimizer, which alone keeps this.
        self._detach, times = weakref.finalize(self, handles.close), weakref.ref(self)
        for index, parameter in enumerate(parameters):
            listen = parameter.register_post_accumulate_grad_hook
            handle = listen(partial(_mark, times, index))  # type: ignore[no-untyped-call]
            handles.callback(handle.remove)

    @property
    def steps(self) -> int:
        """Whole steps that are kept, from gradients to an update: the last ones."""
        return len(self._steps)

    def end_step(self) -> None:
        """Note that ``optimizer.step()`` ends now."""
        end, previous = self._stopwatch.now(), self._previous
        ready = any(moment is not None for moment in self._ready)
        if (
            ready
            and previous is not None
            and self._begun is not None
            and self._updated is not None
        ):
            self._steps.append((previous, self._ready, self._begun, self._updated))
        self._ready = [None] * self.count
        self._previous, self._begun, self._updated = end, None, None

    def close(self) -> OwnTimes | None:
        """Take the hooks out and return medians, the first steps left out; None without steps."""
        self._detach()
        steps = list(self._steps)[min(SKIP_STEPS, len(self._steps) - 1) :] if self._steps else []
        if not steps:
            return None
        Stopwatch.wait(steps[-1][-1])
        rows = [self._seconds(*step) for step in steps]
        before, update, *ready = np.median(np.array(rows), axis=0).tolist()
        return OwnTimes(before, ready, update)

    def _seconds(
        self, previous: Moment, ready: Sequence[Moment | None], begun: Moment, updated: Moment
    ) -> list[float]:
        seconds = [None if s is None else Stopwatch.seconds(previous, s) for s in ready]
        present = [s for s in seconds if s is not None]
        first, last = min(present), max(present)
        since = [(last if s is None else s) - first for s in seconds]
        update = Stopwatch.seconds(previous, updated) - last
        if not self._alone:  # a closure computes the gradients within the step
            update = min(update, Stopwatch.seconds(begun, updated))
        return [first, update, *since]

    def mark(self, index: int) -> None:
        """Note that the gradient at ``index`` is ready now."""
        self._ready[index] = self._stopwatch.now()

    def _begin(self, *_: object) -> None:
        self._begun = self._stopwatch.now()

    def _update(self, *_: object) -> None:
        self._updated = self._stopwatch.now()


def _mark(times: weakref.ref[JobTimes], index: int, _: torch.Tensor) -> None:
    if (watching := times()) is not None:
        watching.mark(index)


@dataclass
class JobProfile:
    """Writes a profile of the running job to a JSON file, for ``HVD_PIPE_PROFILE``."""

    path: str
    times: JobTimes
    names: Sequence[str]
    sizes: Sequence[int]
    begun_s: float = field(default_factory=time.monotonic)

    def end_step(self) -> bool:
        """Note the end of a step; return whether more steps are wanted."""
        self.times.end_step()
        slow = time.monotonic() - self.begun_s > _LIMIT_S
        if self.times.steps < (_LEAST_STEPS if slow else STEPS):
            return True
        times = self.times.close()
        assert times is not None
        profile, path = profile_of(times, self.names, self.sizes), self.path
        try:
            profile.save(path)
        except OSError as error:  # training is worth more than its profile
            warnings.warn(f"{ENVIRONMENT_VARIABLE}={path}: {error}", stacklevel=3)
            return False
        text = "profile of %d parameters written to %s: %.3f ms of a worker's own work a step"
        _log.info(text, len(self.names), path, 1e3 * profile.compute_s)
        return False


_started = False


def is_profiling() -> bool:
    """Return whether one of hvd_pipe's optimizers writes the profile of this process."""
    return _started


def profile_job(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    process_set: ProcessSet,
) -> JobProfile | None:
    """Return what profiles the job: on the first rank, its first optimizer, if that is asked."""
    global _started  # noqa: PLW0603
    path = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if not path or _started or not process_set.included() or process_set.rank() != 0:
        return None
    _started = True
    if isinstance(optimizer, torch.optim.LBFGS):
        warnings.warn(
            f"{ENVIRONMENT_VARIABLE}={path}: no profile is written, as LBFGS computes gradients "
            "within its steps: profile the model with another optimizer.",
            stacklevel=4,
        )
        return None
    times = JobTimes(optimizer, parameters, alone=process_set.size() == 1)
    sizes = [p.numel() * p.element_size() for p in parameters]
    return JobProfile(path, times, names, sizes)
