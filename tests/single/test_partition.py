"""The partitioner: against all partitions there are, and against what PipeDream's code printed."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hvd_pipe.planning._search import find_cuts
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.partition import partition
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.planning.stages import Partition, parse_replicas

DATA = Path(__file__).parent.parent / "data"
NAMES = ("vgg16", "alexnet", "resnet50")
MODELS = {name: ModelProfile.read(DATA / f"{name}.graph.txt") for name in NAMES}
CHAIN = ModelProfile(
    (
        LayerProfile("a", 40, 0.3, 0.1, 100),
        LayerProfile("b", 0, 0.2, 0.1, 20),
        LayerProfile("c", 4000, 0.1, 0.0, 10),
    )
)


# --- every partition there is, in plain Python, without the planner's ideas ---

Leaf = tuple[frozenset[str], frozenset[str], int]  # layers before it, and with it; replicas


class BruteForce:
    """All partitions of a small model over a network, each with its time and its stages."""

    def __init__(
        self, model: ModelProfile, levels: list[tuple[int, float]], **options: Any
    ) -> None:
        self.levels = levels
        self.latency = options.get("latency", 0.0)
        self.versions = options.get("versions", "stash")
        self.optimizer = options.get("optimizer_bytes_per_parameter_byte", 1.0)
        self.straight = options.get("straight", False)
        self.layers = {layer.name: layer for layer in model.layers}
        names = list(self.layers)
        edges = itertools.pairwise(names) if model.edges is None else model.edges
        self.edges = list(edges)
        sizes = range(len(names) + 1)
        subsets = (frozenset(s) for size in sizes for s in itertools.combinations(names, size))
        self.sets = [s for s in subsets if all(a in s for a, b in self.edges if b in s)]

    def crossing(self, before: frozenset[str]) -> int:
        users = {a for a, b in self.edges if a in before and b not in before}
        return sum(self.layers[name].activation_bytes for name in users)

    def parameters(self, layers: frozenset[str]) -> int:
        return sum(self.layers[name].gradient_bytes for name in layers)

    def stage(
        self, level: int, i: frozenset[str], j: frozenset[str], r: int
    ) -> Iterator[tuple[float, list[Leaf]]]:
        bandwidth = self.levels[level - 1][1]
        below = self.levels[level - 2][0] if level > 1 else 1
        w = self.parameters(j - i)
        waiting = 2 * (r - 1) * self.latency if w else 0.0
        for time, leaves in self.plans(level - 1, i, j, below):
            total = max(time, 2 * (r - 1) / r * w / bandwidth + waiting) / r
            yield total, [(a, b, r * x) for a, b, x in leaves]

    def transfer(self, level: int, before: frozenset[str]) -> float:
        size = self.crossing(before)
        return 2 * (size / self.levels[level - 1][1] + self.latency) if size else 0.0

    def plans(
        self, level: int, i: frozenset[str], j: frozenset[str], q: int
    ) -> Iterator[tuple[float, list[Leaf]]]:
        if level == 0:
            layers = [self.layers[name] for name in j - i]
            yield sum(x.forward_s + x.backward_s for x in layers), [(i, j, 1)]
            return
        if q == 1 or not self.straight:
            yield from self.stage(level, i, j, q)
        for s, r in itertools.product(self.sets, range(1, 2 if self.straight else q)):
            if i < s < j and r < q:
                for first, left in self.plans(level, i, s, q - r):
                    for second, right in self.stage(level, s, j, r):
                        yield max(first, second, self.transfer(level, s)), left + right

    def memory(self, leaves: list[Leaf]) -> float:
        """The most that a worker holds."""
        most = 0.0
        for number, (i, j, r) in enumerate(leaves):
            held = math.ceil(sum(leaf[2] for leaf in leaves[number:]) / r)
            versions = {"stash": held, "2bw": 2, "flush": 1}[self.versions]
            outputs = sum(self.layers[name].activation_bytes for name in j - i)
            weights = self.parameters(j - i) * (versions + 1 + self.optimizer)
            most = max(most, weights + held * (outputs + self.crossing(i)))
        return most

    def all(self) -> Iterator[tuple[float, float, list[Leaf]]]:
        everything = frozenset(self.layers)
        top = self.levels[-1][0]
        for time, leaves in self.plans(len(self.levels), frozenset(), everything, top):
            yield time, self.memory(leaves), leaves


@st.composite
def models(draw: st.DrawFn, graph: bool, most: int = 5) -> ModelProfile:
    count = draw(st.integers(1, most))
    layers = tuple(
        LayerProfile(
            f"l{at}",
            draw(st.sampled_from([0, 8, 100, 1000])),
            draw(st.integers(0, 8)) / 8,
            draw(st.integers(0, 8)) / 8,
            draw(st.sampled_from([0, 8, 64, 500])),
        )
        for at in range(count)
    )
    if not graph:
        return ModelProfile(layers)
    pairs = list(itertools.combinations([layer.name for layer in layers], 2))
    edges = [pair for pair in pairs if draw(st.booleans())]
    return ModelProfile(layers, tuple(edges))


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "latency": draw(st.sampled_from([0.0, 0.125, 1.0])),
        "versions": draw(st.sampled_from(["stash", "2bw", "flush"])),
        "optimizer_bytes_per_parameter_byte": draw(st.sampled_from([0.0, 1.0, 2.0])),
        "straight": draw(st.sampled_from([False, False, True])),
    }


FLAT = st.integers(1, 4).map(lambda m: [(m, 512.0)])
DEEP = st.sampled_from(
    [
        [(2, 4096.0), (2, 256.0)],
        [(2, 256.0), (3, 4096.0)],
        [(3, 1024.0), (2, 128.0)],
        [(2, 4096.0), (2, 512.0), (2, 64.0)],
        [(1, 64.0), (3, 512.0)],
    ]
)


def compare(
    model: ModelProfile, levels: list[tuple[int, float]], options: dict[str, Any], limit: float
) -> None:
    """``limit``: where between the least memory of any partition and the most the limit lies."""
    plans = list(BruteForce(model, levels, **options).all())
    if "replicas" in options:
        given = options["replicas"]
        plans = [plan for plan in plans if tuple(leaf[2] for leaf in plan[2]) == given]
    if not plans:
        with pytest.raises(ValueError, match=r"straight=True puts|each of which needs a layer"):
            partition(model, levels, **options)
        return
    free = partition(model, levels, **options)
    assert free.period_s == pytest.approx(min(time for time, _, _ in plans), rel=1e-9)
    check(model, levels, options, free, plans)

    least = min(memory for _, memory, _ in plans)
    bytes = math.floor(least + limit * (max(memory for _, memory, _ in plans) - least))
    if bytes >= least and bytes > 0:
        made = partition(model, levels, **options, memory_bytes=bytes)
        best = min(time for time, memory, _ in plans if memory <= bytes)
        assert made.period_s == pytest.approx(best, rel=1e-9)
        assert max(stage.memory_bytes for stage in made.stages) <= bytes
        check(model, levels, options, made, plans)
    if least > 1:
        with pytest.raises(ValueError, match=rf"takes {math.ceil(least)} bytes a worker"):
            partition(model, levels, **options, memory_bytes=math.ceil(least) - 1)


def check(
    model: ModelProfile,
    levels: list[tuple[int, float]],
    options: dict[str, Any],
    made: Partition,
    plans: list[tuple[float, float, list[Leaf]]],
) -> None:
    """The stages are a partition that brute force knows, with its time and its memory."""
    before: frozenset[str] = frozenset()
    leaves: list[Leaf] = []
    for stage in made.stages:
        leaves.append((before, before | set(stage.layers), stage.replicas))
        before |= set(stage.layers)
    same = [(time, memory) for time, memory, other in plans if other == leaves]
    assert min(abs(time - made.period_s) for time, _ in same) <= 1e-9 * made.period_s
    assert max(stage.memory_bytes for stage in made.stages) == math.ceil(same[0][1])
    assert max(stage.time_s for stage in made.stages) == pytest.approx(made.period_s, rel=1e-12)
    assert sum(len(stage.layers) for stage in made.stages) == len(model.layers)
    assert sum(made.replicas) == made.workers == math.prod(m for m, _ in levels)
    sizes = BruteForce(model, levels, **options)
    for (i, j, _), stage in zip(leaves, made.stages, strict=True):
        assert stage.activation_in_bytes == sizes.crossing(i)
        assert stage.activation_out_bytes == sizes.crossing(j)
        assert stage.parameter_bytes == sizes.parameters(j - i)
    behind = np.cumsum(made.replicas[::-1])[::-1]
    assert made.in_flight == tuple(
        math.ceil(n / r) for n, r in zip(behind, made.replicas, strict=True)
    )


@given(models(graph=False), FLAT, choices(), st.floats(0, 1))
def test_best_of_a_chain(
    model: ModelProfile, levels: list[tuple[int, float]], options: dict[str, Any], limit: float
) -> None:
    compare(model, levels, options, limit)


@given(models(graph=True), FLAT, choices(), st.floats(0, 1))
def test_best_of_a_graph(
    model: ModelProfile, levels: list[tuple[int, float]], options: dict[str, Any], limit: float
) -> None:
    compare(model, levels, options, limit)


@given(models(graph=True, most=4), DEEP, choices(), st.floats(0, 1))
def test_best_over_several_levels(
    model: ModelProfile, levels: list[tuple[int, float]], options: dict[str, Any], limit: float
) -> None:
    compare(model, levels, options, limit)


@given(models(graph=True), st.integers(1, 4), choices(), st.booleans())
def test_fewer_workers_where_that_is_faster(
    model: ModelProfile, workers: int, options: dict[str, Any], tight: bool
) -> None:
    parts = range(1, workers + 1)
    plans = [x for m in parts for x in BruteForce(model, [(m, 512.0)], **options).all()]
    assume(plans)
    limit = min(memory for _, memory, _ in plans) if tight else None
    assume(limit != 0)
    made = partition(model, [(workers, 512.0)], **options, memory_bytes=limit, use_fewer=True)
    best = min(time for time, memory, _ in plans if limit is None or memory <= limit)
    assert made.period_s == pytest.approx(best, rel=1e-9)
    assert sum(made.replicas) <= made.workers == workers


@pytest.mark.parametrize(
    ("name", "levels", "config"),
    [  # Table 1 of the paper, and what its code printed for one level
        ("vgg16", [(16, 1.25e9)], "15-1"),
        ("alexnet", [(16, 1.25e9)], "15-1"),
        ("resnet50", [(4, 1e10), (4, 1.25e9)], "16"),
        ("vgg16", [(4, 1e9)], "3-1"),
        ("vgg16", [(16, 3.125e9)], "16"),
        ("alexnet", [(4, 1e9)], "3-1"),
    ],
)
def test_published(name: str, levels: list[tuple[int, float]], config: str) -> None:
    found = partition(MODELS[name], levels)
    assert (found.config, found.exact) == (config, True)


# --- what PipeDream's own code printed ---


def original_time(
    model: ModelProfile, rows: list[tuple[int, int, int]], bandwidth: float, ratio: float | None
) -> float:
    """Seconds a minibatch of stages (first layer, last + 1, replicas) by that code's costs.

    It counts all-reduces and transfers twice, and shrinks activations by a ratio.
    """
    place = {layer.name: at for at, layer in enumerate(model.layers)}

    def crossing(cut: int) -> int:
        users = {a for a, b in model.edges or () if place[a] < cut <= place[b]}
        return sum(layer.activation_bytes for layer in model.layers if layer.name in users)

    times = []
    for first, last, r in rows:
        part = model.layers[first:last]
        compute = sum(x.forward_s + x.backward_s for x in part)
        w = sum(x.gradient_bytes for x in part)
        times.append((compute + 4 * (r - 1) * w / (bandwidth * r)) / r)
        if ratio is not None and first > 0:
            times += [2 * crossing(cut) / (bandwidth * r * ratio) for cut in (first, last)]
    return max(times)


@pytest.mark.parametrize(
    ("name", "bandwidth", "ratio", "stages", "seconds"),
    [
        ("vgg16", 1e9, 1, [(0, 17, 3), (17, 40, 1)], 0.205520896),
        ("vgg16", 1e9, None, [(0, 15, 3), (15, 40, 1)], 0.175732624),
        ("vgg16", 1e9, 4, [(0, 17, 3), (17, 40, 1)], 0.177583291),
        ("vgg16", 3.125e9, 1, [(0, 25, 15), (25, 40, 1)], 0.045524808),
        ("vgg16", 1e9, 1, [(0, 10, 1), (10, 20, 1), (20, 29, 1), (29, 40, 1)], 0.411041792),
        ("vgg16", 1e9, 1, [(0, 24, 13), (24, 32, 2), (32, 40, 1)], 0.056529767),
        ("alexnet", 1e9, 1, [(0, 14, 3), (14, 22, 1)], 0.034217141),
    ],
)
def test_printed_stages_take_the_printed_seconds(
    name: str,
    bandwidth: float,
    ratio: float | None,
    stages: list[tuple[int, int, int]],
    seconds: float,
) -> None:
    """By these costs, no division that the planner makes from the paper's is faster."""
    model, workers = MODELS[name], sum(r for _, _, r in stages)
    assert original_time(model, stages, bandwidth, ratio) == pytest.approx(seconds, abs=1e-9)
    rows, first = [], 0
    for stage in partition(model, [(workers, bandwidth)]).stages:
        rows.append((first, first + len(stage.layers), stage.replicas))
        first += len(stage.layers)
    if len(stages) < 4:  # that one is the fastest of those with a worker a stage
        assert original_time(model, rows, bandwidth, ratio) >= seconds - 1e-9


