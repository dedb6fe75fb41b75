"""A worker's part of a pipeline, from the first minibatch on: all ranks build together.

trace the model | plan on rank 0 | cut | connect the ranks | optimizer, stage, session
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.common.process_sets import ProcessSet
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Average, Sum, allreduce_, global_process_set, rank
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from hvd_pipe.pipeline.build import (
    BuiltPipeline,
    Connections,
    Framework,
    connect,
    cut_together,
)
from hvd_pipe.pipeline.messages import TensorSpec
from hvd_pipe.pipeline.options import Options, check_function
from hvd_pipe.pipeline.plans import Assignment, assign, plan_together
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.stages import Partition
from hvd_pipe.runtime.timeline import Recorder
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.torch.agree import Description, agree_on_clock, agreement
from hvd_pipe.torch.horovod_api import broadcast_parameters
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.measuring.probes import measure_comm
from hvd_pipe.torch.optimizer import DistributedOptimizer
from hvd_pipe.torch.pipedream.cut import StageModule, cut
from hvd_pipe.torch.pipedream.graph import Traced, trace
from hvd_pipe.torch.pipedream.measure import profile
from hvd_pipe.torch.pipedream.shapes import specs
from hvd_pipe.torch.pipedream.stage import Losses, TorchStage, moved
from hvd_pipe.torch.pipedream.tensors import TorchMessages, split, start
from hvd_pipe.torch.pipedream.weights import Updates, add

__all__ = ["FRAMEWORK", "TorchOptions", "TorchPipeline", "build"]

LARGEST_MESSAGE = 2**23  # bytes, when the network is measured
BUCKETS, LEAST_BUCKET_BYTES = 8, 2**15  # of a replicated stage


@dataclass
class TorchOptions(Options):
    """The arguments of :class:`hvd_pipe.torch.pipedream.PipeDream`, by their names."""

    scheduler_fn: Callable[[torch.optim.Optimizer], Any] | None
    schedule_by: str

    def modules(self) -> list[nn.Module]:
        """Return the model, or the modules that were given in its place."""
        return [self.model] if isinstance(self.model, nn.Module) else list(self.model)

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's parameters and buffers by their names in its ``state_dict()``."""
        whole = self.model if isinstance(self.model, nn.Module) else nn.Sequential(*self.model)
        yield from whole.state_dict(keep_vars=True).items()

    def check(self, workers: int) -> Description:
        """Check all arguments, and return what ranks must have alike."""
        self._check_model()
        if isinstance(self.optimizer_fn, torch.optim.Optimizer):
            raise TypeError(
                "optimizer_fn makes the optimizer of a stage from its parameters: "
                "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
            )
        alike = super().check(workers)
        check_function("scheduler_fn", self.scheduler_fn)
        if self.schedule_by not in {"epoch", "minibatch"}:
            raise ValueError(
                f"schedule_by must be 'epoch' or 'minibatch', got {self.schedule_by!r}"
            )
        return [
            *alike,
            ("the scheduler", f"{self.scheduler_fn is not None}, by {self.schedule_by}"),
            *((f"{name} of the model", _shape(value)) for name, value in self.state()),
        ]

    def _check_model(self) -> None:
        modules = self.modules()
        wrong = [type(one).__name__ for one in modules if not isinstance(one, nn.Module)]
        if wrong or not modules:
            raise TypeError(
                "model must be an nn.Module, or a list of modules that are called one after the "
                f"other, got {', '.join(wrong) or 'an empty list'}"
            )
        if any(p.is_meta for one in modules for p in one.parameters()):
            raise ValueError(
                "the model has layers on the meta device, which have no values; a pipeline leaves "
                "those of other workers so: build the model anew, and load() a checkpoint into "
                "its pipeline, or load_state_dict(engine.state_dict()) before"
            )
        if not any(p.requires_grad for one in modules for p in one.parameters()):
            raise ValueError("the model has no parameters that require gradients")


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    trained = ", trained" if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{trained}"


FRAMEWORK = Framework(mpi_ops, agreement, global_process_set, start, add)
"""Torch's Horovod."""


@dataclass(kw_only=True)
class TorchPipeline(BuiltPipeline):
    """A worker's part of a pipeline.

    Args:
        options: What the user asks for.
        stage: The worker's layers.
        updates: Of its weights.
        scheduler: Of learning rates, where it moves with epochs.
        replicas: The ranks of this stage; None where there is one.
        layers: Names of all the model's, in order.
        owners: The stage that holds each entry of the model's state.
        unused: Entries that the model's forward never uses.
        shapes: Of all entries, and their dtypes.
    """

    options: TorchOptions
    stage: TorchStage
    updates: Updates
    scheduler: Any | None
    replicas: ProcessSet | None
    layers: tuple[str, ...]
    owners: dict[str, int]
    unused: dict[str, Any]
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]

    @property
    def any_scheduler(self) -> Any | None:
        """The scheduler, whatever moves it on."""
        return self.scheduler or self.updates.scheduler

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


