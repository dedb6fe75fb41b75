"""A worker's part of a pipeline, and the steps that both frameworks take to build it.

::

    weights from rank 0 | plan on rank 0 | cut | connect the ranks | optimizer, stage, runner
                          plans.py         divide    connect      hvd_pipe.*.pipedream.build
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod.common.process_sets import ProcessSet

from hvd_pipe.pipeline.messages import Boundary, Messages, TensorSpec
from hvd_pipe.pipeline.plans import Assignment, Options, assign, plan_together
from hvd_pipe.pipeline.process_sets import ProcessSetTransport, Start
from hvd_pipe.pipeline.stage import Add, Clipping, Norms
from hvd_pipe.pipeline.transport import MOST_BYTES, Channel, Transport, channels_of, chosen
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.schedule import schedule
from hvd_pipe.runtime.consensus import Agreement, Description
from hvd_pipe.runtime.process_sets import make_process_sets


@dataclass(frozen=True)
class Framework:
    """What pipelines need of a framework's Horovod."""

    horovod: Any
    agreement: Agreement
    ranks: ProcessSet
    start: Start
    add: Add


def divide(
    options: Options,
    framework: Framework,
    profile: Callable[[int], ModelProfile],
    comm: Callable[[], CommModel],
    optimizer_ratio: Callable[[], float],
    cut: Callable[[Assignment], tuple[list[Any], int]],
) -> tuple[Assignment, list[Any], int]:
    """Plan, cut the model on every rank, and see that all have the same cuts.

    `cut` returns the stages, and the samples of a microbatch.
    """
    agreement, ranks = framework.agreement, framework.ranks
    partition = plan_together(options, profile, comm, optimizer_ratio, agreement, ranks)
    one = assign(options, partition, int(framework.horovod.rank()))

    def cut_here() -> tuple[tuple[list[Any], int], Description]:
        method, replicas = one.mode.method, partition.replicas
        schedule(method, replicas, 1, one.microbatches, partition.in_transit)  # refuses some
        stages, samples = cut(one)
        crossing = [spec for stage in stages for spec in stage.outputs]
        return (stages, samples), [(f"tensor {spec.name}", str(spec)) for spec in crossing]

    return one, *agreement.checked(cut_here, "hvd_pipe.pipeline.cut", ranks)


@dataclass(frozen=True)
class Connections:
    """What connects a worker to the others."""

    assignment: Assignment
    framework: Framework
    before: Boundary | None
    after: Boundary | None
    replicas: ProcessSet | None
    transport: Transport

    def clipping(self, most: float | None, replicas: ProcessSet | None) -> Clipping:
        """Return what clips gradients by their norm over all stages."""
        one, framework = self.assignment, self.framework
        norms = Norms(one.worker.stage, one.layout.stages)
        return Clipping(
            most, one.mode.synchronous, norms, replicas, framework.ranks, framework.add
        )


def connect(
    assignment: Assignment,
    framework: Framework,
    transport: str,
    sides: tuple[Sequence[TensorSpec], Sequence[TensorSpec]],
    messages: Callable[[Sequence[TensorSpec]], Messages],
) -> Connections:
    """Connect this worker to its neighbours and to its stage's replicas; all ranks call this."""
    layout, rank = assignment.layout, assignment.rank
    before, after = (Boundary(specs, messages) if specs else None for specs in sides)
    groups = [layout.ranks(s) for s, width in enumerate(layout.replicas) if width > 1]
    sets = make_process_sets(groups, framework.ranks, _NEEDED)
    sizes = (None if side is None else side.capacities for side in (before, after))
    opened = open_transport(list(channels_of(layout, rank, *sizes)), transport, framework)
    replicas = sets.get(layout.ranks(assignment.worker.stage))
    return Connections(assignment, framework, before, after, replicas, opened)


def open_transport(channels: Sequence[Channel], transport: str, framework: Framework) -> Transport:
    """Connect the ranks of a job; all of them call this at the same time."""
    horovod, agreement, world = framework.horovod, framework.agreement, framework.ranks

    def check() -> tuple[str, Description]:
        name = chosen(transport, bool(horovod.mpi_enabled()))
        if name == "mpi":
            from hvd_pipe.pipeline import mpi  # noqa: PLC0415 - there may be no mpi4py

            mpi.check(int(horovod.rank()), int(horovod.size()))
        for channel in channels:
            if not 0 < channel.capacity <= MOST_BYTES:
                raise ValueError(
                    f"rank {horovod.rank()} has {channel} of up to {channel.capacity} bytes; a "
                    f"message can have 1 to {MOST_BYTES}: use smaller microbatches"
                )
        return name, [("the transport of the pipeline", name)]

    name = agreement.checked(check, "hvd_pipe.pipeline.transport", world)
    peers = agreement.gather([one.peer for one in channels], "hvd_pipe.pipeline.channels", world)
    pairs = {(min(a, b), max(a, b)) for a, others in enumerate(peers) for b in others}

    def barrier() -> None:
        agreement.gather(None, "hvd_pipe.pipeline.close", world)

    if name == "mpi":
        from hvd_pipe.pipeline import mpi  # noqa: PLC0415

        return mpi.MpiTransport(channels, barrier)

    def make_sets() -> tuple[Mapping[tuple[int, ...], ProcessSet], Description]:
        # All ranks fail together, or one that has left shuts Horovod down under the others.
        return make_process_sets(sorted(pairs), world, _NEEDED), []

    sets = agreement.checked(make_sets, "hvd_pipe.pipeline.process_sets", world)
    return ProcessSetTransport(channels, int(horovod.rank()), sets, framework.start, barrier)


_NEEDED = (
    "a pipeline needs a Horovod process set for the replicas of each stage and, without "
    "MPI, for each two neighbours; Horovod was initialised so that none can be added: "
    'call pipedream.init() in place of hvd.init(), or hvd.init(process_sets="dynamic").'
)
