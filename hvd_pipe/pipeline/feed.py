"""Minibatches as a run asks for them: in order, cut into microbatches, each looked at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from horovod.common.process_sets import ProcessSet

from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.pipeline.stage import Unit
from hvd_pipe.runtime.agreement import Agreement

__all__ = ["Feed", "Piece", "Split", "filled_up", "length_of", "open_feed"]

Split = Callable[[Any, int], Sequence[Any]]
"""Cuts a minibatch into so many `Piece`, along the first dimension."""


@dataclass(frozen=True)
class Piece:
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
        >>> feed = Feed(["ab", "cd"], 2, lambda batch, pieces: list(batch[:pieces]))
        >>> feed.first
        'ab'
        >>> feed.pieces = 2
        >>> feed.piece(Unit(1, 0)), feed.piece(Unit(1, 1))
        ('c', 'd')
    """

    def __init__(self, loader: Iterable[Any], count: int, split: Split) -> None:
        self.count = count
        """How many minibatches the run takes."""
        self._split = split
        self._batches: Iterator[Any] = iter(loader)
        self._at = -1
        self._pieces_now: Sequence[Any] = ()
        self.pieces = 1
        """Microbatches of a minibatch; to be set before the first is asked for."""
        self.first = self._next()
        """The first minibatch, whole."""
        self._batches = chain([self.first], self._batches)

    def piece(self, unit: Unit) -> Any:
        """Return a microbatch; minibatches are asked for in their order, and may be left out."""
        while self._at < unit.minibatch:
            batch = self._next()
            self._at += 1
            if self._at == unit.minibatch:
                self._pieces_now = self._split(batch, self.pieces)
        return self._pieces_now[unit.microbatch]

    def _next(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            raise HvdPipeError(
                f"the loader ended before its {self.count} minibatches, which is its len(): "
                "len(loader) must be the number of minibatches that it yields in every epoch."
            ) from None


def open_feed(make: Callable[[], Feed], agreement: Agreement, ranks: ProcessSet) -> Feed:
    """Open this rank's loader, and see that all ranks' are of one length.

    Args:
        make: Makes this rank's feed.
        agreement: How ranks ask each other.
        ranks: All of them.

    Raises:
        RanksDisagreeError: They are not, or another rank has failed.
        Exception: What ``make`` raises here.
    """
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
    """Return how an evaluation cuts: a minibatch may have fewer samples than there are pieces.

    All ranks run as many pieces of each minibatch, so the last one is run again, and not counted.

    Args:
        split: Cuts a minibatch that has a sample for each piece.

    Example:
        >>> def split(batch, pieces):
        ...     return [Piece((x,), None, 1, 1 / pieces, 0) for x in batch[:pieces]]
        >>> [(piece.inputs, piece.samples) for piece in filled_up(split)("a", 3)]
        [(('a',), 1), (('a',), 0), (('a',), 0)]
    """

    def cut(batch: Any, pieces: int) -> list[Any]:
        samples = split(batch, 1)[0].samples
        found = list(split(batch, max(1, min(pieces, samples))))
        return found + [replace(found[-1], samples=0, share=0.0)] * (pieces - len(found))

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
