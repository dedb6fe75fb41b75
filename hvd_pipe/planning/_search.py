"""The search for the best stages and replicas: PipeDream's dynamic program, in numpy.

A network has levels, the innermost first: level k joins ``components`` parts of level k-1 with
links of one bandwidth, and a part of level 0 is one worker. ``best[q][i, j]`` is the least seconds
a minibatch of the layers between cuts i and j on q parts of a level::

    best[q][i, j] = min(whole(i, j, q),
                        min over cuts s between, r < q of max(best[q-r][i, s], step(s, j, r)))

where ``whole`` and ``step`` are the time of one stage with r replicas, each of them all of a part,
which is itself best divided: that is the level below, at ``best[components]``.

Memory. How many minibatches a worker holds depends on the workers behind its stage, so a level
is solved once for each number of them: with b workers behind each copy of a part, a stage of one
worker has b + 1 minibatches in flight. A stage of r parts of w workers, with a more parts behind
it in its level and b workers behind the level, has ``ceil((a w + b) / r)`` behind each of its r
copies. That is exact for any number of levels, as rounding up twice is rounding up once.

Where the replicas R of each stage are given (:class:`GivenSearch`, one level), ``best[s][j]`` is
the least seconds per minibatch of the layers before cut j on the stages 0..s::

    best[0][j] = replicated(0, j, R_0)
    best[s][j] = min over cuts i before j of max(best[s-1][i], step(i, j, R_s))

The minibatches in flight of a stage are then ``ceil((R_s + ... + R_last) / R_s)``.

Source: PipeDream, SOSP 2019, section 3.1; its code ``optimizer_graph_hierarchical.py`` for the
convention "original". The memory is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning._cuts import Cuts

__all__ = ["GivenSearch", "Leaf", "Level", "Memory", "Rule", "Search"]


FloatArray = npt.NDArray[np.float64]

_CACHE_BYTES = 2**29


@dataclass(frozen=True)
class Level:
    """Parts that one kind of link joins: bandwidth in bytes/s, latency in seconds per message."""

    components: int
    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True)
class Memory:
    """What a worker holds, in bytes; see :func:`hvd_pipe.planning.partition.partition`."""

    versions: str
    optimizer: float

    def __call__(self, parameters: Any, activations: Any, in_flight: int) -> Any:
        """Bytes for a stage: its parameters, and what it keeps of a minibatch, input included."""
        versions = {"stash": in_flight, "2bw": 2, "flush": 1}[self.versions]
        # One more for the gradients.
        return parameters * (versions + 1 + self.optimizer) + activations * in_flight


@dataclass(frozen=True)
class Rule:
    """The objective: how long a stage takes. ``ratio`` is the activation compression."""

    convention: str
    ratio: float | None = None

    def replicated(
        self, level: Level, inside: int, replicas: int, time: Any, parameters: Any, whole: bool
    ) -> Any:
        """Seconds per minibatch of a stage whose single replica takes ``time``."""
        r = replicas
        latency = 2 * (r - 1) * level.latency * (parameters > 0)
        if self.convention == "paper":
            allreduce = 2 * (r - 1) / r * parameters / level.bandwidth + latency
            return np.maximum(time, allreduce) / r
        share = inside if whole else 1
        return (time + 4 * (r - 1) * parameters / (level.bandwidth * r * share) + latency) / r

    def transfer(self, level: Level, replicas: int, size: Any) -> Any:
        """Seconds per minibatch for ``size`` bytes of activations and, back, their gradients."""
        if self.convention == "paper":
            return 2 * (size / level.bandwidth + level.latency * (size > 0))
        if self.ratio is None:
            return 0.0 * size
        seconds = size / (level.bandwidth * replicas * self.ratio)
        return 2 * (seconds + level.latency / replicas * (size > 0))

    @property
    def charges_output(self) -> bool:
        """A stage after the first pays for what it sends on, too."""
        return self.convention == "original"


@dataclass(frozen=True)
class Leaf:
    """A stage of the answer: its layers between two cuts, and its share of the objective."""

    first: int
    last: int
    replicas: int
    time_s: float


class Search:
    """The dynamic program over the cuts of one model and the levels of one network."""

    def __init__(
        self,
        cuts: Cuts,
        levels: Sequence[Level],
        rule: Rule,
        memory: Memory,
        limit: float | None = None,
        straight: bool = False,
        least_memory: bool = False,
    ) -> None:
        self.cuts, self.levels, self.rule, self.memory = cuts, tuple(levels), rule, memory
        self.limit, self.straight, self.least_memory = limit, straight, least_memory
        self.count = len(cuts.compute)
        self._compute = self._between(cuts.compute, np.inf)
        self._parameters = self._between(cuts.parameters, 0.0)
        # A stage keeps what its layers made, and what it got, until backward has used that.
        held = self._between(cuts.held, 0.0) + cuts.crossing[:, None] * cuts.inside
        self._held = held
        self._workers = [1]  # of a part of each level
        for level in self.levels:
            self._workers.append(self._workers[-1] * level.components)
        room = max(1, _CACHE_BYTES // (8 * self.count**2))
        self._step = lru_cache(maxsize=room)(self._make_step)
        self._table = lru_cache(maxsize=max(1, room // 4))(self._make_table)

    def _between(self, prefix: FloatArray, nowhere: float) -> FloatArray:
        """``[i, j]``: the sum over the layers between two cuts; ``nowhere`` if there are none."""
        # Sums of other orders differ by rounding, and a layer takes no negative time.
        return np.where(self.cuts.inside, np.maximum(prefix - prefix[:, None], 0.0), nowhere)

    @property
    def best(self) -> float:
        """Seconds per minibatch of the best partition (or bytes); infinite where there is none."""
        return float(self._table(len(self.levels), 0)[-1][0, -1])

    def stages(self) -> list[Leaf]:
        """The best partition's stages, first to last; only where :attr:`best` is finite."""
        top = len(self.levels)
        return self._divide(top, 0, 0, self.count - 1, self.levels[-1].components)

    def for_memory(self) -> Search:
        """The same search for the least memory that any partition needs; ``best`` is in bytes."""
        return Search(self.cuts, self.levels, self.rule, self.memory, None, self.straight, True)

    def _shares(self, q: int) -> range:
        """Replicas that the last stage may have, with at least one part left for those before."""
        return range(1, min(q, 2) if self.straight else q)

    def _behind(self, level: int, replicas: int, after: int, behind: int) -> int:
        """Workers behind each copy of a part of the level below."""
        if self.limit is None and not self.least_memory:
            return 0  # nothing depends on it
        return -(-(after * self._workers[level - 1] + behind) // replicas)

    def _part(self, level: int, behind: int) -> FloatArray:
        """(N, N) seconds of the layers between two cuts on one part of a level."""
        if level:
            return self._table(level, behind)[-1]
        if self.limit is None and not self.least_memory:
            return self._compute
        needed = self.memory(self._parameters, self._held, behind + 1)
        if self.least_memory:
            return np.where(self.cuts.inside, needed, np.inf)
        return np.where(needed <= self.limit, self._compute, np.inf)

    def _replicated(self, level: int, replicas: int, time: Any, at: Any, whole: bool) -> Any:
        if self.least_memory:
            return time
        inside = self.levels[level - 2].components if level > 1 else 1
        rule, link = self.rule, self.levels[level - 1]
        return rule.replicated(link, inside, replicas, time, self._parameters[at], whole)

    def _make_step(self, level: int, replicas: int, behind: int) -> FloatArray:
        """(N, N) seconds of a stage that follows another one, with its transfers."""
        everywhere = (slice(None), slice(None))
        time = self._replicated(level, replicas, self._part(level - 1, behind), everywhere, False)
        if self.least_memory:
            return cast(FloatArray, time)
        sent = self.rule.transfer(self.levels[level - 1], replicas, self.cuts.crossing)
        time = np.maximum(time, sent[:, None])
        if self.rule.charges_output:
            time = np.maximum(time, sent)
        return cast(FloatArray, time)

    def _make_table(self, level: int, behind: int) -> list[FloatArray]:
        """``best[q - 1]`` for q = 1..components: (N, N), at the outermost level its row 0."""
        outermost = level == len(self.levels)
        rows = slice(0, 1) if outermost else slice(None)
        components = self.levels[level - 1].components
        best: list[FloatArray] = []
        for q in range(1, components + 1):
            after = components - q
            if self.straight and q > 1:
                least = np.full((1 if outermost else self.count, self.count), np.inf)
            else:
                part = self._part(level - 1, self._behind(level, q, after, behind))
                least = self._replicated(level, q, part[rows], (rows, slice(None)), True).copy()
            for r in self._shares(q):
                step = self._step(level, r, self._behind(level, r, after, behind))
                _lower(least, best[q - r - 1], step)
            best.append(least)
        return best

    def _divide(self, level: int, behind: int, i: int, j: int, q: int) -> list[Leaf]:
        """The stages behind ``best[q][i, j]``: finds the choices again, the last stage first."""
        best = self._table(level, behind)
        stages: list[Leaf] = []
        while True:
            after = self.levels[level - 1].components - q
            part = np.inf
            if not self.straight or q == 1:
                part = self._part(level - 1, self._behind(level, q, after, behind))[i, j]
            whole = float(self._replicated(level, q, part, (i, j), True))
            # Of equal divisions, one stage; else where the faster side is fastest, then where
            # the least crosses.
            choices = [(whole, 0.0, 0.0, i, q)]
            for r in self._shares(q):
                before = best[q - r - 1][i]
                step = self._step(level, r, self._behind(level, r, after, behind))[:, j]
                times, other = np.maximum(before, step), np.minimum(before, step)
                s = int(np.lexsort((self.cuts.crossing, other, times))[0])
                sent = float(self.cuts.crossing[s])
                choices.append((float(times[s]), float(other[s]), sent, s, r))
            *_, s, r = min(choices)
            stages = self._expand(level, behind, s, j, r, after, whole=s == i) + stages
            if s == i:
                return stages
            j, q = s, q - r

    def _expand(
        self, level: int, behind: int, i: int, j: int, r: int, after: int, whole: bool
    ) -> list[Leaf]:
        """The stages of one part between two cuts, each with r times its replicas."""
        if level == 1:
            leaves = [Leaf(i, j, 1, float(self._compute[i, j]))]
        else:
            below = self._behind(level, r, after, behind)
            leaves = self._divide(level - 1, below, i, j, self.levels[level - 2].components)
        times = [float(self._replicated(level, r, x.time_s, (i, j), whole)) for x in leaves]
        if not whole:
            link = self.levels[level - 1]
            received, sent = (
                float(self.rule.transfer(link, r, self.cuts.crossing[at])) for at in (i, j)
            )
            times[0] = max(times[0], received)
            if self.rule.charges_output:
                times[-1] = max(times[-1], sent)
        return [
            Leaf(leaf.first, leaf.last, r * leaf.replicas, time)
            for leaf, time in zip(leaves, times, strict=True)
        ]


def _lower(least: FloatArray, before: FloatArray, step: FloatArray) -> None:
    """``least[i, j] = min(least[i, j], min over s of max(before[i, s], step[s, j]))``."""
    if len(least) == 1:
        np.minimum(least[0], np.maximum(before[0][:, None], step).min(axis=0), out=least[0])
        return
    for s in range(1, len(step) - 1):  # s lies after i and before j, so a block is enough
        through = np.maximum(before[:s, s, None], step[s, None, s + 1 :])
        np.minimum(least[:s, s + 1 :], through, out=least[:s, s + 1 :])


class GivenSearch(Search):
    """The dynamic program over the cuts of one model, for stages of given replicas."""

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
        """Seconds per minibatch of the best cuts (or bytes); infinite where there are none."""
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
