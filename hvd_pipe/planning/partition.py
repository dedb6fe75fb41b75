"""Which layers go on which workers in a pipeline: PipeDream's stages and their replicas.

A stage is a run of layers (in a model with branches, the difference of two nested sets of layers)
on one or more workers; replicas of a stage take the minibatches in turn. A pipeline is as fast as
its slowest stage, or its slowest transfer between two stages. :func:`partition` finds the stages
with the least seconds per minibatch.

Source: PipeDream, SOSP 2019, section 3.1, and https://github.com/msr-fiddle/pipedream.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np

from hvd_pipe.planning._checks import check_finite, check_integer
from hvd_pipe.planning._search import Cuts, Leaf, Level, Memory, Search, find_cuts, replicated
from hvd_pipe.planning.cluster import Cluster
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.stages import Partition, Stage

__all__ = ["MAX_STATES", "VERSIONS", "partition"]

VERSIONS = ("stash", "2bw", "flush")
MAX_STATES = 2000

_MOST_STEPS = 3 * 10**10  # about two minutes


def partition(
    profile: ModelProfile,
    levels: Sequence[tuple[int, float]] | Cluster,
    *,
    latency: float | None = None,
    memory_bytes: float | None = None,
    straight: bool = False,
    versions: str = "stash",
    optimizer_bytes_per_parameter_byte: float = 1.0,
    use_fewer: bool = False,
    max_states: int = MAX_STATES,
    replicas: Sequence[int] | None = None,
) -> Partition:
    r"""The stages and replicas with the least seconds per minibatch.

    A stage of m replicas, each of which takes A seconds for its layers, as best divided on its
    part of the network, with parameters w and outputs a, over links of bandwidth B, latency l:

    - a stage takes ``max(A, 2 (m-1)/m w/B + 2 (m-1) l) / m``;
    - the transfer of a takes ``2 (a/B + l)``.

    That charges what a ring all-reduce sends, a round of m minibatches: the paper prints
    ``2(m-1) w/B``, and its text says ``2 (m-1)/m w``. Memory of a worker: parameters times
    versions, gradients, optimizer state, and for each minibatch in flight
    (``ceil(workers from this stage on / its replicas)``) its stage's input and what its layers
    keep (``LayerProfile.held_bytes``).

    Args:
        profile: the model; layers of its ``edges`` None are a chain.
        levels: (components, bandwidth in bytes/s) of each level of the network, the innermost
            first: [(4, 1e10), (2, 1e9)] is 2 machines of 4 workers. Or a cluster of workers of one
            speed, whose latency and memory are then taken, too.
        latency: seconds per message; None for the cluster's, or 0.
        memory_bytes: bytes that a worker may hold; None for the cluster's, or no limit.
        straight: every stage on one worker, so as many stages as workers.
        versions: of the weights: "stash" keeps one for each minibatch in flight (PipeDream), "2bw"
            two (PipeDream-2BW), "flush" one.
        optimizer_bytes_per_parameter_byte: state of the optimizer; 1 for momentum, 2 for Adam.
        use_fewer: leave components of the outermost level idle where that is faster.
        max_states: cuts of the model to try, at most. Branches with more give up those out of the
            order of the profile, then all (``Partition.exact`` says so). N cuts on M components of
            the outermost level take ``N^2 M^2 / 2`` steps, on m of an inner one ``N^3 m^2 / 12``.
        replicas: workers of each stage, the first stage first, to find the best cuts for, on a
            network of one level; :func:`hvd_pipe.planning.stages.parse_replicas` reads "3-1".

    Returns:
        One best partition (several may be equal).

    Raises:
        ValueError: an argument is out of its range, there are more stages than layers, or too many
            cuts or workers to try, or nothing fits; says what would.

    Example:
        >>> from hvd_pipe.planning.profile import LayerProfile, ModelProfile
        >>> model = ModelProfile((
        ...     LayerProfile("conv", 10**6, backward_s=0.03, activation_bytes=10**6),
        ...     LayerProfile("fc", 10**8, backward_s=0.01, activation_bytes=4000),
        ... ))
        >>> plan = partition(model, [(4, 1e9)])
        >>> plan.config, round(plan.period_s, 6), plan.in_flight
        ('3-1', 0.01, (2, 1))
        >>> partition(model, [(4, 1e9)], replicas=(2, 2)).period_s
        0.05

    Source: PipeDream, SOSP 2019, section 3.1.
    """
    if not isinstance(profile, ModelProfile):
        raise TypeError(f"profile must be a ModelProfile, got {type(profile).__name__}")
    if versions not in VERSIONS:
        raise ValueError(f"versions must be one of {', '.join(VERSIONS)}; got {versions!r}")
    network = _levels(levels, latency)
    if memory_bytes is None and isinstance(levels, Cluster):
        memory_bytes = levels.memory_bytes
    if memory_bytes is not None:
        check_finite("memory_bytes", memory_bytes, positive=True)
    check_finite("optimizer_bytes_per_parameter_byte", optimizer_bytes_per_parameter_byte)
    check_integer("max_states", max_states, 2)

    if replicas is not None:
        replicas = _checked_replicas(replicas, network, straight, use_fewer)
    cuts = find_cuts(profile, max_states)
    memory = Memory(versions, optimizer_bytes_per_parameter_byte)
    networks = [network]
    if replicas is None:
        _affordable(len(cuts.compute), network)
    if use_fewer:
        *inner, outer = network
        used = range(1, outer.components + 1)
        networks = [[*inner, Level(n, outer.bandwidth, outer.latency)] for n in used]
    searches = [Search(cuts, part, memory, memory_bytes, straight, replicas) for part in networks]
    search = min(searches, key=lambda search: search.best)
    if not math.isfinite(search.best):
        _raise_no_partition(searches, profile)
    stages, in_flight = _stages(profile, cuts, search.stages(), memory)
    data_parallel_s = float(cuts.compute[-1])
    for level in network:
        whole = replicated(level, level.components, data_parallel_s, cuts.parameters[-1])
        data_parallel_s = float(whole)
    return Partition(
        stages=stages,
        workers=math.prod(level.components for level in network),
        period_s=search.best,
        single_s=float(cuts.compute[-1]),
        data_parallel_s=data_parallel_s,
        convention="paper",
        in_flight=in_flight,
        exact=cuts.exact,
    )


def _stages(
    profile: ModelProfile, cuts: Cuts, leaves: Sequence[Leaf], memory: Memory
) -> tuple[tuple[Stage, ...], tuple[int, ...]]:
    """The stages, and the minibatches in flight of each."""
    stages, in_flight = [], []
    behind = sum(leaf.replicas for leaf in leaves)
    for leaf in leaves:
        i, j = leaf.first, leaf.last
        held = -(-behind // leaf.replicas)
        behind -= leaf.replicas
        inside = cuts.members[j] & ~cuts.members[i]
        layers = [profile.layers[at] for at in np.flatnonzero(inside)]
        parameters = sum(layer.gradient_bytes for layer in layers)
        received, sent = int(cuts.crossing[i]), int(cuts.crossing[j])
        activations = sum(layer.held_bytes for layer in layers) + received
        stages.append(
            Stage(
                layers=tuple(layer.name for layer in layers),
                replicas=leaf.replicas,
                compute_s=float(cuts.compute[j] - cuts.compute[i]),
                parameter_bytes=parameters,
                activation_in_bytes=received,
                activation_out_bytes=sent,
                memory_bytes=math.ceil(memory(parameters, activations, held)),
                time_s=leaf.time_s,
            )
        )
        in_flight.append(held)
    return tuple(stages), tuple(in_flight)


def _raise_no_partition(searches: Sequence[Search], profile: ModelProfile) -> None:
    """Raise the ValueError that says why there is no partition."""
    search = searches[-1]
    workers = math.prod(level.components for level in search.levels)
    least = min(search.for_memory().best for search in searches)
    if search.replicas is not None and not math.isfinite(least):
        raise ValueError(
            f"replicas = {search.replicas} are {len(search.replicas)} stages, each of which needs "
            f"a layer: there are {len(profile.layers)} layers in {search.count - 1} places to "
            "cut; give fewer stages"
        )
    if not math.isfinite(least):
        raise ValueError(
            f"straight=True puts every stage on one worker, so it needs a layer for each: there "
            f"are {workers} workers and {len(profile.layers)} layers in {search.count - 1} places "
            "to cut; use fewer workers, or straight=False"
        )
    raise ValueError(
        f"no partition on {workers} workers fits into memory_bytes = {search.limit:.0f}: the one "
        f"that needs least takes {math.ceil(least)} bytes a worker with "
        f"versions={search.memory.versions!r}; raise memory_bytes, add workers, take a smaller "
        "minibatch, or keep fewer versions of the weights with versions='2bw' or 'flush'"
    )


def _checked_replicas(
    replicas: Sequence[int], network: Sequence[Level], straight: bool, use_fewer: bool
) -> tuple[int, ...]:
    """The replicas of each stage, checked."""
    if isinstance(replicas, str) or not isinstance(replicas, Sequence) or not replicas:
        raise TypeError(
            "replicas are integers, one a stage, such as (3, 1), got "
            f"{replicas!r}; hvd_pipe.planning.stages.parse_replicas reads '3-1'"
        )
    for stage, width in enumerate(replicas):
        check_integer(f"replicas of stage {stage}", width, 1)
    if straight or use_fewer:
        raise ValueError(
            "replicas settles what straight and use_fewer would choose: leave these out, and give "
            "replicas=(1, 1, ...) for a straight pipeline"
        )
    workers = math.prod(level.components for level in network)
    if len(network) > 1:
        raise ValueError(
            f"cuts for given replicas are found on a network of one level, got {len(network)}: "
            f"give the slowest, such as levels=[({workers}, {network[-1].bandwidth:g})]"
        )
    if sum(replicas) != workers:
        raise ValueError(
            f"replicas = {tuple(replicas)} are {sum(replicas)} workers, but there are {workers}: "
            "make them add up"
        )
    return tuple(operator.index(width) for width in replicas)


def _affordable(cuts: int, network: Sequence[Level]) -> None:
    *inner, outer = network
    steps = cuts**2 * outer.components**2 // 2
    steps += sum(cuts**3 * level.components**2 // 12 for level in inner)
    if steps > _MOST_STEPS:
        sizes = " x ".join(str(level.components) for level in network)
        raise ValueError(
            f"{cuts} cuts of the model on {sizes} workers "
            f"take {steps:.1e} steps, more than {_MOST_STEPS:.0e}: give the network as levels, "
            "such as machines of 8 workers [(8, bandwidth), (workers / 8, bandwidth)], or lower "
            "max_states"
        )


def _levels(levels: Sequence[tuple[int, float]] | Cluster, latency: float | None) -> list[Level]:
    if latency is not None:
        check_finite("latency", latency)
    if isinstance(levels, Cluster):
        network = levels.network
        if levels.speeds is not None and len(set(levels.speeds)) > 1:
            raise ValueError(
                f"a partition is for workers of one speed, but the cluster's are {levels.speeds}; "
                "give levels=cluster.network.levels(workers) to take them for equal"
            )
        pairs = network.levels(levels.workers)
        if network.inside is None or network.per_node == 1:
            latencies = [network.link_time.alpha]
        elif len(pairs) == 1:
            latencies = [network.inside.alpha]
        else:
            latencies = [network.inside.alpha, network.link_time.alpha]
        if latency is not None:
            latencies = [latency] * len(pairs)
    else:
        if isinstance(levels, str) or not isinstance(levels, Sequence) or not levels:
            raise ValueError(
                "levels is a list of (components, bandwidth in bytes/s), the innermost level "
                f"first, with at least one of them, got {levels!r}"
            )
        pairs = list(levels)
        latencies = [latency or 0.0] * len(pairs)
    network_levels = []
    for number, (pair, seconds) in enumerate(zip(pairs, latencies, strict=True)):
        if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise ValueError(
                f"levels[{number}] must be (components, bandwidth in bytes/s), got {pair!r}"
            )
        check_integer(f"the components of levels[{number}]", pair[0], 1)
        if pair[1] != math.inf:
            check_finite(f"the bandwidth of levels[{number}]", pair[1], positive=True)
        network_levels.append(Level(operator.index(pair[0]), float(pair[1]), seconds))
    return network_levels
