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

Where the replicas of each stage are given (on one level), only ``best[q]`` of their sums q is
wanted, and r is then that of the last of these stages.

A stage is the difference of two sets of layers, one inside of the other, each of which holds all
that its layers use. These sets, the cuts, are the states: PipeDream's antichains. A chain of L
layers has L + 1 of them, two branches of m and n layers side by side (m + 1)(n + 1). Where that is
more than the caller will have, such branches lose cuts (:func:`find_cuts`).

Source: PipeDream, SOSP 2019, section 3.1. The memory is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning.profile import ModelProfile

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


def replicated(level: Level, replicas: int, time: Any, parameters: Any) -> Any:
    """Seconds per minibatch of a stage whose single replica takes ``time``."""
    latency = 2 * (replicas - 1) * level.latency * (parameters > 0)
    allreduce = 2 * (replicas - 1) / replicas * parameters / level.bandwidth + latency
    return np.maximum(time, allreduce) / replicas


def _transfer(level: Level, size: Any) -> Any:
    """Seconds per minibatch for ``size`` bytes of activations and, back, their gradients."""
    return 2 * (size / level.bandwidth + level.latency * (size > 0))


@dataclass(frozen=True)
class Leaf:
    """A stage: its layers between two cuts, its replicas, seconds per minibatch."""

    first: int
    last: int
    replicas: int
    time_s: float


@dataclass(frozen=True)
class Cuts:
    """N cuts in a topological order; the first has no layer before it, the last all L of them."""

    members: npt.NDArray[np.bool_]  # (N, L): which layers lie before a cut
    inside: npt.NDArray[np.bool_]  # (N, N): before j lies all that does before i, and more: i < j
    compute: FloatArray  # (N,) seconds of the layers before a cut: forward, backward, update
    parameters: FloatArray  # (N,) bytes of their parameters
    held: FloatArray  # (N,) bytes that they keep from forward to backward
    crossing: FloatArray  # (N,) bytes of those of their outputs that layers after the cut use
    exact: bool  # no cut of the model is missing


def find_cuts(profile: ModelProfile, max_states: int) -> Cuts:
    """All cuts of a model, or as many as ``max_states`` allows."""
    size = len(profile.layers)
    place = {layer.name: at for at, layer in enumerate(profile.layers)}
    if profile.edges is None:
        edges = [(at, at + 1) for at in range(size - 1)]
    else:
        edges = [(place[a], place[b]) for a, b in profile.edges]
    cuts, exact = _cut_sets(edges, size, max_states)
    members = _matrix(cuts, size)
    m = members.astype(np.float32)  # counts below 2^24 are exact, and its products are fast
    users = np.zeros((size, size), dtype=np.float32)
    for source, target in edges:
        users[target, source] = 1.0
    crosses = members & (m @ users < users.sum(axis=0))
    sizes = m.sum(axis=1)
    layers = profile.layers
    parameters = np.array([x.gradient_bytes for x in layers], dtype=np.float64)
    # The update touches each parameter once.
    weights = parameters if parameters.any() else parameters + 1.0
    update = weights * (profile.update_s / weights.sum())
    compute = np.array([x.forward_s + x.backward_s for x in layers]) + update
    activations = np.array([x.activation_bytes for x in layers], dtype=np.float64)
    held = np.array([x.held_bytes for x in layers], dtype=np.float64)
    return Cuts(
        members=members,
        inside=(m @ m.T == sizes[:, None]) & (sizes[:, None] < sizes),
        compute=members @ compute,
        parameters=members @ parameters,
        held=members @ held,
        crossing=crosses @ activations,
        exact=exact,
    )


def _cut_sets(edges: list[tuple[int, int]], size: int, max_states: int) -> tuple[list[int], bool]:
    """The cuts as bit sets of layers, the smallest first, and whether these are all of them.

    Regions of branches that have too many keep those in the order of the layers, then none inside.
    """
    before, after = [0] * size, [0] * size  # bit sets of direct neighbours
    for source, target in edges:
        before[target] |= 1 << source
        after[source] |= 1 << target
    regions = _regions(before, after)
    sets = [_closed_sets(base, layers, before, max_states) for base, layers in regions]
    exact = True
    for fewer in (_in_order, _at_the_ends):
        for at in sorted(range(len(sets)), key=lambda at: -len(sets[at])):
            kept = fewer(*regions[at])
            if sum(map(len, sets)) > max_states and len(kept) < len(sets[at]):
                sets[at], exact = kept, False
    cuts = sorted((cut for region in sets for cut in region), key=int.bit_count)
    if len(cuts) > max_states:
        raise ValueError(
            f"the model of {size} layers has {len(cuts)} cuts even without those inside of "
            f"branches, more than max_states = {max_states}: raise max_states (time grows "
            "with its square, with several levels of a network with its cube), or profile "
            "coarser layers"
        )
    return cuts, exact


def _regions(before: list[int], after: list[int]) -> list[tuple[int, list[int]]]:
    """Runs of layers between those on every path, each with the set of all layers before it."""
    size = len(before)
    ancestors, descendants = [0] * size, [0] * size
    for at in range(size):
        for source in _bits(before[at]):
            ancestors[at] |= ancestors[source] | 1 << source
    for at in reversed(range(size)):
        for target in _bits(after[at]):
            descendants[at] |= descendants[target] | 1 << target
    everything = (1 << size) - 1
    regions = []
    base, rest = 0, everything
    for at in range(size):
        if (ancestors[at] | descendants[at] | 1 << at) == everything:
            regions.append((base, _bits(rest & ancestors[at])))
            base, rest = ancestors[at] | 1 << at, descendants[at]
    return [*regions, (base, _bits(rest))]


