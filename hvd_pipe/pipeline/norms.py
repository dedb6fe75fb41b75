"""Clipping by the norm over all stages, of which each stage has only its own gradient.

Where all stages end a minibatch together, they add up their squared norms. Elsewhere a stage
updates when the others have not got so far, or are further; it then takes the newest squared norms
that it has heard of: each message carries what its sender knows, downstream those of the stages
before it, upstream those of the stages behind it. A gradient travels on before its stage has
updated, so what is known of the stages behind is one minibatch old for each stage between, and
that of the stages before some minibatches more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from horovod.common.process_sets import ProcessSet

__all__ = ["Clipping", "Norms"]

Add = Callable[[float, str, ProcessSet], float]
"""Adds a number up over the ranks of a process set, under a name; all of them call it."""


class Norms:
    """The newest squared norm of each stage's gradient, as far as a worker knows.

    Args:
        stage: The worker's.
        stages: How many there are.

    Example:
        >>> norms = Norms(stage=1, stages=3)
        >>> norms.heard([4.0, 9.0, 16.0], from_before=True)
        >>> norms.squared
        (4.0, nan, nan)
    """

    def __init__(self, stage: int, stages: int) -> None:
        self.stage = stage
        self.squared = (math.nan,) * stages
        """By stage; nan for none."""

    def heard(self, squared: Sequence[float], from_before: bool) -> None:
        """Take what a neighbour knows of the stages on its side."""
        own = self.squared[self.stage]
        before, behind = (squared, self.squared) if from_before else (self.squared, squared)
        self.squared = (*before[: self.stage], own, *behind[self.stage + 1 :])

    def set_own(self, squared: float) -> None:
        """Note the own gradient's."""
        before, behind = self.squared[: self.stage], self.squared[self.stage + 1 :]
        self.squared = (*before, squared, *behind)

    def set_all(self, squared: Sequence[float]) -> None:
        """Note those of all stages, as between epochs, when nothing is on its way."""
        self.squared = tuple(squared)


@dataclass(frozen=True)
class Clipping:
    """Clips the gradient of a stage by the norm over all stages.

    Args:
        most: The largest norm; None to leave gradients as they are.
        together: Whether all stages update together.
        norms: What this worker knows.
        replicas: The ranks that hold its stage; None where there is one.
        everyone: All ranks.
        add: Adds up over ranks.
    """

    most: float | None
    together: bool
    norms: Norms
    replicas: ProcessSet | None
    everyone: ProcessSet
    add: Add

    def factor(self, squared: Callable[[], float]) -> float:
        """Return what the gradient is multiplied with, the same on all replicas of a stage.

        All workers call this at each of their updates, those without parameters, too.
        """
        if self.most is None:
            return 1.0
        self.norms.set_own(squared())
        # As torch.nn.utils.clip_grad_norm_ has it, for a norm that is not finite, too.
        factor = self.most / (math.sqrt(self._total()) + 1e-6)
        return 1.0 if factor >= 1.0 else factor

    def _total(self) -> float:
        own = self.norms.squared[self.norms.stage]
        if self.together:
            width = 1 if self.replicas is None else self.replicas.size()
            return self.add(own / width, "hvd_pipe.pipeline.norms", self.everyone)
        known = enumerate(self.norms.squared)
        others = math.fsum(x for s, x in known if s != self.norms.stage and not math.isnan(x))
        if self.replicas is not None:
            # Neighbours may have told each of them something else.
            name = f"hvd_pipe.pipeline.norms.{self.norms.stage}"
            others = self.add(others, name, self.replicas) / self.replicas.size()
        return own + others
