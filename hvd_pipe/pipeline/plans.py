"""From what the user asks for to the stages: measured, or as given; and the words that say why."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from horovod.common.process_sets import ProcessSet

from hvd_pipe.pipeline.options import Options, Request, read_plan
from hvd_pipe.pipeline.transport import Layout
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.instructions import Worker
from hvd_pipe.planning.pipeline_cost import PipelineCost, coalesced, fewest_microbatches
from hvd_pipe.planning.pipeline_plans import best_plan, scheduled
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.schedule import Mode
from hvd_pipe.planning.stages import Partition
from hvd_pipe.runtime.consensus import Agreement

__all__ = [
    "Assignment",
    "assign",
    "choose",
    "link_of",
    "plan_together",
    "usual_microbatches",
]


LEAST_SHARE = 0.2
"""Of a large all-reduce's time, what a difference of two must be to mean anything."""


@dataclass(frozen=True)
class Assignment:
    """What a plan means for one worker.

    Args:
        partition: All stages.
        mode: When weights are updated.
        rank: The worker's.
        microbatches: Of a minibatch; 1 in the modes that have none.
        lr_scale: What its learning rates are multiplied with.
    """

    partition: Partition
    mode: Mode
    rank: int
    microbatches: int
    lr_scale: float

    @property
    def layout(self) -> Layout:
        """Which rank is who."""
        return Layout(self.partition.replicas)

    @property
    def worker(self) -> Worker:
        """Who this is."""
        return self.layout.worker(self.rank)

    @property
    def is_last(self) -> bool:
        """Whether its stage computes the loss."""
        return self.worker.stage == self.layout.stages - 1


def assign(options: Options, partition: Partition, rank: int) -> Assignment:
    """Return what this rank does."""
    mode, replicas = options.chosen_mode, partition.replicas
    scaled = options.scale_lr and not mode.coalesces
    width = replicas[Layout(replicas).worker(rank).stage]
    return Assignment(
        partition,
        mode,
        rank,
        options.microbatches or usual_microbatches(mode, replicas, partition.in_transit),
        lr_scale=width / replicas[0] if scaled else 1.0,
    )


def plan_together(
    options: Options,
    profile: Callable[[int], ModelProfile],
    comm: Callable[[], CommModel],
    optimizer_ratio: Callable[[], float],
    agreement: Agreement,
    ranks: ProcessSet,
) -> Partition:
    """Measure what must be known, find the stages on rank 0, and tell all ranks."""
    workers = int(ranks.size())
    request = read_plan(options.plan, workers)
    bandwidth, latency = options.bandwidth or math.inf, 0.0
    if options.bandwidth is None and request.stages is None and workers > 1:
        bandwidth, latency = link_of(comm(), workers)
    pieces = (options.microbatches or workers) if options.chosen_mode.coalesces else 1

    def measured() -> ModelProfile:
        return options.profile if isinstance(options.profile, ModelProfile) else profile(pieces)

    def find() -> str:
        memory = None if options.memory_bytes is None else int(options.memory_bytes)
        network = Network(Link(latency, 1.0 / bandwidth))
        found, why = choose(
            request,
            measured,
            Cluster(workers, network, memory_bytes=memory),
            options.chosen_mode,
            optimizer_ratio(),
            pieces,
            options.microbatches,
            options.recompute,
            options.in_transit,
        )
        if options.progress:
            print(f"{found}\n{why}", flush=True)
        return found.to_json()

    return Partition.from_json(agreement.found_by_first(find, "hvd_pipe.pipeline.plan", ranks))