def build(options: TorchOptions, batch: Any) -> TorchPipeline:
    """Build this worker's part; all ranks do this at the same time, with their first minibatch."""
    state = dict(options.state())
    broadcast_parameters({k: v.detach() for k, v in state.items()}, root_rank=0)
    shapes = {name: (tuple(x.shape), x.dtype) for name, x in state.items()}
    device = next(x.device for x in state.values())
    divided = _divided(options, batch, device)
    assignment, module = divided.assignment, divided.own.module
    unused = {k: v.detach().cpu().clone() for k, v in state.items() if k not in divided.owners}
    del state
    _forget(options.modules(), module)
    optimizer, scheduler = agreement.checked(
        lambda: (_optimizer(options, module, assignment.lr_scale), []),
        "hvd_pipe.pipeline.optimizer",
        global_process_set,
    )
    stages, where = assignment.layout.stages, str(assignment.worker)
    connections = connect(
        assignment,
        FRAMEWORK,
        options.transport,
        (divided.arriving, divided.own.outputs),
        lambda specs: TorchMessages(specs, stages, where, options.wire_dtype is not None, device),
    )
    recorder = _recorder()
    by_minibatch = options.schedule_by == "minibatch"
    updates = _updates(
        options, optimizer, scheduler if by_minibatch else None, module, connections
    )
    return TorchPipeline(
        assignment=assignment,
        runner=connections.runner(options.metric_fn is not None),
        stage=_stage(options, divided.own, updates, connections, device),
        most_samples=divided.samples,
        recorder=recorder,
        options=options,
        updates=updates,
        scheduler=None if by_minibatch else scheduler,
        replicas=connections.replicas,
        layers=divided.layers,
        owners=divided.owners,
        unused=unused,
        shapes=shapes,
    )


def _updates(
    options: TorchOptions,
    optimizer: Any | None,
    scheduler: Any | None,
    module: nn.Module,
    connections: Connections,
) -> Updates:
    """Return what updates a stage's weights; its replicas average their gradients."""
    assignment = connections.assignment
    coalesces = assignment.mode.coalesces
    replicas = None if optimizer is None else connections.replicas
    if optimizer is not None and replicas is not None:
        optimizer = DistributedOptimizer(
            optimizer,
            [(n, p) for n, p in module.named_parameters() if p.requires_grad],
            op=Sum if coalesces else Average,
            backward_passes_per_step=(
                assignment.microbatches // replicas.size() if coalesces else 1
            ),
            process_set=replicas,
            strategy=MergedGradient(bucket_bytes=_bucket_bytes(module)),
        )
    clipping = connections.clipping(options.max_grad_norm, replicas)
    return Updates(optimizer, scheduler, replicas, clipping, mean=not coalesces)


def _stage(
    options: TorchOptions,
    own: StageModule,
    updates: Updates,
    connections: Connections,
    device: torch.device,
) -> TorchStage:
    assignment = connections.assignment
    losses = Losses(options.loss_fn, options.metric_fn, shared=assignment.mode.coalesces)
    return TorchStage(
        own,
        losses if assignment.is_last else None,
        updates,
        connections.before,
        connections.after,
        options.recompute,
        connections.transport.recycle,
        device,
    )


@dataclass(frozen=True)
class _Divided:
    """A model in stages: this worker's own with the plan, what arrives there, who holds what."""

    assignment: Assignment
    own: StageModule
    arriving: tuple[TensorSpec, ...]
    layers: tuple[str, ...]
    owners: dict[str, int]
    samples: int


def _divided(options: TorchOptions, batch: Any, device: torch.device) -> _Divided:
    """Plan, and cut the model."""

    def look() -> tuple[Traced, Description]:
        traced = trace(options.model, len(split(batch, 1)[0].inputs))
        return traced, [("layers of the model", ", ".join(x.name for x in traced.layers))]

    traced = agreement.checked(look, "hvd_pipe.pipeline.look", global_process_set)
    partition = _plan(options, traced, batch, device)
    assignment = assign(options, partition, rank())

    def cuts_of() -> tuple[list[StageModule], int]:
        microbatch = split(batch, assignment.microbatches)[0]
        values = specs(traced, moved(microbatch.inputs, device))
        cuts = cut(traced, [stage.layers for stage in partition.stages], values)
        return cuts, microbatch.samples

    cuts, samples = cut_together(assignment, FRAMEWORK, cuts_of)
    stage = assignment.worker.stage
    owners = {name: s for s, one in enumerate(cuts) for name in one.module.state_dict()}
    arriving = cuts[stage - 1].outputs if stage else ()
    layers = tuple(layer.name for layer in traced.layers)
    return _Divided(assignment, cuts[stage], arriving, layers, owners, samples)


def _plan(options: TorchOptions, traced: Traced, batch: Any, device: torch.device) -> Partition:
    def measured(microbatches: int) -> ModelProfile:
        inputs = moved(split(batch, microbatches)[0].inputs, device)
        return profile(traced, inputs, progress=options.progress)

    def comm() -> CommModel:
        return measure_comm(LARGEST_MESSAGE, device, global_process_set, "hvd_pipe.pipeline.comm")

    return plan_together(
        options, measured, comm, lambda: _state_ratio(options), agreement, global_process_set
    )


def _state_ratio(options: TorchOptions) -> float:
    """Return the bytes of optimizer state a byte of parameters, by a small trial."""
    trial = nn.Parameter(torch.zeros(64))
    optimizer = _made(options, [trial])
    trial.grad = torch.zeros_like(trial)
    optimizer.step()
    found = [x for x in tree_leaves(dict(optimizer.state)) if isinstance(x, torch.Tensor)]
    return sum(x.numel() for x in found if x.numel() == trial.numel()) / trial.numel()


def _made(options: TorchOptions, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = options.optimizer_fn(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer_fn must return a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    return optimizer


def _optimizer(options: TorchOptions, module: nn.Module, lr_scale: float) -> tuple[Any, Any]:
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
    """Return how large a replicated stage's messages are: a few, as activations need the links."""
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


def _recorder() -> Recorder:
    """Join the timeline, where one is asked for, before an optimizer of some ranks does."""
    if isinstance(timeline.active, timeline.TorchRecorder):
        timeline.active.set_clock(agree_on_clock(global_process_set))
    return timeline.active
