"""What users ask of a pipeline, checked; and the stages of it: measured, or as given."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from horovod.common.process_sets import ProcessSet

from hvd_pipe.pipeline.transport import Layout, check_transport
from hvd_pipe.planning._checks import check_count
from hvd_pipe.planning.cluster import Cluster, Link, Network
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.pipeline_plans import (
    PipelineCost,
    Planner,
    coalesced,
    fewest_microbatches,
    scheduled,
)
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.schedule import Mode, Worker, mode_named
from hvd_pipe.planning.stages import Partition, parse_replicas
from hvd_pipe.runtime.consensus import Agreement, Description


def read_plan(
    plan: str | os.PathLike[str] | Partition, workers: int
) -> Partition | tuple[int, ...] | None:
    """Return the stages or the replicas that ``plan=`` names; None for "auto"."""
    if plan == "auto":
        return None
    if not isinstance(plan, str | os.PathLike | Partition):
        raise TypeError(
            f"plan must be 'auto', 'straight', replicas as in '3-1', a Partition, or the path of "
            f"a saved one, got {plan!r}"
        )
    if isinstance(plan, str | os.PathLike):
        text = os.fspath(plan)
        if not (os.sep in text or text.endswith(".json")):
            return parse_replicas(text, workers)
        plan = Partition.load(Path(text))
    if sum(plan.replicas) != workers:
        raise ValueError(
            f"the plan {plan.config} is for {sum(plan.replicas)} workers, but the job has "
            f"{workers}: start as many, or let plan='auto' find another"
        )
    return plan


@dataclass
class Options:
    """The arguments that `PipeDream` of both frameworks has, by their names."""

    model: Any
    loss_fn: Callable[[Any, Any], Any]
    optimizer_fn: Callable[..., Any]
    plan: str | os.PathLike[str] | Partition
    mode: str
    microbatches: int | None
    transport: str
    in_transit: int | None
    recompute: bool
    wire_dtype: str | None
    scale_lr: bool
    max_grad_norm: float | None
    metric_fn: Callable[[Any, Any], Any] | None
    profile: ModelProfile | str | os.PathLike[str] | None
    bandwidth: float | None
    memory_bytes: float | None
    progress: bool

    @property
    def chosen_mode(self) -> Mode:
        """What ``mode`` names."""
        return mode_named(self.mode)

    def check(self, workers: int) -> Description:
        """Check them, and return what ranks must have alike."""
        mode = self.chosen_mode
        plan = read_plan(self.plan, workers)
        for name in ("loss_fn", "optimizer_fn"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} must be a function, got {getattr(self, name)!r}")
        check_function("metric_fn", self.metric_fn)
        check_transport(self.transport)
        if self.wire_dtype not in {None, "bfloat16"}:
            raise ValueError(f"wire_dtype must be None or 'bfloat16', got {self.wire_dtype!r}")
        for name in ("max_grad_norm", "bandwidth", "memory_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | None):
                raise TypeError(f"{name} must be a number or None, got {value!r}")
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be finite and above 0, got {value}")
        self._check_microbatches(mode)
        if self.in_transit is not None:
            check_count("in_transit", self.in_transit, least=0)
        if self.profile is not None and not isinstance(self.profile, ModelProfile):
            self.profile = ModelProfile.read(self.profile)
        names = ("transport", "recompute", "wire_dtype", "scale_lr", "max_grad_norm", "bandwidth")
        shown = [f"{name}={getattr(self, name)}" for name in names]
        shown += [f"{name}={getattr(self, name) is not None}" for name in ("profile", "metric_fn")]
        if isinstance(plan, Partition):
            spelt = plan.to_json()
        else:
            spelt = "auto" if plan is None else "-".join(map(str, plan))
        return [
            ("the mode of the pipeline", self.mode),
            ("the plan of the pipeline", spelt),
            ("microbatches", str(self.microbatches)),
            ("in_transit", str(self.in_transit)),
            ("the pipeline's options", ", ".join(shown)),
        ]

    def _check_microbatches(self, mode: Mode) -> None:
        count = self.microbatches
        if count is None:
            return
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"microbatches must be an integer or None, got {count!r}")
        if count < 1:
            raise ValueError(f"microbatches must be at least 1, got {count}")
        if count > 1 and not mode.coalesces:
            raise ValueError(
                f"mode {mode.name!r} updates after every minibatch, so it has no microbatches, "
                f"got {count}: give the loader a smaller batch_size, or take mode='2bw' or 'flush'"
            )


def check_function(name: str, value: Any) -> None:
    """Check a function that may be left out."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function or None, got {value!r}")


