"""A worker's part of a pipeline, from the first minibatch on: all ranks build together.

the model's layers | plan on rank 0 | cut | connect the ranks | optimizer, stage, runner
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import global_process_set

from hvd_pipe.pipeline.build import Framework, connect, divide
from hvd_pipe.pipeline.plans import Assignment, Options
from hvd_pipe.pipeline.runner import BuiltPipeline
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.schedule import MODES, Worker
from hvd_pipe.runtime.consensus import Description
from hvd_pipe.tensorflow.agree import agreement
from hvd_pipe.tensorflow.horovod_api import broadcast_variables
from hvd_pipe.tensorflow.keras.optimizer import DistributedMixin
from hvd_pipe.tensorflow.measuring import timeline
from hvd_pipe.tensorflow.measuring.ready_times import measure_comm
from hvd_pipe.tensorflow.pipedream.graph import (
    Graph,
    Part,
    cut,
    graph_of,
    profile_of,
    shapes_of,
)
from hvd_pipe.tensorflow.pipedream.stage import KerasStage, Losses, Replicas, add, scaled
from hvd_pipe.tensorflow.pipedream.tensors import Broadcast, KerasMessages, split

LARGEST_MESSAGE = 2**23  # bytes, when the network is measured
FRAMEWORK = Framework(mpi_ops, agreement, global_process_set, Broadcast, add)
"""TensorFlow's Horovod."""

SUPPORTED = ("stash", "2bw", "flush")


class KerasOptions(Options):
    """The arguments of `PipeDream`; it says what they mean."""

    @cached_property
    def graph(self) -> Graph:
        """The calls of the model's layers."""
        return graph_of(self.model)

    def check(self, workers: int) -> Description:
        """Check all arguments, and return what ranks must have alike."""
        graph = self.graph
        if not self.model.trainable_variables:
            raise ValueError(f"the model {self.model.name!r} has no weight to train.")
        if self.mode not in SUPPORTED:
            more = (
                f"; {self.mode!r} is for PyTorch only (hvd_pipe.torch.pipedream)"
                if self.mode in MODES
                else ""
            )
            raise ValueError(
                f"mode must be one of {', '.join(SUPPORTED)}, got {self.mode!r}{more}"
            )
        if isinstance(self.optimizer_fn, keras.optimizers.Optimizer):
            raise TypeError(
                "optimizer_fn makes an optimizer for each stage: give a function, "
                f"lambda: keras.optimizers.{type(self.optimizer_fn).__name__}(...)"
            )
        alike = super().check(workers)
        if isinstance(self.metric_fn, keras.metrics.Metric):
            raise TypeError(
                "metric_fn is a function of targets and output, as "
                "keras.metrics.sparse_categorical_accuracy; a keras.metrics.Metric adds up by "
                f"itself, got {type(self.metric_fn).__name__}"
            )
        one, other = self.optimizer_fn(), self.optimizer_fn()
        check_optimizer(one)
        if one is other:
            raise ValueError(
                "optimizer_fn must make a new optimizer in each call, as each has its own "
                f"weights: lambda: keras.optimizers.{type(one).__name__}(...)"
            )
        return [
            *alike,
            ("layers of the model", ", ".join(call.name for call in graph.calls)),
            *((f"{v.path} of the model", _shape(v)) for v in self.model.variables),
        ]


