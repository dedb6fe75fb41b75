"""The search for the best cuts where the replicas of each stage are given, in numpy.

``best[s][j]`` is the least seconds a minibatch of the layers before cut j on the stages 0..s::

    best[0][j] = replicated(0, j, R_0)
    best[s][j] = min over cuts i before j of max(best[s-1][i], step(i, j, R_s))

with the times of :mod:`hvd_pipe.planning._search`, on a network of one level. The minibatches in
flight of each stage are known, ``ceil((R_s + ... + R_last) / R_s)``, and so is its memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning._cuts import Cuts
from hvd_pipe.planning._search import Leaf, Level, Memory, Rule, Search

__all__ = ["GivenSearch"]

FloatArray = npt.NDArray[np.float64]


class GivenSearch(Search):
    """The programme over the cuts of one model, for stages of given replicas.

    Args:
        cuts: N of them.
        level: the network, with as many components as there are replicas in all.
        rule, memory, limit, least_memory: as :class:`Search`.
        replicas: R, of each stage.
    """

    def __init__(
        self,
        cuts: Cuts,
        level: Level,
        rule: Rule,
        memory: Memory,
        limit: float | None,
        replicas: Sequence[int],
        least_memory: bool = False,
    ) -> None:
        super().__init__(cuts, [level], rule, memory, limit, least_memory=least_memory)
        self.replicas = tuple(replicas)
        self._rows: list[FloatArray] = []

    @property
    def best(self) -> float:
        """Seconds a minibatch of the best cuts (or bytes); infinite where there are none."""
        return float(self._best()[-1][-1])

    def stages(self) -> list[Leaf]:
        """The stages between the best cuts, first to last; only where :attr:`best` is finite."""
        rows = self._best()
        leaves: list[Leaf] = []
        j = self.count - 1
        for stage in reversed(range(len(self.replicas))):
            i, time = 0, float(rows[0][j])
            if stage:
                step = self._given_step(stage)[:, j]
                before = rows[stage - 1]
                times, other = np.maximum(before, step), np.minimum(before, step)
                # Of equal cuts, the one whose faster side is fastest, then where least crosses.
                i = int(np.lexsort((self.cuts.crossing, other, times))[0])
                time = float(step[i])
            leaves.append(Leaf(i, j, self.replicas[stage], time))
            j = i
        return leaves[::-1]

    def for_memory(self) -> GivenSearch:
        """The same search for the least memory that any cuts need; ``best`` is in bytes."""
        level, given = self.levels[0], self.replicas
        return GivenSearch(self.cuts, level, self.rule, self.memory, None, given, True)

    def _best(self) -> list[FloatArray]:
        if not self._rows:
            first = self._part(0, self._waiting(0))[0]
            at = (0, slice(None))
            self._rows = [self._replicated(1, self.replicas[0], first, at, True)]
            for stage in range(1, len(self.replicas)):
                times = np.maximum(self._rows[-1][:, None], self._given_step(stage))
                self._rows.append(times.min(axis=0))
        return self._rows

    def _given_step(self, stage: int) -> FloatArray:
        return self._step(1, self.replicas[stage], self._waiting(stage))

    def _waiting(self, stage: int) -> int:
        """Minibatches that wait in a worker, besides the one that it works on."""
        return -(-sum(self.replicas[stage:]) // self.replicas[stage]) - 1
