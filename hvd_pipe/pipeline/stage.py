"""Microbatches: what a stage does with each, where they are read, and clipping by all stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from horovod.common.process_sets import ProcessSet

from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.runtime.consensus import Agreement

Add = Callable[[float, str, ProcessSet], float]
"""Adds a number up over the ranks of a process set, under a name; all of them call it."""


class Norms:
    """The newest squared norm of each stage's gradient, as far as a worker knows."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage = stage
        self.squared = (math.nan,) * stages
        """The squared norm of each stage; nan where it is not known."""

    def update(self, squared: Sequence[float], from_before: bool) -> None:
        """Adopt the norms that a neighbour has sent of the stages on its side."""
        norm = self.squared[self.stage]
        before, behind = (squared, self.squared) if from_before else (self.squared, squared)
        self.squared = (*before[: self.stage], norm, *behind[self.stage + 1 :])


@dataclass(frozen=True)
class Clipping:
    """Clips the gradient of a stage by the norm over all stages.

    Stages that end a minibatch together add up their squared norms. Elsewhere a stage takes the
    newest that it has heard of: each message carries what its sender knows, downstream those of
    the stages before it, upstream those of the stages behind it.
    """

    most: float | None
    together: bool
    norms: Norms
    replicas: ProcessSet | None
    everyone: ProcessSet
    add: Add

    def factor(self, squared: Callable[[], float]) -> float:
        """Return what the gradient is multiplied with, the same on all replicas of a stage."""
        if self.most is None:
            return 1.0
        known, stage = self.norms.squared, self.norms.stage
        self.norms.squared = (*known[:stage], squared(), *known[stage + 1 :])
        # As torch.nn.utils.clip_grad_norm_ has it, for a norm that is not finite, too.
        factor = self.most / (math.sqrt(self._total()) + 1e-6)
        return 1.0 if factor >= 1.0 else factor

    def _total(self) -> float:
        own_norm = self.norms.squared[self.norms.stage]
        if self.together:
            width = 1 if self.replicas is None else self.replicas.size()
            return self.add(own_norm / width, "hvd_pipe.pipeline.norms", self.everyone)
        known = enumerate(self.norms.squared)
        others = math.fsum(x for s, x in known if s != self.norms.stage and not math.isnan(x))
        if self.replicas is not None:
            # Neighbours may have told each of them something else.
            name = f"hvd_pipe.pipeline.norms.{self.norms.stage}"
            others = self.add(others, name, self.replicas) / self.replicas.size()
        return own_norm + others


Buffer = npt.NDArray[np.uint8]
"""A message's bytes; a framework may hand over another object with the buffer interface."""


class MicrobatchIndex(NamedTuple):
    """A microbatch, by its minibatch and its place in that; numbers start at 0 in each run."""

    minibatch: int
    microbatch: int


class Tally(NamedTuple):
    """What the last stage's workers add up in a run; zeros in all others."""

    loss: float = 0.0
    metric: float = 0.0
    weight: float = 0.0
    samples: int = 0


class Stage(Protocol):
    """The layers of one worker, and their weights in all versions that are needed.

    For each microbatch the calls come in this order, those of several interleaved::

        [take_input] forward [output]  ...  [take_gradient] backward [input_gradient]

    The first stage reads its inputs from the feed, and the last one computes the loss.
    """

    feed: Feed | None
    """Where the first and the last stage read; to be set before each run."""

    norms: Norms
    """The newest gradient norms of all stages."""

    def take_input(self, index: MicrobatchIndex, message: Buffer) -> None:
        """Unpack the message of the stage before."""

    def forward(self, index: MicrobatchIndex, version: int) -> None:
        """Run forward with this version of the weights, and keep what backward needs."""

    def output(self, index: MicrobatchIndex) -> Buffer:
        """Return the message to the next stage; it is the caller's from then on."""

    def take_gradient(self, index: MicrobatchIndex, message: Buffer) -> None:
        """Unpack the gradient of the output, which the next stage has sent."""

    def backward(self, index: MicrobatchIndex, version: int) -> None:
        """Run backward with the version of the forward pass; add to the stage's gradient."""

    def input_gradient(self, index: MicrobatchIndex) -> Buffer:
        """Return the message to the stage before; it is the caller's from then on."""

    def average(self, contributors: int) -> None:
        """Wait until the gradient is the average, or sum, over the replicas that have one."""

    def update(self, version: int, keep: bool) -> None:
        """Apply and clear the gradient: makes ``version``; ``keep`` the one before as it is."""

    def release(self, version: int) -> None:
        """Forget a version that nobody needs any more."""

    def begin(self, training: bool) -> None:
        """Get ready for a run; where it is no training, forward keeps nothing but the output."""

    def tally(self) -> Tally:
        """Return what the run has added up, and begin anew."""


