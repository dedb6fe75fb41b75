"""A worker's part of a pipeline, from the first minibatch on: all ranks build together.

trace the model | plan on rank 0 | cut | connect the ranks | optimizer, stage, session
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Average, Sum, allreduce_, global_process_set, rank
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from hvd_pipe.pipeline.layout import Layout
from hvd_pipe.pipeline.messages import Boundary, TensorSpec
from hvd_pipe.pipeline.norms import Clipping, Norms
from hvd_pipe.pipeline.plans import plan_together, usual_microbatches
from hvd_pipe.pipeline.process_sets import make_process_sets
from hvd_pipe.pipeline.runner import Session
from hvd_pipe.pipeline.spans import PipelineSpans
from hvd_pipe.pipeline.transport import channels_of, open_transport
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.schedule import schedule
from hvd_pipe.planning.stages import Partition
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.torch.agree import Description, agreement
from hvd_pipe.torch.horovod_api import broadcast_parameters
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.measuring.clock import agree_on_clock
from hvd_pipe.torch.measuring.probes import measure_comm
from hvd_pipe.torch.optimizer import DistributedOptimizer
from hvd_pipe.torch.pipedream.cut import StageModule, cut
from hvd_pipe.torch.pipedream.graph import Traced, trace
from hvd_pipe.torch.pipedream.measure import profile
from hvd_pipe.torch.pipedream.options import Options
from hvd_pipe.torch.pipedream.shapes import specs
from hvd_pipe.torch.pipedream.stage import Losses, TorchStage
from hvd_pipe.torch.pipedream.tensors import Messages, split, start
from hvd_pipe.torch.pipedream.weights import Updates, add

__all__ = ["Built", "build"]

LARGEST_MESSAGE = 2**23  # bytes, when the network is measured
BUCKETS, LEAST_BUCKET_BYTES = 8, 2**15  # of a replicated stage


@dataclass
class Built:
    """A worker's part of a pipeline."""

    options: Options
    session: Session
    stage: TorchStage
    updates: Updates
    scheduler: Any | None
    """Where it moves with epochs."""
    partition: Partition
    replicas: ProcessSet | None
    """The ranks of this stage; None where there is one."""
    layers: tuple[str, ...]
    """Names of all the model's, in order."""
    owners: dict[str, int]
    """The stage that holds each entry of the model's state."""
    unused: dict[str, Any]
    """Entries that the model's forward never uses."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    lr_scale: float
    piece_samples: int
    """Samples of the largest microbatch."""
    spans: PipelineSpans | None

    @property
    def any_scheduler(self) -> Any | None:
        """The scheduler, whatever moves it on."""
        return self.scheduler or self.updates.scheduler

    @property
    def layout(self) -> Layout:
        """Which rank is who."""
        return self.session.layout

    def average_statistics(self) -> None:
        """Average BatchNorm's statistics over the replicas of the stage."""
        if self.replicas is None:
            return
        for name, buffer in self.stage.module.named_buffers():
            if buffer.is_floating_point():
                # In double precision, so that what is alike, as constants are, stays as it is.
                mean = allreduce_(
                    buffer.double(),
                    op=Average,
                    name=f"hvd_pipe.pipeline.buffers.{name}",
                    process_set=self.replicas,
                )
                buffer.data.copy_(mean)


