"""Control flags: what every rank tells all others in each round, without another message.

The bucket that is sent last ends in one element a flag. A rank sends zeros and ones, and reads
their means over the ranks.

`drains` and `stepped` tell ranks that have gone apart from ranks that have unlike data. A rank
that drains alone makes no step after that round, where the others do; in the next round all ranks
know.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

__all__ = ["COUNT", "ControlFlags"]


@dataclass(frozen=True)
class ControlFlags:
    """What one rank tells (zeros and ones), or the means of what all ranks have told."""

    reordered: float = 0.0
    """Its gradients keep coming in another order than planned."""
    present: float = 1.0
    """It takes part. A rank that has left by ``hvd.join()`` sends zeros, here too."""
    sparse: float = 0.0
    """It has found a sparse gradient where none was known of."""
    frozen: float = 0.0
    """Other parameters are frozen on it than in the round before."""
    drains: float = 0.0
    """It synchronizes without a gradient: it drains, or has no data in this step."""
    stepped: float = 0.0
    """It has made a step since the round before."""

    def to_list(self) -> list[float]:
        """Return the numbers in the order in which they travel."""
        return [float(flag) for flag in astuple(self)]

    def all_present(self, workers: int) -> bool:
        """Whether no rank has left; else only all-reduces are possible."""
        return self.present > 1 - 0.5 / workers

    def all_drained(self, workers: int) -> bool:
        """Whether no rank that took part had a gradient."""
        return self.present - self.drains < 0.5 / workers

    def some_drained(self, workers: int) -> bool:
        """Whether some ranks, and not all, had no gradient."""
        return self._divided(self.drains, workers)

    def some_stepped(self, workers: int) -> bool:
        """Whether some ranks, and not all, had made a step between the last two rounds."""
        return self._divided(self.stepped, workers)

    def _divided(self, mean: float, workers: int) -> bool:
        half = 0.5 / workers
        return self.all_present(workers) and half < mean < 1 - half


COUNT = len(fields(ControlFlags))
