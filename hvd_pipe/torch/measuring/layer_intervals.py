"""Attribute the time between two moments of a step to a layer, for `torch.layer_times`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from hvd_pipe.torch.measuring.clock import Moment, Stopwatch

__all__ = ["LOSS", "UNUSED", "LayerSeconds", "Mark", "medians", "read_step"]

LOSS = "(loss)"
"""What lies between the model's forward pass and the gradient of its output."""
UNUSED = "(unused)"
"""Parameters that got no gradient: `DistributedOptimizer` sends zeros for them, at the end."""


@dataclass(slots=True)
class Mark:
    """A moment, and whose the time after it is (``kind`` "ready": the time before it)."""

    moment: Moment
    kind: str
    who: str = ""
    parameter: int = 0


@dataclass
class LayerSeconds:
    """What a step took, by layer."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    update: float = 0.0
    ran_backward: bool = False
    had_gradient: set[int] = field(default_factory=set)
    """Identities of the parameters whose gradient was computed."""


def read_step(marks: Sequence[Mark], owners: dict[int, str]) -> LayerSeconds:
    """Return what a step took; all of its moments have passed."""
    seconds = LayerSeconds()
    for mark, spent, after in _intervals(marks, owners):
        if mark.kind == "ready":
            seconds.had_gradient.add(mark.parameter)
            owner = owners.setdefault(mark.parameter, after.who or LOSS)
            seconds.backward[owner] = seconds.backward.get(owner, 0.0) + spent
        elif after.kind in ("forward", "leave"):
            seconds.forward[after.who] = seconds.forward.get(after.who, 0.0) + spent
        elif after.kind == "backward":
            seconds.backward[after.who] = seconds.backward.get(after.who, 0.0) + spent
        elif after.kind == "update":
            seconds.update += spent
        seconds.ran_backward |= mark.kind in ("ready", "backward")
    return seconds


def _intervals(
    marks: Sequence[Mark], owners: dict[int, str]
) -> Iterator[tuple[Mark, float, Mark]]:
    """Yield each mark, the seconds since the one before it, and whose they are."""
    idle = after = Mark(0.0, "idle")
    for before, mark in itertools.pairwise(marks):
        if before.kind == "ready":
            after = Mark(0.0, "backward", owners.get(before.parameter, after.who))
        elif before.kind == "start":  # what comes before the first layer is the first layer's
            after = Mark(0.0, "forward", mark.who)
        elif before.kind in ("updated", "end"):
            after = idle
        elif before.kind != "inside":
            after = before
        elif after.kind == "leave":
            after = idle
        # Backward has ended where something else begins: the time until then is nobody's.
        ended = after.kind in ("backward", "leave") and mark.kind not in ("ready", "backward")
        yield mark, Stopwatch.seconds(before.moment, mark.moment), idle if ended else after


def medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return each layer's median, scaled to add up to the median of the sums."""
    names = dict.fromkeys(name for step in steps for name in step)
    found = {name: median(step.get(name, 0.0) for step in steps) for name in names}
    total, added = median(sum(step.values()) for step in steps), sum(found.values())
    scale = total / added if added > 0.0 else 1.0
    return {name: max(0.0, seconds * scale) for name, seconds in found.items()}
