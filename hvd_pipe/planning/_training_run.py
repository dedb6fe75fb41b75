"""The engine of :mod:`hvd_pipe.planning.simulate`: the clocks of the workers and of the link."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning._recorder import Recorder
from hvd_pipe.planning.profile import ModelProfile

__all__ = ["TrainingRun", "latest"]

FloatArray = npt.NDArray[np.float64]


@dataclass
class TrainingRun:
    """The state that all methods share: the clock of each worker and of the link."""

    profile: ModelProfile
    pace: FloatArray
    jitter: float
    rng: np.random.Generator
    iterations: int
    trace: Recorder

    def __post_init__(self) -> None:
        self.forward_s, self.backward_s = self.profile.forward_s, self.profile.backward_s
        self.update_s = self.profile.update_s
        self.begin = np.zeros(len(self.pace))
        self.free = 0.0  # when the link is
        self.busy = np.zeros(self.iterations)
        self.ends = np.zeros(self.iterations)
        self.mean_ends = np.zeros(self.iterations)
        self.link_ends = np.zeros(self.iterations)
        self.work = np.zeros(self.iterations)

    def factors(self) -> FloatArray:
        """How much longer than its profile each worker takes for the coming step."""
        if not self.jitter:
            return self.pace
        variance = math.log1p(self.jitter**2)
        noise = self.rng.normal(-variance / 2, math.sqrt(variance), len(self.pace))
        return np.asarray(self.pace * np.exp(noise), dtype=np.float64)

    def send(self, step: int, name: str, bytes: float, start: float, end: float) -> None:
        """Note a message, which is on the link of every worker at once."""
        self.busy[step] += end - start
        self.free = end
        for worker in self.trace.now:
            self.trace.note(
                name, "allreduce", worker, "network", start, end, bytes=int(bytes), step=step
            )

    def finished(self, step: int, end: FloatArray) -> None:
        """Every worker is done with a step."""
        self.begin = end
        self.ends[step] = end.max()
        self.mean_ends[step] = end.mean()
        self.link_ends[step] = self.free


def latest(begin: FloatArray, factors: FloatArray, offset: FloatArray) -> FloatArray:
    """``max over workers of begin + offset * factor``, for each offset."""
    order = np.lexsort((-begin, -factors))
    begin, factors = begin[order], factors[order]
    ahead = np.concatenate(([-np.inf], np.maximum.accumulate(begin)[:-1]))
    last = begin > ahead
    times = begin[last, None] + factors[last, None] * offset
    return np.asarray(times.max(axis=0), dtype=np.float64)