# --- what must hold of any partition ---


@given(models(graph=True, most=7), st.sampled_from([2, 4, 6]), st.floats(1.0, 8.0))
def test_invariants(model: ModelProfile, workers: int, factor: float) -> None:
    levels = [(2, 512.0), (workers // 2, 64.0)]
    made = partition(model, levels)
    assert made.period_s >= made.single_s / workers * (1 - 1e-12)
    assert made.period_s <= made.data_parallel_s * (1 + 1e-12)
    assert made.single_s == pytest.approx(model.compute_s)
    faster = partition(model, [(m, b * factor) for m, b in levels])
    assert faster.period_s <= made.period_s
    assert partition(model, levels, latency=0.5).period_s >= made.period_s
    assert partition(model, levels, use_fewer=True).period_s <= made.period_s
    free = partition(model, [(m, math.inf) for m, _ in levels])
    assert free.period_s == pytest.approx(made.single_s / workers)
    assert Partition.from_json(made.to_json()) == made


def test_the_update_takes_time_where_the_parameters_are() -> None:
    slow = replace(CHAIN, update_s=4.04)
    made = partition(slow, [(3, math.inf)], straight=True)
    assert [stage.compute_s for stage in made.stages] == pytest.approx([0.44, 0.3, 4.1])
    assert made.single_s == pytest.approx(slow.compute_s)
    free = ModelProfile((LayerProfile("a", 0, 1.0), LayerProfile("b", 0, 1.0)), update_s=1.0)
    assert partition(free, [(1, 1e9)]).period_s == pytest.approx(3.0)


# --- too many cuts ---


def inception(modules: int, branches: int, length: int) -> ModelProfile:
    """Modules of branches side by side, joined by a concatenation each."""
    layers, edges = [LayerProfile("in", 8, 1.0, activation_bytes=8)], []
    last = "in"
    for module_at in range(modules):
        ends = []
        for branch in range(branches):
            end = last
            for at in range(length):
                name = f"m{module_at}b{branch}l{at}"
                size = 100 + 10 * at + branch
                layers.append(LayerProfile(name, size, 0.01 * (branch + 1), 0.0, size))
                edges.append((end, name))
                end = name
            ends.append(end)
        last = f"m{module_at}"
        layers.append(LayerProfile(last, 0, 0.0, 0.0, 400))
        edges += [(end, last) for end in ends]
    return ModelProfile(tuple(layers), tuple(edges))


def test_regions_add_up() -> None:
    """3 modules of 2 branches of 3 have 3 x 4^2 cuts, and not 4^6; one more in front."""
    cuts = find_cuts(inception(3, 2, 3), 2000)
    assert cuts.exact
    assert len(cuts.compute) == 3 * 16 + 2  # before "in", and after the last module


def test_cuts_are_given_up_where_there_are_too_many() -> None:
    model = inception(5, 4, 6)  # 5 x 7^4 + 2 = 12007 cuts
    whole = sum(layer.backward_s for layer in model.layers)
    sizes = []
    for limit in (3000, 400, 82, 60, 12):
        cuts = find_cuts(model, limit)
        assert not cuts.exact
        assert len(cuts.compute) <= limit
        assert cuts.compute[-1] == pytest.approx(whole)
        sizes.append(len(cuts.compute))
        if limit > 400:
            continue
        made = partition(model, [(4, 1e5)], max_states=limit)
        assert not made.exact
        assert "raise max_states" in str(made)
        # What is found is a partition with its true time.
        used = [name for stage in made.stages for name in stage.layers]
        assert sorted(used) == sorted(layer.name for layer in model.layers)
        assert made.period_s >= made.single_s / 4
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2:] == [81, 58, 12]  # two, three and all modules keep their ends alone
    with pytest.raises(ValueError, match=r"of 126 layers has 12 cuts even without .* = 11: raise"):
        find_cuts(model, 11)


@given(models(graph=True, most=8), st.integers(9, 40))
def test_cuts_that_are_left_are_cuts(model: ModelProfile, limit: int) -> None:
    every = {tuple(row) for row in find_cuts(model, 1000).members.tolist()}
    brute = BruteForce(model, [(1, 1.0)])
    names = [layer.name for layer in model.layers]
    assert every == {tuple(name in cut for name in names) for cut in brute.sets}
    some = find_cuts(model, limit)
    assert {tuple(row) for row in some.members.tolist()} <= every
    assert some.exact == (len(some.compute) == len(every))
    for number, row in enumerate(some.members):
        cut = frozenset(itertools.compress(names, row))
        assert some.crossing[number] == brute.crossing(cut)
        later = (some.members >= row).all(axis=1) & (some.members != row).any(axis=1)
        assert (some.inside[number] == later).all()


# --- clusters, files, words ---


def test_a_cluster_brings_its_levels_latency_and_memory() -> None:
    network = Network(Link.of(1e3, 0.5), per_node=2, inside=Link.of(1e4, 0.25))
    cluster = Cluster(4, network, memory_bytes=10**6)
    made = partition(CHAIN, cluster)
    assert made.workers == 4
    inside = max(0.8, 4040 / 1e4 + 2 * 0.25) / 2
    assert made.data_parallel_s == pytest.approx(max(inside, 4040 / 1e3 + 2 * 0.5) / 2)
    same = partition(CHAIN, [(2, 1e4), (2, 1e3)], latency=0.0)
    assert partition(CHAIN, cluster, latency=0.0) == same
    with pytest.raises(ValueError, match=r"no partition on 4 workers .* memory_bytes = 100:"):
        partition(CHAIN, replace(cluster, memory_bytes=100))
    with pytest.raises(ValueError, match=r"for workers of one speed, but .* \(1.0, 2.0,"):
        partition(CHAIN, replace(cluster, speeds=(1.0, 2.0, 1.0, 1.0)))
    inner = partition(CHAIN, replace(cluster, workers=2))
    assert inner.data_parallel_s == pytest.approx(max(0.8, 4040 / 1e4 + 0.5) / 2)
    flat = partition(CHAIN, Cluster(2, Network(Link.of(1e3, 0.5))))
    assert flat.data_parallel_s == pytest.approx((4040 / 1e3 + 1.0) / 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"profile": "vgg16"}, TypeError, r"profile must be a ModelProfile, got str"),
        ({"levels": []}, ValueError, r"list of \(components, bandwidth.* at least one"),
        ({"levels": [4]}, ValueError, r"levels\[0\] must be \(components, bandwidth.*got 4"),
        ({"levels": [(4, 1e9), (4,)]}, ValueError, r"levels\[1\] must be .*got \(4,\)"),
        ({"levels": [(0, 1e9)]}, ValueError, r"components of levels\[0\] must be at least 1"),
        ({"levels": [(2.0, 1e9)]}, TypeError, r"components of levels\[0\] must be an integer"),
        ({"levels": [(2, 0.0)]}, ValueError, r"bandwidth of levels\[0\] .* above 0, got 0"),
        ({"levels": [(2, math.nan)]}, ValueError, r"bandwidth of levels\[0\] must be finite"),
        ({"levels": [(2, "10gbit")]}, TypeError, r"must be a number, got '10gbit'"),
        ({"versions": "1"}, ValueError, r"one of stash, 2bw, flush; got '1'"),
        ({"latency": -1e-6}, ValueError, r"latency must be finite and at least 0, got -1e-06"),
        ({"memory_bytes": 0}, ValueError, r"memory_bytes must be finite and above 0, got 0"),
        ({"memory_bytes": "16GB"}, TypeError, r"memory_bytes must be a number, got '16GB'"),
        (
            {"optimizer_bytes_per_parameter_byte": -1},
            ValueError,
            r"optimizer_bytes_per_parameter_byte must be finite and at least 0, got -1",
        ),
        ({"max_states": 1}, ValueError, r"max_states must be at least 2, got 1"),
        ({"max_states": 3}, ValueError, r"of 3 layers has 4 cuts even .* max_states = 3"),
        (
            {"straight": True, "levels": [(4, 1e9)]},
            ValueError,
            r"4 workers and 3 layers.*use fewer workers, or straight=False",
        ),
        (
            {"memory_bytes": 1},
            ValueError,
            r"no partition on 2 workers .* memory_bytes = 1:",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    good: dict[str, Any] = {"profile": CHAIN, "levels": [(2, 1e9)]}
    with pytest.raises(error, match=message):
        partition(**{**good, **arguments})


THREE = ModelProfile(tuple(LayerProfile(f"l{at}", 100, 0.5, 0.5, 10) for at in range(3)))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_a_plan_is_read_as_partition_writes_it(replicas: list[int]) -> None:
    assert parse_replicas("-".join(map(str, replicas)), sum(replicas)) == tuple(replicas)


@pytest.mark.parametrize(
    ("text", "workers", "message"),
    [
        ("", None, "is no plan: write the workers of each stage"),
        ("3 1", None, "is no plan"),
        ("3.0-1", None, "is no plan"),
        ("stright", 4, 'or "straight" for one worker a stage'),
        ("3-0", None, "has a stage without workers"),
        ("straight", None, "say how many workers there are"),
        ("straight", 0, "workers must be at least 1, got 0"),
        ("3-1", 5, r'is for 4 workers, but there are 5: start 4, or .* such as "4-1"'),
        ("2", 1, "start 2, or write a plan whose numbers add up to 1$"),
    ],
)
def test_texts_that_are_no_plan(text: str, workers: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_replicas(text, workers)
    with pytest.raises(TypeError, match=r"got \(3, 1\)"):
        parse_replicas((3, 1))  # type: ignore[arg-type]


def compositions(workers: int) -> list[tuple[int, ...]]:
    """All plans for so many workers."""
    cuts = (c for n in range(workers) for c in itertools.combinations(range(1, workers), n))
    ends = ((0, *cut, workers) for cut in cuts)
    return [tuple(b - a for a, b in itertools.pairwise(end)) for end in ends]


@given(
    st.booleans().flatmap(lambda graph: models(graph=graph)),
    st.integers(1, 4).flatmap(lambda workers: st.sampled_from(compositions(workers))),
    choices(),
    st.floats(0, 1),
)
def test_best_cuts_for_given_replicas(
    model: ModelProfile, replicas: tuple[int, ...], options: dict[str, Any], limit: float
) -> None:
    del options["straight"]
    compare(model, [(sum(replicas), 512.0)], {**options, "replicas": replicas}, limit)


@pytest.mark.parametrize(
    ("levels", "given", "kind", "message"),
    [
        ([(4, 1e9)], {"replicas": "3-1"}, TypeError, r"parse_replicas reads '3-1'"),
        ([(4, 1e9)], {"replicas": ()}, TypeError, "one a stage"),
        ([(4, 1e9)], {"replicas": (3, 1.0)}, TypeError, "replicas of stage 1 must be an integer"),
        ([(4, 1e9)], {"replicas": (4, 0)}, ValueError, "replicas of stage 1 must be at least 1"),
        ([(4, 1e9)], {"replicas": (2, 1)}, ValueError, "are 3 workers, but there are 4"),
        ([(4, 1e9)], {"replicas": (3, 1), "straight": True}, ValueError, "leave these out"),
        ([(4, 1e9)], {"replicas": (3, 1), "use_fewer": True}, ValueError, "leave these out"),
        ([(4, 1e9)], {"replicas": (1,) * 4}, ValueError, "give fewer stages"),
        ([(2, 1e9), (2, 1e8)], {"replicas": (3, 1)}, ValueError, r"such as levels=[(4, 1e+08)]"),
    ],
)
def test_replicas_that_cannot_be(
    levels: list[tuple[int, float]], given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        partition(THREE, levels, **given)