def check_optimizer(optimizer: Any) -> None:
    """Raise unless each stage can have such an optimizer for itself."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"optimizer_fn must return a Keras optimizer, got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, DistributedMixin):
        raise TypeError(
            "optimizer_fn must return the plain optimizer, and not a DistributedOptimizer: a "
            "pipeline averages over the replicas of each stage by itself"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "a pipeline's stages cannot scale losses by themselves: use the policy "
            "'mixed_bfloat16' in place of 'mixed_float16', without a LossScaleOptimizer"
        )
    if optimizer.global_clipnorm is not None:
        raise ValueError(
            f"global_clipnorm={optimizer.global_clipnorm} would be the norm of one stage only: "
            "use PipeDream(..., max_grad_norm=), or clipnorm, of each weight's gradient"
        )


def _shape(variable: Any) -> str:
    trained = ", trained" if variable.trainable else ""
    return f"{tf.as_dtype(variable.dtype).name} {tuple(variable.shape)}{trained}"


@dataclass(kw_only=True)
class KerasPipeline(BuiltPipeline):
    """A worker's part of a pipeline; `parts` are those of all stages."""

    options: KerasOptions
    parts: list[Part]
    stage: KerasStage
    replicas: Replicas | None

    def average_statistics(self) -> None:
        """Average BatchNorm's statistics over the replicas of the stage."""
        if self.replicas is not None:
            state = self.stage.passes.state
            self.replicas.average([v for v in state if tf.as_dtype(v.dtype).is_floating])

    def gather(self) -> None:
        """Give the model on every rank the newest weights and statistics of all stages."""
        self.average_statistics()
        for number, part in enumerate(self.parts):
            root = self.assignment.layout.rank(Worker(number, 0))
            broadcast_variables(part.variables, root)


def build(options: KerasOptions, batch: Any) -> KerasPipeline:
    """Build this worker's part; all ranks do this at the same time, with their first minibatch."""
    agreement.checked(
        lambda: (split(options.graph, batch, options.microbatches or 1), []),
        "hvd_pipe.pipeline.look",
        global_process_set,
    )
    broadcast_variables(options.model.variables, 0)
    assignment, parts, samples = _divided(options, batch)
    stage, stages = assignment.worker.stage, assignment.layout.stages
    optimizer = scaled(options.optimizer_fn(), assignment.lr_scale)
    part, where = parts[stage], str(assignment.worker)
    connections = connect(
        assignment,
        FRAMEWORK,
        options.transport,
        (part.inputs, part.outputs),
        lambda specs: KerasMessages(specs, stages, where, options.wire_dtype is not None),
    )
    timeline.start(global_process_set)
    ranks, weights = connections.replicas, [v for v in part.variables if v.trainable]
    replicas = None if ranks is None else Replicas(ranks, stage, weights)
    return KerasPipeline(
        connections=connections,
        has_metric=options.metric_fn is not None,
        stage=KerasStage(
            part,
            Losses(options.loss_fn, options.metric_fn) if assignment.is_last else None,
            optimizer,
            connections.clipping(options.max_grad_norm, ranks),
            connections.before,
            connections.after,
            assignment.mode.coalesces,
            replicas.add if replicas is not None else None,
            options.recompute,
            connections.transport.recycle,
        ),
        most_samples=samples,
        recorder=timeline.active,
        options=options,
        parts=parts,
        replicas=replicas,
    )


def _divided(options: KerasOptions, batch: Any) -> tuple[Assignment, list[Part], int]:
    """Plan and cut the model; with the samples of a microbatch."""
    graph = options.graph

    def measured(microbatches: int) -> ModelProfile:
        microbatch = split(graph, batch, microbatches)[0]

        def loss(output: Any) -> Any:
            return tf.reduce_mean(options.loss_fn(microbatch.targets, output))

        return profile_of(options.model, graph, list(microbatch.inputs), loss)

    def comm() -> CommModel:
        return measure_comm(LARGEST_MESSAGE, global_process_set, "hvd_pipe.pipeline.comm")

    def cuts_of(assignment: Assignment) -> tuple[list[Part], int]:
        microbatch = split(graph, batch, assignment.microbatches)[0]
        shapes = shapes_of(graph, list(microbatch.inputs))
        layers = [stage.layers for stage in assignment.partition.stages]
        return cut(graph, layers, shapes), microbatch.samples

    return divide(options, FRAMEWORK, measured, comm, lambda: _state_ratio(options), cuts_of)


def _state_ratio(options: KerasOptions) -> float:
    """Return the bytes of optimizer state a byte of weights, by a small trial."""
    trial, optimizer = keras.Variable(tf.zeros(64)), options.optimizer_fn()
    optimizer.build([trial])
    return sum(1.0 for variable in optimizer.variables if tuple(variable.shape) == (64,))
