"""What both frameworks' `PipeDream` do alike: epochs, evaluation, checkpoints."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar

from hvd_pipe.pipeline.build import Framework
from hvd_pipe.pipeline.plans import Options
from hvd_pipe.pipeline.runner import BuiltPipeline, EpochStats
from hvd_pipe.pipeline.stage import Feed, Split, filled_up, length_of, open_feed
from hvd_pipe.planning.stages import Partition
from hvd_pipe.runtime.consensus import Description

Loader = Iterable[Any]


B = TypeVar("B", bound=BuiltPipeline)


class PipeDreamBase(ABC, Generic[B]):
    """A pipeline of workers that each train some layers of a model."""

    def __init__(
        self,
        options: Options,
        framework: Framework,
        describe: Callable[[], Description],
        sample: Any,
    ) -> None:
        horovod = framework.horovod
        if not horovod.is_initialized():
            raise ValueError("Horovod is not initialised: call pipedream.init() before this.")
        options.progress = options.progress and horovod.rank() == 0
        self._options, self._ranks = options, framework.ranks
        self._agreement = framework.agreement
        self._built: B | None = None
        self._closed = self._failed = False
        self.epoch = 0
        """How many epochs it has trained."""

        def check() -> tuple[None, Description]:
            return None, [*options.check(horovod.size()), *_given(sample), *describe()]

        self._agreement.checked(check, "hvd_pipe.pipeline.new", self._ranks)
        if sample is not None:
            self._build(sample)

    @property
    def stage(self) -> int:
        """The number of this worker's stage, from 0."""
        return self._ready.assignment.worker.stage

    @property
    def partition(self) -> Partition:
        """The stages."""
        return self._ready.assignment.partition

    def train_epoch(self, loader: Loader) -> EpochStats:
        """Train on all minibatches of a loader.

        Args:
            loader: Has a len(), as a ``DataLoader``, a ``tf.data.Dataset`` or a list have, and
                yields (inputs, targets), the same minibatches in the same order on every rank;
                replicas of a stage share them out.

        Returns:
            The mean loss, and what the workers did; the same on every rank.

        Raises:
            RanksDisagreeError: Loaders of unlike lengths.
            HvdPipeError, TypeError, ValueError: A loader or a model that cannot be; names it.
        """
        feed = self._opened(loader, self._split)
        built = self._build(feed.first)
        feed.microbatches = built.assignment.microbatches
        built.stage.feed = feed
        with self._running():
            stats = built.train(feed.count, progress=self._options.progress)
        self.epoch += 1
        return stats

    def evaluate(self, loader: Loader) -> EpochStats:
        """Return the mean loss and metric over all samples of a loader, with the newest weights.

        Args:
            loader: As of `train_epoch`; no minibatch is larger than its first.
        """
        feed = self._opened(loader, filled_up(self._split))
        built = self._build(feed.first)
        built.average_statistics()
        # In how many microbatches a minibatch fits into messages: as rank 0 has it.
        count = -(-self._split(feed.first, 1)[0].samples // built.most_samples)
        feed.microbatches = self._agreement.from_first(
            count, "hvd_pipe.pipeline.pieces", self._ranks
        )
        built.stage.feed = feed
        with self._running():
            return built.evaluate(feed.count, feed.microbatches)

    @abstractmethod
    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a checkpoint; rank 0 writes, and all ranks call this."""

    def load(self, directory: str | os.PathLike[str], sample: Any = None) -> None:
        """Go on from a checkpoint; rank 0 reads, and all ranks call this.

        With the same stages the run continues bit for bit; with other workers or stages, the
        optimizers' state moves with its weights. Stages that are measured may differ from run to
        run: for the same ones, save ``partition`` and give its path as ``plan``.

        Args:
            directory: What `save` has written.
            sample: A minibatch, where neither the engine nor an epoch has had one.

        Raises:
            HvdPipeError: No such checkpoint, or one of another model.
        """
        self._agreement.checked(
            lambda: (None, _given(sample)), "hvd_pipe.pipeline.load", self._ranks
        )
        if sample is not None:
            self._build(sample)
        self.epoch, same_stages = self._load_checkpoint(self._ready, Path(directory))
        if self._options.progress and not same_stages:
            print(
                f"{os.fspath(directory)} is of other stages than these: what they know was moved, "
                "and the run that goes on is not the same bit for bit",
                flush=True,
            )

    def close(self) -> None:
        """End the connections between workers, and free the memory; all ranks call this.

        Not needed at a script's end; what is not in a checkpoint is lost.
        """
        built, self._built, self._closed = self._built, None, True
        if built is not None:
            built.connections.transport.close(meet=not self._failed)

    @abstractmethod
    def _split(self, batch: Any, count: int) -> Sequence[Any]:
        """Cut a minibatch into microbatches."""

    @abstractmethod
    def _build_part(self, sample: Any) -> B:
        """Build this worker's part; all ranks do."""

    @abstractmethod
    def _load_checkpoint(self, built: B, directory: Path) -> tuple[int, bool]:
        """Load a checkpoint; return its epoch, and whether its stages are these."""

    def _drawing_alike(self) -> AbstractContextManager[Any]:
        """Return a context in which loaders draw the same order on all ranks; all call this."""
        return nullcontext()

    @property
    def _ready(self) -> B:
        self._check_open()
        if self._built is None:
            raise ValueError(
                "the pipeline is built with its first minibatch: give PipeDream(..., sample=) or "
                "load(..., sample=) one, or call this after the first train_epoch."
            )
        return self._built

    def _build(self, sample: Any) -> B:
        self._check_open()
        if self._built is None:
            self._built = self._build_part(sample)
        return self._built

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this pipeline is closed: make another PipeDream, and load() into it")

    @contextmanager
    def _running(self) -> Iterator[None]:
        """A run that ends by an error leaves messages on their way."""
        self._failed = True
        yield
        self._failed = False

    def _opened(self, loader: Loader, split: Split) -> Feed:
        alike = self._drawing_alike()

        def make() -> Feed:
            if self._failed:
                raise ValueError(
                    "an epoch of this pipeline has failed, on this rank at least, and its "
                    "messages are lost: make another PipeDream, and load() a checkpoint into it"
                )
            count = length_of(loader)
            with alike:
                return Feed(loader, count, split)

        return open_feed(make, self._agreement, self._ranks)


def _given(sample: Any) -> Description:
    """Describe whether a rank has a sample, from which all ranks build together."""
    return [("whether a sample is given", str(sample is not None))]
