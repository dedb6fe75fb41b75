"""Every rank decides alike: share small facts, and say on all ranks where two of them differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from horovod.torch.mpi_ops import Max as _Max
from horovod.torch.mpi_ops import ProcessSet, allgather, allreduce_, size

from hvd_pipe.errors import HvdPipeError, RanksDisagreeError

__all__ = [
    "Description",
    "check_alike",
    "failed",
    "found_by_first",
    "from_first",
    "gather",
    "largest",
    "members",
]

Description = Sequence[tuple[str, str]]
"""What a rank is about to do, as (label, value) lines in an order that all ranks share."""


def members(process_set: ProcessSet) -> list[int]:
    """Return the global ranks of a process set."""
    return list(process_set.ranks) if process_set.ranks is not None else list(range(size()))


def gather(value: Any, name: str, process_set: ProcessSet) -> list[Any]:
    """Return every rank's JSON-able ``value``, in the order of the process set's ranks."""
    data = json.dumps(value).encode()
    if process_set.size() == 1:
        return [json.loads(data)]
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    count = torch.tensor([tensor.numel()])
    counts = allgather(count, name=f"{name}.bytes", process_set=process_set).tolist()
    parts = allgather(tensor, name=f"{name}.data", process_set=process_set).split(counts)
    return [json.loads(part.numpy().tobytes()) for part in parts]


def from_first(value: Any, name: str, process_set: ProcessSet) -> Any:
    """Return the first rank's JSON-able ``value`` on every rank."""
    first = process_set.rank() == 0
    return gather(value if first else None, name, process_set)[0]


def found_by_first(find: Callable[[], Any], name: str, process_set: ProcessSet) -> Any:
    """Return on every rank the JSON-able value that the first rank finds.

    Raises:
        HvdPipeError: ``find`` raised on the first rank, where its own error is raised.
    """
    answer: dict[str, Any] | None = None
    failure: Exception | None = None
    if process_set.rank() == 0:
        try:
            answer = {"value": find()}
        except Exception as error:  # the others wait for an answer
            answer, failure = {"error": f"{type(error).__name__}: {error}"}, error
    answer = from_first(answer, name, process_set)
    assert answer is not None
    if failure is not None:
        raise failure
    if "error" in answer:
        rank = members(process_set)[0]
        raise HvdPipeError(f"rank {rank}, which decides for all, failed: {answer['error']}")
    return answer["value"]


def largest(values: Sequence[float], name: str, process_set: ProcessSet) -> list[float]:
    """Return, place by place, the largest of all ranks' ``values``."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if process_set.size() > 1:
        allreduce_(tensor, name=name, op=_Max, process_set=process_set)
    result: list[float] = tensor.tolist()
    return result


def check_alike(mine: Description, name: str, process_set: ProcessSet) -> None:
    """Raise on every rank, with the first difference and both sides, unless all ranks agree.

    Equal digests cost one small message; the lines themselves travel only where they differ.

    Raises:
        RanksDisagreeError: Two ranks' descriptions differ.
    """
    digest = hashlib.sha256(json.dumps(list(mine)).encode()).hexdigest()
    if len(set(gather(digest, f"{name}.digest", process_set))) == 1:
        return
    lines = [
        [tuple(line) for line in one] for one in gather(list(mine), f"{name}.lines", process_set)
    ]
    raise RanksDisagreeError(_first_difference(lines, members(process_set)))


def failed(error: Exception) -> Description:
    """Describe a rank that has found a mistake: it differs from all ranks that have not."""
    return [(_REFUSED, f"{type(error).__name__}: {error}")]


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
