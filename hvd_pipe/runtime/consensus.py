"""Every rank decides alike: share small facts, and say on all ranks where two of them differ.

Knows no framework: each adapter makes an `Agreement` of the one collective that it needs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from horovod.common import process_sets
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet

from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.runtime.watch.waits import waiting_for

Description = Sequence[tuple[str, str]]
"""What a rank is about to do, as (label, value) lines in an order that all ranks share."""

MOST_SPEAKERS = 16
"""So many ranks say what they are about to do, where ranks differ."""

T = TypeVar("T")

GatherBytes = Callable[[bytes, str, ProcessSet], list[bytes]]
"""Returns the bytes, of any lengths, that each rank of a process set has passed under a name."""


def answer_with(horovod: Any) -> None:
    """Let process sets ask a framework's own Horovod, by its ``mpi_ops``.

    Where a process has several frameworks, they ask that of the one that was imported last, which
    need not have been initialised: every process set would then seem to be of others.
    """
    process_sets._setup(horovod._basics)


def members(process_set: ProcessSet) -> list[int]:
    """Return the global ranks of a process set."""
    if process_set.ranks is not None:
        return list(process_set.ranks)
    return list(range(int(process_set.size())))


def failed(error: Exception) -> Description:
    """Describe a rank that has found a mistake: it differs from all ranks that have not."""
    return [(_REFUSED, f"{type(error).__name__}: {error}")]


@contextmanager
def shutdown_is_told() -> Iterator[None]:
    """Raise HorovodInternalError where a process set is gone: by a shutdown."""
    try:
        yield
    except Exception as error:  # torch raises a ValueError, TensorFlow an OpError of its own
        if not re.search("Process set (provided )?does not exist", str(error)):
            raise
        raise HorovodInternalError(
            "Horovod was shut down, or a process set was removed, here or on another rank. "
            f"Horovod says: {error}"
        ) from error


def allocated_everywhere(
    make: Callable[[], T],
    nbytes: int,
    process_set: ProcessSet,
    largest: Callable[[Sequence[float]], list[float]],
) -> T:
    """Return what ``make`` returns, or raise on every rank where one has no memory for it."""
    buffers, failure, lacking = None, None, 0.0
    try:
        buffers = make()
    except Exception as error:  # whatever it is, the others must hear of it
        failure, lacking = error, 1.0 + process_set.rank()
    [lacking] = largest([lacking])
    if failure is not None:
        raise failure
    if lacking or buffers is None:
        raise HvdPipeError(
            f"rank {members(process_set)[int(lacking) - 1]} could not allocate {nbytes} bytes "
            "to measure all-reduces with: free memory there, measure smaller messages, or train "
            "with a strategy that measures none, such as 'merged-gradient'."
        )
    return buffers


class Agreement:
    """What ranks ask each other before they act, by a framework's gather of bytes."""

    def __init__(self, gather_bytes: GatherBytes) -> None:
        self._gather_bytes = gather_bytes

    @shutdown_is_told()
    def gather(self, value: Any, name: str, process_set: ProcessSet) -> list[Any]:
        """Return every rank's JSON-able ``value``, in the order of the process set's ranks."""
        data = json.dumps(value).encode()
        with waiting_for(name):
            alone = len(members(process_set)) == 1
            parts = [data] if alone else self._gather_bytes(data, name, process_set)
        return [json.loads(part) for part in parts]

    @shutdown_is_told()
    def from_first(self, value: Any, name: str, process_set: ProcessSet) -> Any:
        """Return the first rank's JSON-able ``value`` on every rank."""
        return self.gather(value if process_set.rank() == 0 else None, name, process_set)[0]

    @shutdown_is_told()
    def found_by_first(self, find: Callable[[], Any], name: str, process_set: ProcessSet) -> Any:
        """Return on every rank the JSON-able value that the first rank finds."""
        answer: dict[str, Any] | None = None
        failure: Exception | None = None
        if process_set.rank() == 0:
            try:
                answer = {"value": find()}
            except Exception as error:  # the others wait for an answer
                answer, failure = {"error": f"{type(error).__name__}: {error}"}, error
        reply: dict[str, Any] = self.from_first(answer, name, process_set)
        if failure is not None:
            raise failure
        if "error" in reply:
            rank = members(process_set)[0]
            raise HvdPipeError(f"rank {rank}, which decides for all, failed: {reply['error']}")
        return reply["value"]

    def checked(
        self, check: Callable[[], tuple[T, Description]], name: str, process_set: ProcessSet
    ) -> T:
        """Return what ``check`` finds on this rank, if all ranks describe the same.

        A rank on which it raises still takes part, so that the others hear of it instead of
        waiting for it.
        """
        failure: Exception | None = None
        try:
            result, description = check()
        except Exception as error:  # whatever it is, the others must not wait for this rank
            failure, description = error, failed(error)
        try:
            if process_set.included():
                self.check_alike(description, name, process_set)
        except RanksDisagreeError:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        return result

    def check_alike(self, description: Description, name: str, process_set: ProcessSet) -> None:
        """Raise on every rank, with the first difference and both sides, unless all ranks agree.

        Equal digests cost one small message; the lines themselves travel only where they differ,
        of one rank for each digest: all lines of all ranks would be n times as much on every rank.
        """
        digest = hashlib.sha256(json.dumps(list(description)).encode()).hexdigest()
        digests = self.gather(digest, f"{name}.digest", process_set)
        first = {value: at for at, value in reversed(list(enumerate(digests)))}
        if len(first) == 1:
            return
        speakers = sorted(first.values())[:MOST_SPEAKERS]
        speaks = list(description) if process_set.rank() in speakers else None
        everyone = self.gather(speaks, f"{name}.lines", process_set)
        lines = [[tuple(line) for line in everyone[at]] for at in speakers]
        ranks = members(process_set)
        raise RanksDisagreeError(_first_difference(lines, [ranks[at] for at in speakers]))


_REFUSED = "refused"


def _first_difference(lines: Sequence[Sequence[tuple[str, str]]], ranks: Sequence[int]) -> str:
    """Describe the first line on which some rank differs from the first rank.

    >>> _first_difference([[("op", "Sum")], [("op", "Average")]], [0, 3]).partition(". ")[0]
    'ranks disagree on op: rank 0 has Sum; rank 3 has Average'
    >>> _first_difference([[("op", "Sum")], failed(ValueError("no op"))], [0, 3])
    'rank 3 was given something wrong, and rank 0 was not: ValueError: no op'
    """
    missing = ("", "nothing more")
    for index in range(max(len(one) for one in lines)):
        row = [one[index] if index < len(one) else missing for one in lines]
        if len(set(row)) > 1:
            other = next(i for i, line in enumerate(row) if line != row[0])
            refused = [i for i, (label, _) in enumerate(row) if label == _REFUSED]
            if refused:
                return (
                    f"rank {ranks[refused[0]]} was given something wrong, and rank "
                    f"{ranks[0 if refused[0] else other]} was not: {row[refused[0]][1]}"
                )
            label = row[0][0] or row[other][0]
            return (
                f"ranks disagree on {label}: rank {ranks[0]} has {row[0][1]}; rank {ranks[other]} "
                f"has {row[other][1]}. Every rank must build the same model and optimizer and use "
                "the same strategy: look for a branch on the rank, or other files or versions, in "
                "the script."
            )
    raise AssertionError("equal descriptions with different digests")
