"""Microbatches: what a stage does with each, and where the first and the last stage read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from horovod.common.process_sets import ProcessSet

from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.pipeline.norms import Norms
from hvd_pipe.runtime.consensus import Agreement

__all__ = [
    "Buffer",
    "Feed",
    "Microbatch",
    "MicrobatchIndex",
    "Split",
    "Stage",
    "Tally",
    "filled_up",
    "length_of",
    "open_feed",
]


Buffer = npt.NDArray[np.uint8]
"""A message's bytes; a framework may hand over another object with the buffer interface."""


class MicrobatchIndex(NamedTuple):
    """A microbatch, by its minibatch and its place in that; numbers start at 0 in each run."""

    minibatch: int
    microbatch: int


class Tally(NamedTuple):
    """What the last stage's workers add up in a run; zeros in all others.

    Args:
        loss: Sum of the losses, each times its weight.
        metric: Likewise.
        weight: In training a microbatch's share of its minibatch, else its samples.
        samples: How many there were.
    """

    loss: float = 0.0
    metric: float = 0.0
    weight: float = 0.0
    samples: int = 0


class Stage(Protocol):
    """The layers of one worker, and their weights in all versions that are needed.

    For each microbatch the calls come in this order, those of several interleaved::

        [take_input] forward [output]  ...  [take_gradient] backward [input_gradient]

    The first stage has no take_input and input_gradient: it reads its inputs itself; the last has
    no output and take_gradient: it computes the loss. Messages are whole ones of
    :mod:`hvd_pipe.pipeline.wire`, header included. A run that is no training has no gradients.
    """

    feed: Feed | None
    """Where the first and the last stage read; to be set before each run."""

    norms: Norms
    """What it knows of the gradients of all stages."""

    def take_input(self, index: MicrobatchIndex, message: Buffer) -> None:
        """Take what the stage before has sent."""

    def forward(self, index: MicrobatchIndex, version: int) -> None:
        """Run forward with this version of the weights, and keep what backward needs."""

    def output(self, index: MicrobatchIndex) -> Buffer:
        """Return the message to the next stage; it is the caller's from then on."""

    def take_gradient(self, index: MicrobatchIndex, message: Buffer) -> None:
        """Take the gradient of the output from the next stage."""

    def backward(self, index: MicrobatchIndex, version: int) -> None:
        """Run backward with the version of the forward pass; add to the stage's gradient."""

    def input_gradient(self, index: MicrobatchIndex) -> Buffer:
        """Return the message to the stage before; it is the caller's from then on."""

    def average(self, contributors: int) -> None:
        """Wait until the gradient is the average, or sum, over the replicas that have one."""

    def update(self, version: int, keep: bool) -> None:
        """Apply the gradient to the newest weights, which makes ``version``; clear the gradient.

        Args:
            version: The newest from now on.
            keep: Whether the version before is still needed: updating must not change it.
        """

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
    """A microbatch.

    Args:
        inputs: What the model is called with.
        targets: What the loss compares its output with.
        samples: How many it has.
        share: Its part of the minibatch's samples.
        digest: A checksum of the targets, by which stages see that they mean the same minibatch.
    """

    inputs: tuple[Any, ...]
    targets: Any
    samples: int
    share: float
    digest: int


class Feed:
    """One pass over a loader.

    Args:
        loader: Yields (inputs, targets), alike on every rank.
        count: How many minibatches the run takes.
        split: Cuts a minibatch into microbatches.

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

    All ranks run as many microbatches of each minibatch, so the last one is run again, and not
    counted.

    Args:
        split: Cuts a minibatch that has a sample for each microbatch.

    Example:
        >>> def split(batch, microbatches):
        ...     return [Microbatch((x,), None, 1, 0.5, 0) for x in batch[:microbatches]]
        >>> [(one.inputs, one.samples) for one in filled_up(split)("a", 3)]
        [(('a',), 1), (('a',), 0), (('a',), 0)]
    """

    def cut(batch: Any, microbatches: int) -> list[Any]:
        samples = split(batch, 1)[0].samples
        found = list(split(batch, max(1, min(microbatches, samples))))
        return found + [replace(found[-1], samples=0, share=0.0)] * (microbatches - len(found))

    return cut


def length_of(loader: Iterable[Any]) -> int:
    """Return how many minibatches a loader yields.

    Raises:
        TypeError: It does not say.
        ValueError: There are none.

    Example:
        >>> length_of([1, 2])
        2
    """
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