def _closed_sets(base: int, layers: list[int], before: list[int], limit: int) -> list[int]:
    """All sets of a region's layers that hold what these use; one above the limit is enough."""
    cuts = [base]
    known = {base}
    for cut in cuts:
        for layer in layers:
            more = cut | 1 << layer
            if more not in known and not before[layer] & ~cut and len(cuts) <= limit:
                known.add(more)
                cuts.append(more)
    return cuts


def _in_order(base: int, layers: list[int]) -> list[int]:
    return list(accumulate(layers, lambda cut, layer: cut | 1 << layer, initial=base))


def _at_the_ends(base: int, layers: list[int]) -> list[int]:
    return sorted({base, base | sum(1 << layer for layer in layers)})


def _bits(mask: int) -> list[int]:
    return [at for at in range(mask.bit_length()) if mask >> at & 1]


def _matrix(cuts: list[int], size: int) -> npt.NDArray[np.bool_]:
    width = -(-size // 8)
    packed = np.frombuffer(b"".join(cut.to_bytes(width, "little") for cut in cuts), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(cuts), width), axis=1, bitorder="little")
    return bits[:, :size].astype(np.bool_)


class Search:
    """The dynamic program over the cuts of one model and the levels of one network."""

    def __init__(
        self,
        cuts: Cuts,
        levels: Sequence[Level],
        memory: Memory,
        limit: float | None = None,
        straight: bool = False,
        replicas: Sequence[int] | None = None,
        least_memory: bool = False,
    ) -> None:
        self.cuts, self.levels, self.memory = cuts, tuple(levels), memory
        self.limit, self.straight, self.least_memory = limit, straight, least_memory
        self.replicas = replicas
        self.count = len(cuts.compute)
        self._compute = self._between(cuts.compute, np.inf)
        self._parameters = self._between(cuts.parameters, 0.0)
        # A stage keeps what its layers made, and what it got, until backward has used that.
        self._held = self._between(cuts.held, 0.0) + cuts.crossing[:, None] * cuts.inside
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
        return Search(
            self.cuts, self.levels, self.memory, None, self.straight, self.replicas, True
        )

    def _shares(self, q: int) -> Sequence[int]:
        """Replicas that the last stage on q parts may have; all q where it is the only one."""
        if self.replicas is not None:
            return [
                r
                for r, end in zip(self.replicas, accumulate(self.replicas), strict=True)
                if end == q
            ]
        return (1,) if self.straight else range(1, q + 1)

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

    def _replicated(self, level: int, replicas: int, time: Any, at: Any) -> Any:
        if self.least_memory:
            return time
        return replicated(self.levels[level - 1], replicas, time, self._parameters[at])

    def _make_step(self, level: int, replicas: int, behind: int) -> FloatArray:
        """(N, N) seconds of a stage that follows another one, with its transfers."""
        everywhere = (slice(None), slice(None))
        time = self._replicated(level, replicas, self._part(level - 1, behind), everywhere)
        if self.least_memory:
            return cast(FloatArray, time)
        received = _transfer(self.levels[level - 1], self.cuts.crossing)
        return cast(FloatArray, np.maximum(time, received[:, None]))

    def _make_table(self, level: int, behind: int) -> list[FloatArray]:
        """``best[q - 1]`` for q = 1..components: (N, N), at the outermost level its row 0."""
        outermost = level == len(self.levels)
        rows = slice(0, 1) if outermost else slice(None)
        components = self.levels[level - 1].components
        best: list[FloatArray] = []
        for q in range(1, components + 1):
            least = np.full((1 if outermost else self.count, self.count), np.inf)
            for r in self._shares(q):
                after = self._behind(level, r, components - q, behind)
                if r < q:
                    _lower(least, best[q - r - 1], self._step(level, r, after))
                else:
                    part = self._part(level - 1, after)[rows]
                    whole = self._replicated(level, r, part, (rows, slice(None)))
                    np.minimum(least, whole, out=least)
            best.append(least)
        return best

    def _divide(self, level: int, behind: int, i: int, j: int, q: int) -> list[Leaf]:
        """The stages of ``best[q][i, j]``, found from the last one backwards."""
        best = self._table(level, behind)
        stages: list[Leaf] = []
        while True:
            after = self.levels[level - 1].components - q
            # Of equal divisions, one stage; else where the faster side is fastest, then where
            # the least crosses.
            choices = []
            for r in self._shares(q):
                held = self._behind(level, r, after, behind)
                if r == q:
                    part = self._part(level - 1, held)[i, j]
                    whole = float(self._replicated(level, r, part, (i, j)))
                    choices.append((whole, 0.0, 0.0, i, r))
                    continue
                before, step = best[q - r - 1][i], self._step(level, r, held)[:, j]
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
        times = [float(self._replicated(level, r, x.time_s, (i, j))) for x in leaves]
        if not whole:
            received = float(_transfer(self.levels[level - 1], self.cuts.crossing[i]))
            times[0] = max(times[0], received)
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
