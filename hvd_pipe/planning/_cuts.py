"""Where a model can be cut in two: sets of layers that hold all that their layers use.

A pipeline's stage is the difference of two such sets, one inside of the other, so these sets are
the states of the partitioner. In a chain of L layers there are L + 1. Branches multiply them: two
branches of m and n layers side by side have (m + 1)(n + 1). Where that is more than the caller
will have, the branches that cause it lose cuts: see :func:`find_cuts`.

Source: PipeDream's antichains (its code, ``graph/graph.py``). Counted as sets they need no
augmenting: which outputs cross a cut follows from the set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning.profile import ModelProfile

__all__ = ["Cuts", "find_cuts"]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cuts:
    """N cuts in a topological order; the first has no layer before it, the last all L of them.

    Args:
        members: (N, L) bool, which layers lie before a cut.
        inside: (N, N) bool, ``inside[i, j]``: all that lies before cut i, and not that alone,
            lies before cut j; then i < j.
        compute: (N,) seconds of the layers before a cut, forward, backward and update.
        parameters: (N,) bytes of their parameters.
        held: (N,) bytes that they keep from forward to backward: their ``saved_bytes`` where
            those are known, else their outputs.
        crossing: (N,) bytes of those outputs that layers after the cut use.
        exact: no cut of the model is missing.
    """

    members: npt.NDArray[np.bool_]
    inside: npt.NDArray[np.bool_]
    compute: FloatArray
    parameters: FloatArray
    held: FloatArray
    crossing: FloatArray
    exact: bool


@dataclass(frozen=True)
class _Region:
    """The layers between two that every path goes through; ``base`` is all before them."""

    base: int
    layers: tuple[int, ...]


def find_cuts(profile: ModelProfile, max_states: int) -> Cuts:
    """All cuts of a model, or as many as ``max_states`` allows."""
    size = len(profile.layers)
    place = {layer.name: at for at, layer in enumerate(profile.layers)}
    if profile.edges is None:
        edges = [(at, at + 1) for at in range(size - 1)]
    else:
        edges = [(place[a], place[b]) for a, b in profile.edges]
    before, after = [0] * size, [0] * size  # bit sets of direct neighbours
    for source, target in edges:
        before[target] |= 1 << source
        after[source] |= 1 << target

    regions = _regions(before, after)
    detail = [0] * len(regions)
    sets = [_region_sets(region, 0, before, after, max_states) for region in regions]

    def count(at: int) -> int:
        found = sets[at]
        return max_states + 1 if found is None else len(found)

    while (total := sum(map(count, range(len(regions))))) > max_states:
        coarser = [at for at, level in enumerate(detail) if level < 3 and count(at) > 2]
        if not coarser:
            raise ValueError(
                f"the model of {size} layers has {total} cuts even without those inside of "
                f"branches, more than max_states = {max_states}: raise max_states (time grows "
                "with its square, with several levels of a network with its cube), or profile "
                "coarser layers"
            )
        worst = max(coarser, key=count)
        detail[worst] += 1
        sets[worst] = _region_sets(
            regions[worst], detail[worst], before, after, max(max_states, size + 1)
        )
    cuts = [cut for found in sets if found is not None for cut in found]
    cuts.sort(key=int.bit_count)

    members = _matrix(cuts, size)
    m = members.astype(np.float32)  # counts below 2^24 are exact, and its products are fast
    users = np.zeros((size, size), dtype=np.float32)
    for source, target in edges:
        users[target, source] = 1.0
    crosses = members & (m @ users < users.sum(axis=0))
    sizes = m.sum(axis=1)
    layers = profile.layers
    compute = np.array([x.forward_s + x.backward_s for x in layers]) + _updates(profile)
    parameters = np.array([x.gradient_bytes for x in layers], dtype=np.float64)
    activations = np.array([x.activation_bytes for x in layers], dtype=np.float64)
    held = np.array([x.held_bytes for x in layers], dtype=np.float64)
    return Cuts(
        members=members,
        inside=(m @ m.T == sizes[:, None]) & (sizes[:, None] < sizes),
        compute=members @ compute,
        parameters=members @ parameters,
        held=members @ held,
        crossing=crosses @ activations,
        exact=not any(detail),
    )


def _updates(profile: ModelProfile) -> FloatArray:
    """The update's seconds by layer: it touches each parameter once."""
    weights = np.array([layer.gradient_bytes for layer in profile.layers], dtype=np.float64)
    if not weights.any():
        weights += 1.0
    weights *= profile.update_s / weights.sum()
    return weights


def _regions(before: list[int], after: list[int]) -> list[_Region]:
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
            regions.append(_Region(base, tuple(_bits(rest & ancestors[at]))))
            base, rest = ancestors[at] | 1 << at, descendants[at]
    return [*regions, _Region(base, tuple(_bits(rest)))]


def _region_sets(
    region: _Region, detail: int, before: list[int], after: list[int], limit: int
) -> list[int] | None:
    """The cuts of a region, from none to all of its layers before it; None if above the limit."""
    whole = sum(1 << layer for layer in region.layers)
    if detail == 3:
        return [region.base, region.base | whole]
    if detail == 2:
        found = [region.base]
        for layer in region.layers:
            found.append(found[-1] | 1 << layer)
        return found
    groups: list[tuple[int, int]] = []  # layers that stay together, and what they use
    chain: dict[int, int] = {}  # the group that ends with a layer
    for layer in region.layers:
        source = max(before[layer].bit_length() - 1, 0)
        alone = before[layer] == 1 << source and after[source] == 1 << layer
        if detail == 1 and source in chain and alone:
            at = chain[layer] = chain[source]
            groups[at] = groups[at][0] | 1 << layer, groups[at][1]
        else:
            chain[layer] = len(groups)
            groups.append((1 << layer, before[layer] & whole))
    sets = {0}
    queue = [0]
    for cut in queue:
        for group, needs in groups:
            if not cut & group and not needs & ~cut:
                more = cut | group
                if more not in sets:
                    if len(sets) >= limit:
                        return None
                    sets.add(more)
                    queue.append(more)
    return [region.base | cut for cut in queue]


def _bits(mask: int) -> list[int]:
    return [at for at in range(mask.bit_length()) if mask >> at & 1]


def _matrix(cuts: list[int], size: int) -> npt.NDArray[np.bool_]:
    width = -(-size // 8)
    packed = np.frombuffer(b"".join(cut.to_bytes(width, "little") for cut in cuts), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(len(cuts), width), axis=1, bitorder="little")
    return bits[:, :size].astype(np.bool_)