def build(options: Options, batch: Any) -> Built:
    """Build this worker's part; all ranks do this at the same time, with their first minibatch.

    Raises:
        TypeError, ValueError, HvdPipeError: The model, the minibatch or the plan cannot be.
    """
    state = dict(options.state())
    broadcast_parameters({k: v.detach() for k, v in state.items()}, root_rank=0)
    shapes = {name: (tuple(x.shape), x.dtype) for name, x in state.items()}
    device = next(x.device for x in state.values())
    divided = _divided(options, batch, device)
    partition, own = divided.partition, divided.own
    unused = {k: v.detach().cpu().clone() for k, v in state.items() if k not in divided.owners}
    del state
    _forget(options.modules(), own.module)

    mode, layout = options.chosen_mode, Layout(partition.replicas)
    worker = layout.worker(rank())
    microbatches = _microbatches(options, layout)
    lr_scale = 1.0
    if options.scale_lr and not mode.coalesces:
        lr_scale = layout.replicas[worker.stage] / layout.replicas[0]
    optimizer, scheduler = agreement.checked(
        lambda: (_optimizer(options, own.module, lr_scale), []),
        "hvd_pipe.pipeline.optimizer",
        global_process_set,
    )
    short = options.wire_dtype is not None
    before, after = (
        Boundary(crossing, lambda x: Messages(x, layout.stages, str(worker), short, device))
        if crossing
        else None
        for crossing in (divided.arriving, own.outputs)
    )
    groups = [layout.ranks(s) for s, width in enumerate(layout.replicas) if width > 1]
    sets = make_process_sets(groups, global_process_set)
    replicas = sets.get(layout.ranks(worker.stage))
    sizes = (None if side is None else side.capacities for side in (before, after))
    transport = open_transport(
        list(channels_of(layout, rank(), *sizes)),
        options.transport,
        mpi_ops,
        agreement,
        global_process_set,
        start,
    )
    spans = _spans()
    share = microbatches // layout.replicas[worker.stage] if mode.coalesces else 1
    if optimizer is not None and replicas is not None:
        optimizer = DistributedOptimizer(
            optimizer,
            [(n, p) for n, p in own.module.named_parameters() if p.requires_grad],
            op=Sum if mode.coalesces else Average,
            backward_passes_per_step=share,
            process_set=replicas,
            strategy=MergedGradient(bucket_bytes=_bucket_bytes(own.module)),
        )
    by_minibatch = options.schedule_by == "minibatch"
    trained_by = replicas if optimizer is not None else None
    updates = Updates(
        optimizer,
        scheduler if by_minibatch else None,
        trained_by,
        Clipping(
            options.max_grad_norm,
            mode.synchronous,
            Norms(worker.stage, layout.stages),
            trained_by,
            global_process_set,
            add,
        ),
        mean=not mode.coalesces,
    )
    losses = Losses(options.loss_fn, options.metric_fn, shared=mode.coalesces)
    stage = TorchStage(
        own,
        losses if worker.stage == layout.stages - 1 else None,
        updates,
        before,
        after,
        options.recompute,
        transport.recycle,
        device,
    )
    session = Session(
        layout,
        rank(),
        mode,
        microbatches,
        transport,
        agreement,
        global_process_set,
        options.metric_fn is not None,
    )
    return Built(
        options,
        session,
        stage,
        updates,
        None if by_minibatch else scheduler,
        partition,
        replicas,
        divided.layers,
        divided.owners,
        unused,
        shapes,
        lr_scale,
        divided.samples,
        spans,
    )


@dataclass(frozen=True)
class _Divided:
    """A model in stages: all of them, this worker's own, and what arrives there.

    Args:
        partition, own, arriving: These.
        layers: Of the whole model, in order.
        owners: Which stage holds each entry of the state.
        samples: Of the largest microbatch.
    """

    partition: Partition
    own: StageModule
    arriving: tuple[TensorSpec, ...]
    layers: tuple[str, ...]
    owners: dict[str, int]
    samples: int


