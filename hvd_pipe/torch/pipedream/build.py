"""A worker's part of a pipeline, from the first minibatch on: all ranks build together.

trace the model | plan on rank 0 | cut | connect the ranks | optimizer, stage, session
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import mpi_ops
from horovod.torch.mpi_ops import Average, Sum, allreduce_, global_process_set
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from hvd_pipe.pipeline.build import Connections, Framework, connect, divide
from hvd_pipe.pipeline.plans import Assignment, Options, check_function
from hvd_pipe.pipeline.runner import BuiltPipeline
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.runtime.consensus import Description
from hvd_pipe.strategy import MergedGradient
from hvd_pipe.torch.agree import agreement
from hvd_pipe.torch.distributed import DistributedOptimizer
from hvd_pipe.torch.horovod_api import broadcast_parameters
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.measuring.probes import measure_comm
from hvd_pipe.torch.pipedream.graph import StageModule, Traced, cut, specs, trace
from hvd_pipe.torch.pipedream.measure import profile
from hvd_pipe.torch.pipedream.stage import Losses, TorchStage, moved
from hvd_pipe.torch.pipedream.tensors import TorchMessages, split, start
from hvd_pipe.torch.pipedream.weights import Updates, add

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
        wrong = [type(m).__name__ for m in modules if not isinstance(m, nn.Module)]
        if wrong or not modules:
            raise TypeError(
                "model must be an nn.Module, or a list of modules that are called one after the "
                f"other, got {', '.join(wrong) or 'an empty list'}"
            )
        if any(p.is_meta for module in modules for p in module.parameters()):
            raise ValueError(
                "the model has layers on the meta device, which have no values; a pipeline leaves "
                "those of other workers so: build the model anew, and load() a checkpoint into "
                "its pipeline, or load_state_dict(engine.state_dict()) before"
            )
        if not any(p.requires_grad for module in modules for p in module.parameters()):
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
    """A worker's part of a pipeline."""

    stage: TorchStage
    updates: Updates
    scheduler: Any | None
    layers: tuple[str, ...]
    owners: dict[str, int]
    unused: dict[str, Any]
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]

    def average_statistics(self) -> None:
        """Average BatchNorm's statistics over the replicas of the stage."""
        ranks = self.connections.replicas
        if ranks is None:
            return
        for name, buffer in self.stage.module.named_buffers():
            if buffer.is_floating_point():
                # In double precision, so that what is alike, as constants are, stays as it is.
                tag = f"hvd_pipe.pipeline.buffers.{name}"
                mean = allreduce_(buffer.double(), op=Average, name=tag, process_set=ranks)
                buffer.data.copy_(mean)


