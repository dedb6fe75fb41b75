"""When a step first uses each parameter, and when it computes each gradient.

::

    end of step()                                                first gradient
    |---- forward_s ---------------------------------------------|--- backward_s ---> step()
      a.weight   b.weight
      needed_s of a.weight ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from hvd_pipe.torch.measuring.clock import Moment, Stopwatch

__all__ = ["FirstUses", "Uses"]


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