Split = Callable[[Any, int], Sequence[Any]]
"""Cuts a minibatch into so many `Microbatch`, along the first dimension."""


@dataclass(frozen=True)
class Microbatch:
    """A microbatch."""

    inputs: tuple[Any, ...]
    targets: Any
    samples: int
    share: float
    digest: int


class Feed:
    """One pass over a loader.

    Example:
        >>> feed = Feed(["ab", "cd"], 2, lambda batch, microbatches: list(batch[:microbatches]))
        >>> feed.first
        'ab'
        >>> feed.microbatches = 2
        >>> feed.microbatch(MicrobatchIndex(1, 0)), feed.microbatch(MicrobatchIndex(1, 1))
        ('c', 'd')
    """

    def __init__(self, loader: Iterable[Any], count: int, split: Split) -> None:
        self.count = count
        """How many minibatches the run takes."""
        self._split = split
        self._batches: Iterator[Any] = iter(loader)
        self._at = -1
        self._cut: Sequence[Any] = ()
        self.microbatches = 1
        """Microbatches of a minibatch; to be set before the first is asked for."""
        self.first = self._next()
        """The first minibatch, whole."""
        self._batches = chain([self.first], self._batches)

    def microbatch(self, index: MicrobatchIndex) -> Any:
        """Return a microbatch; minibatches are asked for in their order, and may be left out."""
        while self._at < index.minibatch:
            batch = self._next()
            self._at += 1
            if self._at == index.minibatch:
                self._cut = self._split(batch, self.microbatches)
        return self._cut[index.microbatch]

    def _next(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            raise HvdPipeError(
                f"the loader ended before its {self.count} minibatches, which is its len(): "
                "len(loader) must be the number of minibatches that it yields in every epoch."
            ) from None


def open_feed(make: Callable[[], Feed], agreement: Agreement, ranks: ProcessSet) -> Feed:
    """Open this rank's loader, and see that all ranks' are of one length."""
    name = "hvd_pipe.pipeline.epoch"
    feed = agreement.checked(lambda: (make(), []), name, ranks)
    counts: list[int] = agreement.gather(feed.count, f"{name}.count", ranks)
    other = next((rank for rank, count in enumerate(counts) if count != counts[0]), None)
    if other is not None:
        raise RanksDisagreeError(
            f"ranks disagree on the number of minibatches: rank 0 has {counts[0]}; rank {other} "
            f"has {counts[other]}. All loaders must yield the same minibatches: give them no "
            "DistributedSampler (replicas of a stage share the minibatches out), and look for "
            "data that one rank lacks."
        )
    return feed


def filled_up(split: Split) -> Split:
    """Return how an evaluation cuts a minibatch, of fewer samples than microbatches if need be.

    Example:
        >>> def split(batch, microbatches):
        ...     return [Microbatch((x,), None, 1, 0.5, 0) for x in batch[:microbatches]]
        >>> [(one.inputs, one.samples) for one in filled_up(split)("a", 3)]
        [(('a',), 1), (('a',), 0), (('a',), 0)]
    """

    def cut(batch: Any, microbatches: int) -> list[Any]:
        samples = split(batch, 1)[0].samples
        parts = list(split(batch, max(1, min(microbatches, samples))))
        return parts + [replace(parts[-1], samples=0, share=0.0)] * (microbatches - len(parts))

    return cut


def length_of(loader: Iterable[Any]) -> int:
    """Return how many minibatches a loader yields."""
    try:
        count = len(loader)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"a pipeline's ranks must know how many minibatches come, and this "
            f"{type(loader).__name__} has no len(): take a DataLoader of a map-style dataset, or "
            "a list of minibatches."
        ) from None
    if count < 1:
        raise ValueError("the loader has no minibatches: its len() is 0.")
    return count
