"""Times of a distributed optimizer's steps: when gradients are ready, and a worker's own work.

The optimizer knows no layers. `JobTimes` divides a worker's part of a step at these moments::

    end of the last step | first gradient | ... last gradient | (waits) | update | end of the step
    ------ before_s -----|---------- ready_s -----------------|         |update_s|

Forward, and what the script does between its steps (data, ``zero_grad()``), are one number. Waits
for averages lie between the last gradient and the update, or after it, and are left out.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from horovod.torch.mpi_ops import ProcessSet
from torch.utils.hooks import RemovableHandle

from hvd_pipe.planning.choice import OwnTimes, profile_of
from hvd_pipe.runtime.bucket_planner import RECORD_STEPS, SKIP_STEPS
from hvd_pipe.torch.measuring.clock import Moment, Stopwatch

ENVIRONMENT_VARIABLE = "HVD_PIPE_PROFILE"

MOST_STEPS = 64

_log = logging.getLogger("hvd_pipe")


class ReadyTimes:
    """Moments at which gradients become ready, over some steps.

    On a CUDA device the host waits for them once a recorded step.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._stopwatch = Stopwatch(device)
        self._seconds_by_step: list[list[float]] = []
        self._moments: list[Moment | None] = [None] * count
        self.steps = 0
        """Backward passes closed so far, the same on all ranks."""

    def mark(self, index: int) -> None:
        """Note that the gradient at ``index`` is ready now."""
        self._moments[index] = self._stopwatch.now()

    def end_step(self) -> None:
        """Close one backward pass; a gradient that was not computed counts as ready now."""
        self.steps += 1
        if all(moment is None for moment in self._moments):
            return
        end = self._stopwatch.now()
        Stopwatch.wait(end)
        moments = [end if moment is None else moment for moment in self._moments]
        seconds = [Stopwatch.seconds(moments[0], moment) for moment in moments]
        first = min(seconds)
        self._seconds_by_step.append([second - first for second in seconds])
        self._moments = [None] * len(moments)

    def seconds(self) -> list[float]:
        """Return the median over steps of each gradient's ready time, from the first one's."""
        if not self._seconds_by_step:
            return [0.0] * len(self._moments)
        medians: list[float] = np.median(np.array(self._seconds_by_step), axis=0).tolist()
        return medians