def build(options: TorchOptions, batch: Any) -> TorchPipeline:
    """Build this worker's part; all ranks do this at the same time, with their first minibatch."""
    state = dict(options.state())
    broadcast_parameters({k: v.detach() for k, v in state.items()}, root_rank=0)
    shapes = {name: (tuple(x.shape), x.dtype) for name, x in state.items()}
    device = next(x.device for x in state.values())
    layers, assignment, cuts, samples = _divided(options, batch, device)
    worker, stages, coalesces = assignment.worker, len(cuts), assignment.mode.coalesces
    part, received = cuts[worker.stage], cuts[worker.stage - 1].outputs if worker.stage else ()
    owners = {name: s for s, c in enumerate(cuts) for name in c.module.state_dict()}
    unused = {k: v.detach().cpu().clone() for k, v in state.items() if k not in owners}
    del state
    _free_other_stages(options.modules(), part.module)
    optimizer, scheduler = agreement.checked(
        lambda: (_optimizer(options, part.module, assignment.lr_scale), []),
        "hvd_pipe.pipeline.optimizer",
        global_process_set,
    )
    connections = connect(
        assignment,
        FRAMEWORK,
        options.transport,
        (received, part.outputs),
        lambda specs: TorchMessages(specs, stages, str(worker), bool(options.wire_dtype), device),
    )
    timeline.start((), global_process_set)  # before an optimizer of some ranks does
    by_minibatch = scheduler if options.schedule_by == "minibatch" else None
    updates = _updates(options, optimizer, by_minibatch, part.module, connections)
    losses = Losses(options.loss_fn, options.metric_fn, shared=coalesces)
    return TorchPipeline(
        connections=connections,
        has_metric=options.metric_fn is not None,
        stage=TorchStage(
            part,
            losses if assignment.is_last else None,
            updates,
            connections.before,
            connections.after,
            options.recompute,
            connections.transport.recycle,
            device,
        ),
        most_samples=samples,
        recorder=timeline.active,
        updates=updates,
        scheduler=scheduler,
        layers=layers,
        owners=owners,
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
        trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        # A few messages, as activations need the links, too.
        bucket_bytes = max(LEAST_BUCKET_BYTES, sum(p.nbytes for _, p in trained) // BUCKETS)
        optimizer = DistributedOptimizer(
            optimizer,
            trained,
            op=Sum if coalesces else Average,
            backward_passes_per_step=(
                assignment.microbatches // replicas.size() if coalesces else 1
            ),
            process_set=replicas,
            strategy=MergedGradient(bucket_bytes=bucket_bytes),
        )
    clipping = connections.clipping(options.max_grad_norm, replicas)
    return Updates(optimizer, scheduler, replicas, clipping, mean=not coalesces)


def _divided(
    options: TorchOptions, batch: Any, device: torch.device
) -> tuple[tuple[str, ...], Assignment, list[StageModule], int]:
    """Trace, plan and cut the model; return also its layers and the samples of a microbatch."""

    def look() -> tuple[Traced, Description]:
        inputs = split(batch, options.microbatches or 1)[0].inputs
        traced = trace(options.model, moved(inputs, device))
        return traced, [("layers of the model", ", ".join(x.name for x in traced.layers))]

    traced = agreement.checked(look, "hvd_pipe.pipeline.look", global_process_set)

    def measured(microbatches: int) -> ModelProfile:
        inputs = moved(split(batch, microbatches)[0].inputs, device)
        return profile(traced, inputs, progress=options.progress)

    def comm() -> CommModel:
        return measure_comm(LARGEST_MESSAGE, device, global_process_set, "hvd_pipe.pipeline.comm")

    def cuts_of(assignment: Assignment) -> tuple[list[StageModule], int]:
        microbatch = split(batch, assignment.microbatches)[0]
        values = specs(traced, moved(microbatch.inputs, device))
        stages = [stage.layers for stage in assignment.partition.stages]
        return cut(traced, stages, values), microbatch.samples

    layers = tuple(layer.name for layer in traced.layers)
    return layers, *divide(
        options, FRAMEWORK, measured, comm, lambda: _state_ratio(options), cuts_of
    )


def _state_ratio(options: TorchOptions) -> float:
    """Return the bytes of optimizer state a byte of parameters, by a small trial."""
    trial = nn.Parameter(torch.zeros(64))
    optimizer = _new_optimizer(options, [trial])
    trial.grad = torch.zeros_like(trial)
    optimizer.step()
    tensors = [x for x in tree_leaves(dict(optimizer.state)) if isinstance(x, torch.Tensor)]
    return sum(x.numel() for x in tensors if x.numel() == trial.numel()) / trial.numel()


def _new_optimizer(options: TorchOptions, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
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
    optimizer = _new_optimizer(options, parameters)
    owned = {id(p) for p in parameters}
    if any(id(p) not in owned for group in optimizer.param_groups for p in group["params"]):
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


def _free_other_stages(modules: Sequence[nn.Module], part: nn.Module) -> None:
    """Free the parameters and buffers of the other stages."""
    kept_ids = {id(x) for x in (*part.parameters(), *part.buffers())}
    for module in (inner for outer in modules for inner in outer.modules()):
        state = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in state:
            if id(tensor) not in kept_ids:
                empty = tensor.detach().to("meta")
                if isinstance(tensor, nn.Parameter):
                    empty = nn.Parameter(empty, tensor.requires_grad)
                setattr(module, name, empty)  # some modules have lists of their own of them