@dataclass(frozen=True)
class Assignment:
    """What a plan means for one worker."""

    partition: Partition
    mode: Mode
    rank: int
    microbatches: int
    lr_scale: float

    @property
    def layout(self) -> Layout:
        """The ranks of all workers."""
        return Layout(self.partition.replicas)

    @property
    def worker(self) -> Worker:
        """This rank's worker."""
        return self.layout.worker(self.rank)

    @property
    def is_last(self) -> bool:
        """Whether its stage computes the loss."""
        return self.worker.stage == self.layout.stages - 1


def assign(options: Options, partition: Partition, rank: int) -> Assignment:
    """Return the assignment of a rank."""
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
    bandwidth, latency = options.bandwidth or math.inf, 0.0
    is_given = isinstance(read_plan(options.plan, workers), Partition)
    if options.bandwidth is None and workers > 1 and not is_given:
        bandwidth, latency = link_of(comm(), workers)

    def find() -> str:
        memory = None if options.memory_bytes is None else int(options.memory_bytes)
        network = Network(Link(latency, 1.0 / bandwidth))
        cluster = Cluster(workers, network, memory_bytes=memory)
        partition, why = choose(options, profile, cluster, optimizer_ratio())
        if options.progress:
            print(f"{partition}\n{why}", flush=True)
        return partition.to_json()

    return Partition.from_json(agreement.found_by_first(find, "hvd_pipe.pipeline.plan", ranks))


def choose(
    options: Options,
    profile: Callable[[int], ModelProfile],
    cluster: Cluster,
    optimizer_ratio: float,
) -> tuple[Partition, str]:
    """Return the stages, with the memory that the mode takes, and why it is these."""
    wanted, in_transit = read_plan(options.plan, cluster.workers), options.in_transit
    given = wanted if isinstance(wanted, Partition) else None
    if given is not None and in_transit in (None, given.in_transit):
        return given, "as given"
    mode = options.chosen_mode
    pieces = (options.microbatches or cluster.workers) if mode.coalesces else 1
    known = options.profile
    model = known if isinstance(known, ModelProfile) else profile(pieces)
    replicas = wanted if isinstance(wanted, tuple) else None
    asked = "the best cuts for these replicas" if replicas else "the fastest plan"
    planner = Planner(model, cluster, mode.name, optimizer_ratio, in_transit)
    partition = given or planner.best(replicas)
    count = options.microbatches or usual_microbatches(mode, partition.replicas, in_transit or 0)
    whole, plan = coalesced(model, partition, pieces)
    plan, cost = scheduled(
        plan,
        whole,
        cluster,
        mode=mode.name,
        microbatches=count,
        optimizer_bytes_per_parameter_byte=optimizer_ratio,
        recompute=options.recompute,
        in_transit=in_transit,
    )
    _check_memory(cost, cluster)
    stages = [
        replace(stage, memory_bytes=memory)
        for stage, memory in zip(partition.stages, cost.memory_bytes, strict=True)
    ]
    partition = replace(partition.with_in_transit(plan.in_transit), stages=tuple(stages))
    in_flight = "-".join(map(str, plan.in_flight))
    transit = f" (in_transit={plan.in_transit})" if plan.in_transit else ""
    megabytes = max(cost.memory_bytes) / 1e6
    held = f"{in_flight} are in flight, by stage{transit}, for {megabytes:.1f} MB a worker"
    if given is not None:  # nobody has measured the links
        return partition, f"as given; {held}"
    period, parallel, single = (
        f"{1e3 * seconds:.4g} ms"
        for seconds in (cost.period_s / pieces, partition.data_parallel_s, partition.single_s)
    )
    parallel_bytes = cost.data_parallel_bytes * pieces
    saved = 1.0 - cost.wire_bytes / parallel_bytes if parallel_bytes else 0.0
    staleness = "-".join(str(stage.staleness) for stage in cost.held)
    why = (
        f"{mode.name}: {asked} over links of {cluster.network.link_time.bandwidth * 8e-9:.3g} "
        f"Gbit/s; {period} a {'micro' if pieces > 1 else 'mini'}batch are predicted, where data "
        f"parallelism would take {parallel} and one worker {single}; {held}; gradients are "
        f"{staleness} updates late, by stage; {saved:.0%} less is sent than by data parallelism"
    )
    return replace(partition, simulated_s=cost.period_s / pieces), why


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
    """Return bytes/s and latency of links on which a ring's all-reduces take what was measured."""
    small, large = 2**20, 2**23
    nbytes, seconds = large - small, float(comm(large)) - float(comm(small))
    if seconds < 0.2 * float(comm(large)):  # nothing but noise: take all as transfer
        nbytes, seconds = large, float(comm(large))
    bandwidth = 2 * (workers - 1) / workers * nbytes / seconds
    return bandwidth, max(0.0, float(comm(1)) / (2 * (workers - 1)))