def _divided(options: Options, batch: Any, device: torch.device) -> _Divided:
    """Plan, and cut the model."""

    def look() -> tuple[Traced, Description]:
        traced = trace(options.model, len(split(batch, 1)[0].inputs))
        return traced, [("layers of the model", ", ".join(x.name for x in traced.layers))]

    traced = agreement.checked(look, "hvd_pipe.pipeline.look", global_process_set)
    partition = _plan(options, traced, batch, device)
    layout = Layout(partition.replicas)
    microbatches = _microbatches(options, layout)

    def divide() -> tuple[tuple[list[StageModule], int], Description]:
        schedule(options.chosen_mode.method, layout.replicas, 1, microbatches)  # whether it can be
        piece = split(batch, microbatches)[0]
        values = specs(traced, _moved(piece.inputs, device))
        cuts = cut(traced, [stage.layers for stage in partition.stages], values)
        crossing = [(f"tensor {spec.name}", str(spec)) for one in cuts for spec in one.outputs]
        return (cuts, piece.samples), crossing

    cuts, samples = agreement.checked(divide, "hvd_pipe.pipeline.cut", global_process_set)
    stage = layout.worker(rank()).stage
    owners = {name: s for s, one in enumerate(cuts) for name in one.module.state_dict()}
    arriving = cuts[stage - 1].outputs if stage else ()
    layers = tuple(layer.name for layer in traced.layers)
    return _Divided(partition, cuts[stage], arriving, layers, owners, samples)


def _microbatches(options: Options, layout: Layout) -> int:
    return options.microbatches or usual_microbatches(options.chosen_mode, layout.replicas)


def _plan(options: Options, traced: Traced, batch: Any, device: torch.device) -> Partition:
    def measured(pieces: int) -> ModelProfile:
        inputs = _moved(split(batch, pieces)[0].inputs, device)
        return profile(traced, inputs, progress=options.progress)

    def comm() -> CommModel:
        return measure_comm(LARGEST_MESSAGE, device, global_process_set, "hvd_pipe.pipeline.comm")

    return plan_together(
        options, measured, comm, lambda: _state_ratio(options), agreement, global_process_set
    )


def _state_ratio(options: Options) -> float:
    """Return the bytes of optimizer state a byte of parameters, by a small trial."""
    trial = nn.Parameter(torch.zeros(64))
    optimizer = _made(options, [trial])
    trial.grad = torch.zeros_like(trial)
    optimizer.step()
    found = [x for x in tree_leaves(dict(optimizer.state)) if isinstance(x, torch.Tensor)]
    return sum(x.numel() for x in found if x.numel() == trial.numel()) / trial.numel()


def _made(options: Options, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = options.optimizer_fn(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer_fn must return a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    return optimizer


def _optimizer(options: Options, module: nn.Module, lr_scale: float) -> tuple[Any, Any]:
    """Make the stage's optimizer and scheduler; None where there is nothing to train."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters:
        return None, None
    optimizer = _made(options, parameters)
    own = {id(p) for p in parameters}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "optimizer_fn's optimizer has parameters that are not of its stage: make it from the "
            "list that optimizer_fn is called with, lambda parameters: SGD(parameters, lr=0.1)"
        )
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * lr_scale
    scheduler = None if options.scheduler_fn is None else options.scheduler_fn(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "scheduler_fn must return a scheduler that moves on without a metric, got "
            "ReduceLROnPlateau: lower the rate of engine.optimizer by train_epoch's loss yourself."
        )
    return optimizer, scheduler


def _bucket_bytes(module: nn.Module) -> int:
    """Return how large a replicated stage's messages are.

    They leave while backward goes on, but for the last one, and compete with activations for the
    links, which a plan made on an idle network does not know: a few messages, none of them large.
    """
    nbytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    return max(LEAST_BUCKET_BYTES, nbytes // BUCKETS)


def _forget(modules: Sequence[nn.Module], kept: nn.Module) -> None:
    """Free the memory of what other workers hold."""
    keep = {id(x) for x in (*kept.parameters(), *kept.buffers())}
    for module in (inner for outer in modules for inner in outer.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in keep:
                # By setattr, as some modules have lists of their own of them.
                empty = parameter.detach().to("meta")
                setattr(module, name, nn.Parameter(empty, parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            if id(buffer) not in keep:
                setattr(module, name, buffer.to("meta"))


def _spans() -> PipelineSpans | None:
    """Join the timeline, where one is asked for, before an optimizer of some ranks does."""
    recorder = timeline.active
    if recorder is None:
        return None
    recorder.set_clock(agree_on_clock(global_process_set))
    return PipelineSpans(recorder)


def _moved(inputs: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    return tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs)
