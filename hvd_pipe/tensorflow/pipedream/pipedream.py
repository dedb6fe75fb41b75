"""`PipeDream`: from a Keras model to a running pipeline, the same script on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvd_pipe.pipeline.pipedream import PipeDreamBase
from hvd_pipe.pipeline.stage import Microbatch
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.stages import Partition
from hvd_pipe.tensorflow.measuring import timeline
from hvd_pipe.tensorflow.pipedream.build import FRAMEWORK, KerasOptions, KerasPipeline, build
from hvd_pipe.tensorflow.pipedream.checkpoint import load, save
from hvd_pipe.tensorflow.pipedream.tensors import split


class PipeDream(PipeDreamBase[KerasPipeline]):
    """A pipeline of workers that each train some layers of a Keras model (PipeDream, SOSP 2019).

    Every rank runs the same script. With n stages of one worker each, ``w_s`` the weights of stage
    s, and f the loss of minibatch t::

        stash     w[t+1] = w[t] - lr * grad f(w_1[t-n+1], w_2[t-n+2], ..., w_n[t])
        2bw       w[t+1] = w[t] - lr * grad f(w[t-1])
        flush     w[t+1] = w[t] - lr * grad f(w[t]), as one worker

    The first two never wait for the pipeline to empty, and pay with staleness: with momentum mu,
    a stage d updates behind is stable only for learning rates well below those of one worker
    (d = 1: lr * curvature < 1 - mu). ``flush`` is exact, and waits at the end of each minibatch.
    The last two cut a minibatch into microbatches, and update once for all.

    A stage of R replicas takes every R-th minibatch and averages R gradients an update. Where
    stages have unlike replicas, learning rates are scaled by R / R_1 (``scale_lr``), so that all
    stages move as far in an epoch; a ``LearningRateSchedule`` counts minibatches.

    BatchNormalization takes each microbatch's own statistics. Moving averages are the worker's
    own, and are averaged over the replicas for evaluation and checkpoints. Losses that layers and
    regularisers add are differentiated, and not reported.

    The pipeline is built with its first minibatch, of ``sample``, ``train_epoch``, ``evaluate`` or
    ``load``; then all ranks take rank 0's weights. Each rank updates the layers of its stage;
    `gather` brings those of all stages into ``model``.

    Args:
        model: Sequential or functional: ``keras.Model(inputs, outputs)``.
        loss_fn: ``loss_fn(targets, output)``, as Keras' losses: a mean over the minibatch, or one
            number a sample, whose mean is taken.
        optimizer_fn: Makes the optimizer of a stage: ``lambda: keras.optimizers.SGD(0.1)``.
        plan: "auto" (profile the model, measure the network, find the fastest stages), "straight"
            (every stage on one worker), replicas as in "3-1", a `Partition`, or the path of one.
        mode: "stash", "2bw" or "flush".
        microbatches: How many a minibatch is cut into, in modes "2bw" and "flush"; None for the
            fewest that fill the pipeline.
        in_transit: Minibatches between two stages, besides one in each worker. They hide messages,
            at the price of memory and staleness. None for the plan's, or as many as it needs.
        sample: A minibatch of the dataset, as large as its largest; None for the first one.
        transport: "mpi", "process-sets" (no MPI needed), or "auto".
        recompute: Keep no activations from forward to backward, but run forward again.
        wire_dtype: "bfloat16" to send activations and their gradients in it; None for their own.
        scale_lr: Scale learning rates by replicas in mode "stash".
        max_grad_norm: Clip gradients by their norm over all stages; exact in flush, else with the
            newest norms that a stage has heard of.
        metric_fn: ``metric_fn(targets, output)``, such as
            ``keras.metrics.sparse_categorical_accuracy``, whose mean is reported.
        profile: A profile of the model; None: measured.
        bandwidth: Bytes/s between two workers; None: measured.
        memory_bytes: The most bytes that a worker may hold; None for no limit.
        progress: Show what is chosen, and a progress bar, on rank 0.

    Raises:
        TypeError, ValueError: An argument has a wrong type or value; all ranks raise this, before
            anything is sent.

    Example:
        >>> import keras
        >>> import tensorflow as tf
        >>> from hvd_pipe.tensorflow import pipedream
        >>> pipedream.init()
        >>> layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
        >>> engine = pipedream.PipeDream(
        ...     keras.Sequential([keras.Input((4,)), *layers]),
        ...     keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        ...     lambda: keras.optimizers.SGD(0.1),
        ...     progress=False,
        ... )
        >>> dataset = tf.data.Dataset.from_tensors((tf.ones((3, 4)), tf.constant([0, 1, 1])))
        >>> stats = engine.train_epoch(dataset)
        >>> stats.minibatches, stats.samples
        (1, 3)

    Source: PipeDream, SOSP 2019; PipeDream-2BW, arXiv 2006.09503.
    """

    _options: KerasOptions

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[[Any, Any], Any],
        optimizer_fn: Callable[[], Any],
        plan: str | os.PathLike[str] | Partition = "auto",
        mode: str = "stash",
        *,
        microbatches: int | None = None,
        in_transit: int | None = None,
        sample: Any = None,
        transport: str = "auto",
        recompute: bool = False,
        wire_dtype: str | None = None,
        scale_lr: bool = True,
        max_grad_norm: float | None = None,
        metric_fn: Callable[[Any, Any], Any] | None = None,
        profile: ModelProfile | str | os.PathLike[str] | None = None,
        bandwidth: float | None = None,
        memory_bytes: float | None = None,
        progress: bool = True,
    ) -> None:
        self.model = model
        """The model; see `gather`."""
        options = KerasOptions(
            model=model,
            loss_fn=loss_fn,
            optimizer_fn=optimizer_fn,
            plan=plan,
            mode=mode,
            microbatches=microbatches,
            transport=transport,
            in_transit=in_transit,
            recompute=recompute,
            wire_dtype=wire_dtype,
            scale_lr=scale_lr,
            max_grad_norm=max_grad_norm,
            metric_fn=metric_fn,
            profile=profile,
            bandwidth=bandwidth,
            memory_bytes=memory_bytes,
            progress=progress,
        )
        super().__init__(options, FRAMEWORK, timeline.describe, sample)

    @property
    def optimizer(self) -> Any:
        """This worker's optimizer."""
        return self._ready.stage.optimizer

    def gather(self) -> Any:
        """Bring the newest weights of all stages into the model; all ranks call this.

        Returns:
            The model, the same on every rank.
        """
        self._ready.gather()
        return self.model

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a checkpoint; rank 0 writes, and all ranks call this.

        ``model.weights.h5`` is what the plain model's ``load_weights`` takes, ``stage0.npz`` and
        so on hold the optimizers, seeds and statistics, and ``pipeline.json`` the stages. Between
        epochs nothing is in flight: the newest weights are all that there are.
        """
        save(self._ready, Path(directory), self.epoch)

    def _split(self, batch: Any, count: int) -> Sequence[Microbatch]:
        return split(self._options.graph, batch, count)

    def _build_part(self, sample: Any) -> KerasPipeline:
        return build(self._options, sample)

    def _load_checkpoint(self, built: KerasPipeline, directory: Path) -> tuple[int, bool]:
        return load(built, directory)