def choose(
    request: Request,
    profile: Callable[[], ModelProfile],
    cluster: Cluster,
    mode: Mode,
    optimizer_ratio: float,
    pieces: int,
    microbatches: int | None,
    recompute: bool,
    in_transit: int | None = None,
) -> tuple[Partition, str]:
    """Return the stages, with the memory that the mode takes, and why it is these."""
    given = request.stages
    if given is not None and in_transit in (None, given.in_transit):
        return given, "as given"
    model = profile()
    settled = request.replicas is not None
    asked = "the best cuts for these replicas" if settled else "the fastest plan"
    found = given or best_plan(
        model, cluster, mode.name, optimizer_ratio, in_transit, replicas=request.replicas
    )
    count = microbatches or usual_microbatches(mode, found.replicas, in_transit or 0)
    whole, plan = coalesced(model, found, pieces)
    plan, cost = scheduled(
        plan,
        whole,
        cluster,
        mode=mode.name,
        microbatches=count,
        optimizer_bytes_per_parameter_byte=optimizer_ratio,
        recompute=recompute,
        in_transit=in_transit,
    )
    _check_memory(cost, cluster)
    stages = [
        replace(stage, memory_bytes=memory)
        for stage, memory in zip(found.stages, cost.memory_bytes, strict=True)
    ]
    found = replace(found.with_in_transit(plan.in_transit), stages=tuple(stages))
    held = f"{_in_flight(plan)}, for {max(cost.memory_bytes) / 1e6:.1f} MB a worker"
    if given is not None:  # nobody has measured the links
        return found, f"as given; {held}"
    period, parallel, single = (
        f"{1e3 * seconds:.4g} ms"
        for seconds in (cost.period_s / pieces, found.data_parallel_s, found.single_s)
    )
    parallel_bytes = cost.data_parallel_bytes * pieces
    saved = 1.0 - cost.wire_bytes / parallel_bytes if parallel_bytes else 0.0
    staleness = "-".join(str(one.staleness) for one in cost.held)
    why = (
        f"{mode.name}: {asked} over links of {cluster.network.link_time.bandwidth * 8e-9:.3g} "
        f"Gbit/s; {period} a {'micro' if pieces > 1 else 'mini'}batch are predicted, where data "
        f"parallelism would take {parallel} and one worker {single}; {held}; gradients are "
        f"{staleness} updates late, by stage; {saved:.0%} less is sent than by data parallelism"
    )
    return replace(found, simulated_s=cost.period_s / pieces), why


def _in_flight(plan: Partition) -> str:
    """How many minibatches are in flight, and why.

    Example:
        >>> from hvd_pipe.planning.stages import Stage
        >>> two = (Stage(("fc",), 1, 0.1, 64, 0, 0, 128, 0.1),) * 2
        >>> plan = Partition(two, 2, 0.1, 0.2, 0.2, "paper", (2, 1))
        >>> _in_flight(plan), _in_flight(plan.with_in_transit(1))
        ('2-1 are in flight, by stage', '3-1 are in flight, by stage (in_transit=1)')
    """
    counts = "-".join(map(str, plan.in_flight))
    more = f" (in_transit={plan.in_transit})" if plan.in_transit else ""
    return f"{counts} are in flight, by stage{more}"


def _check_memory(cost: PipelineCost, cluster: Cluster) -> None:
    """Refuse what does not fit: the search counts no more versions than "stash" needs."""
    limit, most = cluster.memory_bytes, max(cost.memory_bytes)
    if limit is not None and most > limit:
        stage = cost.memory_bytes.index(most)
        raise ValueError(
            f"stage {stage} of {len(cost.memory_bytes)} would hold {most} bytes a worker in mode "
            f"{cost.mode!r}, more than memory_bytes = {limit}: take mode='2bw' or 'flush', "
            "recompute=True, a smaller minibatch, or more workers"
        )


def usual_microbatches(mode: Mode, replicas: Sequence[int], in_transit: int = 0) -> int:
    """Return the fewest microbatches that fill the pipeline and that replicas can share.

    Example:
        >>> from hvd_pipe.planning.schedule import MODES
        >>> [usual_microbatches(MODES[mode], (2, 1)) for mode in ("stash", "2bw", "flush")]
        [1, 4, 4]
    """
    if not mode.coalesces:
        return 1
    return fewest_microbatches("2bw", replicas, in_transit=in_transit)


def link_of(comm: CommModel, workers: int) -> tuple[float, float]:
    """Return bytes/s and latency of links on which a ring's all-reduces take what was measured.

    A ring sends ``2 (n-1)/n`` of the bytes over each link, in ``2 (n-1)`` messages.
    """
    small, large = 2**20, 2**23
    nbytes, seconds = large - small, float(comm(large)) - float(comm(small))
    if seconds < LEAST_SHARE * float(comm(large)):  # nothing but noise: take all as transfer
        nbytes, seconds = large, float(comm(large))
    bandwidth = 2 * (workers - 1) / workers * nbytes / seconds
    return bandwidth, max(0.0, float(comm(1)) / (2 * (workers - 1)))
