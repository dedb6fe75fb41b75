"""A worker's part of a pipeline, from the first minibatch on: all ranks build together.

the model's layers | plan on rank 0 | cut | connect the ranks | optimizer, stage, session
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import global_process_set, rank

from hvd_pipe.pipeline.layout import Layout
from hvd_pipe.pipeline.messages import Boundary
from hvd_pipe.pipeline.norms import Clipping, Norms
from hvd_pipe.pipeline.plans import plan_together, usual_microbatches
from hvd_pipe.pipeline.process_sets import make_process_sets
from hvd_pipe.pipeline.runner import Session
from hvd_pipe.pipeline.spans import PipelineSpans
from hvd_pipe.pipeline.transport import channels_of, open_transport
from hvd_pipe.planning.comm import CommModel
from hvd_pipe.planning.instructions import Worker
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.schedule import schedule
from hvd_pipe.planning.stages import Partition
from hvd_pipe.tensorflow.agree import Description, agreement
from hvd_pipe.tensorflow.horovod_api import broadcast_variables
from hvd_pipe.tensorflow.measuring import timeline
from hvd_pipe.tensorflow.measuring.ready_times import measure_comm
from hvd_pipe.tensorflow.pipedream.cut import Part, cut, profile_of, shapes_of
from hvd_pipe.tensorflow.pipedream.graph import Graph, graph_of
from hvd_pipe.tensorflow.pipedream.options import Options
from hvd_pipe.tensorflow.pipedream.passes import Losses
from hvd_pipe.tensorflow.pipedream.stage import KerasStage
from hvd_pipe.tensorflow.pipedream.tensors import Messages, split, start
from hvd_pipe.tensorflow.pipedream.weights import Replicas, add, scaled

__all__ = ["Built", "build"]

LARGEST_MESSAGE = 2**23  # bytes, when the network is measured


@dataclass
class Built:
    """A worker's part of a pipeline."""

    options: Options
    graph: Graph
    parts: list[Part]
    """Of all stages."""
    session: Session
    stage: KerasStage
    partition: Partition
    replicas: Replicas | None
    """The ranks of this stage; None where there is one."""
    lr_scale: float
    piece_samples: int
    """Samples of the largest microbatch."""
    spans: PipelineSpans | None

    @property
    def layout(self) -> Layout:
        """Which rank is who."""
        return self.session.layout

    @property
    def worker(self) -> Worker:
        """Who this is."""
        return self.session.worker

    def average_statistics(self) -> None:
        """Average BatchNorm's statistics over the replicas of the stage."""
        if self.replicas is not None:
            state = self.stage.passes.state
            self.replicas.average([v for v in state if tf.as_dtype(v.dtype).is_floating])

    def gather(self) -> None:
        """Give the model on every rank the newest weights and statistics of all stages."""
        self.average_statistics()
        for number, part in enumerate(self.parts):
            broadcast_variables(part.variables, self.layout.rank(Worker(number, 0)))


def build(options: Options, batch: Any) -> Built:
    """Build this worker's part; all ranks do this at the same time, with their first minibatch.

    Raises:
        TypeError, ValueError, HvdPipeError: The model, the minibatch or the plan cannot be.
    """
    graph, mode = graph_of(options.model), options.chosen_mode

    def look() -> tuple[None, Description]:
        split(graph, batch, options.microbatches or 1)
        return None, []

    agreement.checked(look, "hvd_pipe.pipeline.look", global_process_set)
    broadcast_variables(options.model.variables, 0)
    partition = _plan(options, graph, batch)
    layout = Layout(partition.replicas)
    microbatches = options.microbatches or usual_microbatches(mode, layout.replicas)
    worker = layout.worker(rank())

    def divide() -> tuple[tuple[list[Part], int], Description]:
        schedule(mode.method, layout.replicas, 1, microbatches)  # whether it can be
        piece = split(graph, batch, microbatches)[0]
        shapes = shapes_of(graph, list(piece.inputs))
        parts = cut(graph, [stage.layers for stage in partition.stages], shapes)
        crossing = [(spec.name, str(spec)) for part in parts for spec in part.outputs]
        return (parts, piece.samples), [(f"tensor {name}", text) for name, text in crossing]

    parts, samples = agreement.checked(divide, "hvd_pipe.pipeline.cut", global_process_set)
    width = layout.replicas[worker.stage]
    lr_scale = width / layout.replicas[0] if options.scale_lr and not mode.coalesces else 1.0
    optimizer = scaled(options.optimizer_fn(), lr_scale)
    groups = [layout.ranks(stage) for stage, width in enumerate(layout.replicas) if width > 1]
    mine = make_process_sets(groups, global_process_set).get(layout.ranks(worker.stage))
    own = parts[worker.stage]
    weights = [each for each in own.variables if each.trainable]
    replicas = None if mine is None else Replicas(mine, worker.stage, weights)
    short = options.wire_dtype is not None
    before, after = (
        Boundary(crossing, lambda x: Messages(x, layout.stages, str(worker), short))
        if crossing
        else None
        for crossing in (own.inputs, own.outputs)
    )
    losses = Losses(options.loss_fn, options.metric_fn)
    is_last = worker.stage == layout.stages - 1
    stage = KerasStage(
        own,
        losses if is_last else None,
        optimizer,
        Clipping(
            options.max_grad_norm,
            mode.synchronous,
            Norms(worker.stage, layout.stages),
            mine,
            global_process_set,
            add,
        ),
        before,
        after,
        mode.coalesces,
        None if replicas is None else replicas.add,
        options.recompute,
    )
    sizes = (None if side is None else side.capacities for side in (before, after))
    transport = open_transport(
        list(channels_of(layout, rank(), *sizes)),
        options.transport,
        mpi_ops,
        agreement,
        global_process_set,
        start,
    )
    stage.recycle = transport.recycle
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
        graph,
        parts,
        session,
        stage,
        partition,
        replicas,
        lr_scale,
        samples,
        _spans(),
    )


def _plan(options: Options, graph: Graph, batch: Any) -> Partition:
    def measured(pieces: int) -> ModelProfile:
        piece = split(graph, batch, pieces)[0]

        def loss(output: Any) -> Any:
            return tf.reduce_mean(options.loss_fn(piece.targets, output))

        return profile_of(options.model, graph, list(piece.inputs), loss)

    def comm() -> CommModel:
        return measure_comm(LARGEST_MESSAGE, global_process_set, "hvd_pipe.pipeline.comm")

    return plan_together(
        options, measured, comm, lambda: _state_ratio(options), agreement, global_process_set
    )


def _state_ratio(options: Options) -> float:
    """Return the bytes of optimizer state a byte of weights, by a small trial."""
    trial, optimizer = keras.Variable(tf.zeros(64)), options.optimizer_fn()
    optimizer.build([trial])
    return sum(1.0 for each in optimizer.variables if tuple(each.shape) == (64,))


def _spans() -> PipelineSpans | None:
    """Join the timeline, where one is asked for."""
    timeline.start(global_process_set)
    return None if timeline.active is None else PipelineSpans(timeline.active)