class JobTimes:
    """Measures steps of a distributed optimizer, beside whatever engine it has.

    Args:
        optimizer: Whose updates are timed.
        parameters: Whose gradients; by index.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
    ) -> None:
        self._stopwatch = Stopwatch(parameters[0].device)
        self._ready: list[Moment | None] = [None] * len(parameters)
        self._previous: Moment | None = None
        self._begun: Moment | None = None
        self._updated: Moment | None = None
        self._steps: deque[tuple[Moment, list[Moment | None], Moment, Moment]] = deque(
            maxlen=MOST_STEPS
        )
        handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(lambda *_: self._begin()),
            optimizer.register_step_post_hook(lambda *_: self._update()),
        ]
        # Parameters may outlive the optimizer, which alone keeps this.
        self._detach = weakref.finalize(self, _remove, handles)
        times = weakref.ref(self)
        for index, parameter in enumerate(parameters):
            hook = _hook(times, index)
            handles.append(
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            )

    @property
    def count(self) -> int:
        """How many parameters are watched."""
        return len(self._ready)

    @property
    def steps(self) -> int:
        """Whole steps that are kept, from gradients to an update: the last ones."""
        return len(self._steps)

    def end_step(self) -> None:
        """Note that ``optimizer.step()`` ends now."""
        end = self._stopwatch.now()
        if None not in (self._previous, self._begun, self._updated) and any(
            moment is not None for moment in self._ready
        ):
            self._steps.append((self._previous, self._ready, self._begun, self._updated))  # type: ignore[arg-type]
        self._ready = [None] * len(self._ready)
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

    @staticmethod
    def _seconds(
        previous: Moment, ready: Sequence[Moment | None], begun: Moment, updated: Moment
    ) -> list[float]:
        seconds = [None if each is None else Stopwatch.seconds(previous, each) for each in ready]
        present = [each for each in seconds if each is not None]
        first, last = min(present), max(present)
        since = [(last if each is None else each) - first for each in seconds]
        return [first, Stopwatch.seconds(begun, updated), *since]

    def mark(self, index: int) -> None:
        """Note that the gradient at ``index`` is ready now."""
        self._ready[index] = self._stopwatch.now()

    def _begin(self) -> None:
        self._begun = self._stopwatch.now()

    def _update(self) -> None:
        self._updated = self._stopwatch.now()


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _hook(times: weakref.ref[JobTimes], index: int) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        watching = times()
        if watching is not None:
            watching.mark(index)

    return hook


class JobProfile:
    """Writes a profile of the running job to a file, for ``HVD_PIPE_PROFILE``.

    Args:
        path: Of the JSON file.
        times: Of the optimizer.
        names: The parameters' names, by index.
        sizes: Bytes of each gradient, by index.
    """

    def __init__(
        self, path: str, times: JobTimes, names: Sequence[str], sizes: Sequence[int]
    ) -> None:
        self._path, self._times, self._names, self._sizes = path, times, names, sizes

    def end_step(self) -> bool:
        """Note the end of a step; return whether more steps are wanted."""
        self._times.end_step()
        if self._times.steps < SKIP_STEPS + RECORD_STEPS:
            return True
        own = self._times.close()
        assert own is not None
        profile = profile_of(own, self._names, self._sizes)
        try:
            profile.save(self._path)
        except OSError as error:  # training is worth more than its profile
            warnings.warn(f"{ENVIRONMENT_VARIABLE}={self._path}: {error}", stacklevel=3)
            return False
        _log.info(
            "profile of %d parameters written to %s: %.3f ms of a worker's own work a step",
            len(self._names),
            self._path,
            1e3 * profile.compute_s,
        )
        return False


_started = False


def profile_job(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    process_set: ProcessSet,
) -> JobProfile | None:
    """Return what profiles the job, if ``HVD_PIPE_PROFILE`` asks for that on this rank.

    The first rank profiles the first optimizer that it makes.
    """
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
    times = JobTimes(optimizer, parameters)
    sizes = [each.numel() * each.element_size() for each in parameters]
    return JobProfile(path, times, names, sizes)


# When a step first uses each parameter, and when it computes each gradient.
#
# ::
#
#     end of step()                                                first gradient
#     |---- forward_s ---------------------------------------------|--- backward_s ---> step()
#       a.weight   b.weight
#       needed_s of a.weight ...


@dataclass(frozen=True)
class Uses:
    """What was seen of some steps; lists are by the parameters' index.

    Args:
        needed_s: Seconds after the end of a step at which each is needed.
        ready_s: Seconds after the first gradient at which each gradient is ready.
        forward_s: Seconds from the end of a step to the first gradient.
        backward_s: Seconds from there to the next call of ``step()``.
    """

    needed_s: list[float]
    ready_s: list[float]
    forward_s: float
    backward_s: float


class FirstUses:
    """Notes steps, each from the end of one ``step()`` to the next call.

    Args:
        parameters: Whose uses; by index.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._count = len(parameters)
        self._stopwatch = Stopwatch(parameters[0].device)
        self._begun: Moment | None = None
        self._used: dict[int, Moment] = {}
        self._ready: dict[int, Moment] = {}
        self._steps: list[tuple[list[float], list[float], float, float]] = []

    @property
    def count(self) -> int:
        """How many parameters are watched."""
        return self._count

    @property
    def steps(self) -> int:
        """Steps with a backward pass that were seen."""
        return len(self._steps)

    def begin(self) -> None:
        """Note that a step has ended."""
        self._used.clear()
        self._ready.clear()
        self._begun = self._stopwatch.now()

    def use(self, indices: Iterable[int]) -> None:
        """Note that parameters are about to be used; the first time counts."""
        new = [index for index in indices if index not in self._used]
        if new and not self._ready:
            self._used.update(dict.fromkeys(new, self._stopwatch.now()))

    def mark(self, index: int) -> None:
        """Note a gradient."""
        self._ready[index] = self._stopwatch.now()

    def end_step(self) -> None:
        """Note that the next ``step()`` is called."""
        begun, self._begun = self._begun, None
        if begun is None or not self._ready:
            return
        now = self._stopwatch.now()
        Stopwatch.wait(now)
        first = min(self._ready.values(), key=lambda moment: Stopwatch.seconds(begun, moment))
        forward_s, backward_s = Stopwatch.seconds(begun, first), Stopwatch.seconds(first, now)
        every = range(self._count)
        needed = [_since(begun, self._used.get(i), forward_s) for i in every]
        ready = [_since(first, self._ready.get(i), backward_s) for i in every]
        self._steps.append((needed, ready, forward_s, backward_s))

    def uses(self) -> Uses:
        """Return the earliest need of all steps, and the medians of the rest."""
        needed, ready, forward_s, backward_s = zip(*self._steps, strict=True)
        return Uses(
            [min(each) for each in zip(*needed, strict=True)],
            [median(each) for each in zip(*ready, strict=True)],
            median(forward_s),
            median(backward_s),
        )


def _since(begun: Moment, moment: Moment | None, else_s: float) -> float:
    return else_s if moment is None else max(0.0, Stopwatch.seconds(begun, moment))
