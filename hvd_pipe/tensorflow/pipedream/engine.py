"""`PipeDream`: from a Keras model to a running pipeline, the same script on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from horovod.tensorflow.mpi_ops import global_process_set, is_initialized, rank, size

from hvd_pipe.pipeline.feed import Feed, Piece, Split, filled_up, length_of, open_feed
from hvd_pipe.pipeline.session import EpochStats
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.stages import Partition
from hvd_pipe.tensorflow.agree import Description, agreement
from hvd_pipe.tensorflow.pipedream.batches import split
from hvd_pipe.tensorflow.pipedream.build import Built, build
from hvd_pipe.tensorflow.pipedream.checkpoint import load, save
from hvd_pipe.tensorflow.pipedream.graph import graph_of
from hvd_pipe.tensorflow.pipedream.options import Options

__all__ = ["PipeDream"]

Dataset = Iterable[Any]


class PipeDream:
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

    The pipeline is built at the first ``train_epoch``, ``evaluate`` or ``load``: rank 0's weights
    are everybody's then. Each rank updates the layers of its stage; `gather` brings those of all
    stages into ``model``.

    Args:
        model: Sequential or functional: ``keras.Model(inputs, outputs)``.
        loss_fn: ``loss_fn(targets, output)``, as Keras' losses: a mean over the minibatch, or one
            number a sample, whose mean is taken.
        optimizer_fn: Makes the optimizer of a stage: ``lambda: keras.optimizers.SGD(0.1)``.
        plan: "auto" (profile the model, measure the network, find the fastest stages), "straight"
            (every stage on one worker), replicas as in "3-1", a `Partition`, or the path of one.
        mode: "stash", "2bw" or "flush".
        microbatches: Of a minibatch, in the last two modes; None for the fewest that fill the
            pipeline.
        sample: A minibatch as the dataset yields, as large as any that comes; None for the first.
        transport: "mpi", "process-sets" (no MPI needed), or "auto".
        scale_lr: Scale learning rates by replicas in mode "stash".
        metric_fn: ``metric_fn(targets, output)``, to be reported, such as
            ``keras.metrics.sparse_categorical_accuracy``; its mean is taken.
        profile: Of the model, where nothing is to be measured.
        bandwidth: Bytes/s between two workers, likewise.
        memory_bytes: What a worker may hold; None for no limit.
        progress: Show what is chosen, and a progress bar, on rank 0.

    Raises:
        TypeError, ValueError: An argument that cannot be; on every rank, before anything is sent.

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

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[[Any, Any], Any],
        optimizer_fn: Callable[[], Any],
        plan: str | os.PathLike[str] | Partition = "auto",
        mode: str = "stash",
        *,
        microbatches: int | None = None,
        sample: Any = None,
        transport: str = "auto",
        scale_lr: bool = True,
        metric_fn: Callable[[Any, Any], Any] | None = None,
        profile: ModelProfile | str | os.PathLike[str] | None = None,
        bandwidth: float | None = None,
        memory_bytes: float | None = None,
        progress: bool = True,
    ) -> None:
        if not is_initialized():
            raise ValueError("Horovod is not initialised: call pipedream.init() before this.")

        def check() -> tuple[Options, Description]:
            options = Options(
                model=model,
                loss_fn=loss_fn,
                optimizer_fn=optimizer_fn,
                plan=plan,
                mode=mode,
                microbatches=microbatches,
                transport=transport,
                scale_lr=scale_lr,
                metric_fn=metric_fn,
                profile=profile,
                bandwidth=bandwidth,
                memory_bytes=memory_bytes,
                progress=progress and rank() == 0,
            )
            return options, options.check(size())

        self._options = agreement.checked(check, "hvd_pipe.pipeline.new", global_process_set)
        self._graph = graph_of(model)
        self._built: Built | None = None
        self.model = model
        """The model; see `gather`."""
        self.epoch = 0
        """How many epochs it has trained."""
        if sample is not None:
            self._build(sample)

    @property
    def stage(self) -> int:
        """The number of this worker's stage, from 0."""
        return self._ready.worker.stage

    @property
    def optimizer(self) -> Any:
        """This worker's optimizer."""
        return self._ready.stage.optimizer

    @property
    def partition(self) -> Partition:
        """The stages."""
        return self._ready.partition

    def train_epoch(self, dataset: Dataset) -> EpochStats:
        """Train on all minibatches of a dataset.

        Args:
            dataset: A ``tf.data.Dataset``, or another iterable with a len(), of (x, y), the same
                minibatches in the same order on every rank; replicas of a stage share them out.

        Returns:
            The mean loss, and what the workers did; the same on every rank.

        Raises:
            RanksDisagreeError: Datasets of unlike lengths.
            HvdPipeError, TypeError, ValueError: A dataset or a model that cannot be; names it.
        """
        feed = self._feed(dataset, self._split)
        built = self._build(feed.first)
        feed.pieces = built.session.microbatches
        built.stage.feed = feed
        stats = built.session.train(
            built.stage, feed.count, built.spans, progress=self._options.progress
        )
        self.epoch += 1
        return stats

    def evaluate(self, dataset: Dataset) -> EpochStats:
        """Return the mean loss and metric over all samples of a dataset, with the newest weights.

        Args:
            dataset: As of `train_epoch`; no minibatch is larger than its first.
        """
        feed = self._feed(dataset, filled_up(self._split))
        built = self._build(feed.first)
        built.average_statistics()
        feed.pieces = built.pieces_of(feed.first)
        built.stage.feed = feed
        return built.session.evaluate(built.stage, feed.count, feed.pieces, built.spans)

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

    def load(self, directory: str | os.PathLike[str], sample: Any = None) -> None:
        """Go on from a checkpoint; rank 0 reads, and all ranks call this.

        With the same stages the run continues bit for bit; with other workers or stages, the
        optimizers' state moves with its weights.

        Args:
            directory: What `save` has written.
            sample: A minibatch, where neither the engine nor an epoch has had one.

        Raises:
            HvdPipeError: No such checkpoint, or one of another model.
        """
        if sample is not None:
            self._build(sample)
        self.epoch = load(self._ready, Path(directory))

    @property
    def _ready(self) -> Built:
        if self._built is None:
            raise ValueError(
                "the pipeline is built with its first minibatch: give it one, as in "
                "PipeDream(..., sample=batch), or call this after the first train_epoch."
            )
        return self._built

    def _split(self, batch: Any, pieces: int) -> list[Piece]:
        return split(self._graph, batch, pieces)

    def _feed(self, dataset: Dataset, cut: Split) -> Feed:
        def make() -> Feed:
            return Feed(dataset, length_of(dataset), cut)

        return open_feed(make, agreement, global_process_set)

    def _build(self, sample: Any) -> Built:
        if self._built is None:
            self._built = build(self._options, sample)
        return self._built
