"""``HVD_PIPE_CHECK=1``: make races and unequal replicas show, at a cost.

1. Buffers that hold nothing of use are filled with NaN, so that a read of them shows.
2. Checksums of weights and gradients are compared over the ranks after every tenth update, and
   what was changed while it was being sent is found at once.
3. A random delay comes before every launch, arrival and hook. ``HVD_PIPE_CHECK_SEED`` chooses the
   delays; each rank and each thread has its own.

Adapters call `active`, which does nothing unless the variable is set. Knows no framework.
"""

from __future__ import annotations

import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from horovod.common.process_sets import ProcessSet

from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.runtime.consensus import members

CHECK, SEED = "HVD_PIPE_CHECK", "HVD_PIPE_CHECK_SEED"

COMPARE_STEPS = 10
"""Updates from one comparison of replicas to the next."""

LONGEST_DELAY_S = 0.003
DELAYED = 0.25
"""How often there is a delay at all."""

Gather = Callable[[Any, str, ProcessSet], list[Any]]


class Check:
    """The checks; none of them without a seed, which chooses the delays."""

    def __init__(self, seed: int | None, rank: int = 0) -> None:
        self.on = seed is not None
        self._seed, self._rank = seed, rank
        self._threads = threading.local()

    def begin(self, rank: int) -> None:
        """Take this rank's delays; before the first of them."""
        if rank != self._rank:
            self._rank, self._threads = rank, threading.local()

    def delay(self) -> None:
        """Wait for a random time, or not at all."""
        if self.on and (seconds := self.next_delay()):
            time.sleep(seconds)

    def next_delay(self) -> float:
        """Return the next delay of this thread, in seconds; often none."""
        if not hasattr(self._threads, "random"):
            name = threading.current_thread().name
            self._threads.random = random.Random(f"{self._seed} {self._rank} {name}")
        draw: random.Random = self._threads.random
        return draw.uniform(0.0, LONGEST_DELAY_S) if draw.random() < DELAYED else 0.0


def from_environment(environment: Mapping[str, str]) -> Check:
    """Return what the variables ask for; ValueError where one means nothing.

    >>> from_environment({"HVD_PIPE_CHECK": "1", "HVD_PIPE_CHECK_SEED": "7"}).on
    True
    >>> from_environment({"HVD_PIPE_CHECK": "0"}) is OFF
    True
    """
    wanted, seed = environment.get(CHECK, ""), environment.get(SEED, "0")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"{CHECK} must be 1 or 0, got {wanted!r}.")
    if not seed.isdecimal():
        raise ValueError(f"{SEED} must be a whole number, 0 or more, got {seed!r}.")
    return Check(int(seed)) if wanted == "1" else OFF


def checksum(data: bytes) -> str:
    """Return the CRC-32 as hexadecimal digits.

    >>> checksum(b"weights")
    '1ad27358'
    """
    return f"{zlib.crc32(data):08x}"


def compare(
    lines: Sequence[tuple[str, str]],
    detail: Callable[[int], str],
    when: str,
    gather: Gather,
    name: str,
    process_set: ProcessSet,
) -> None:
    """Raise on every rank unless all have the same checksums; all ranks come here."""
    digest = checksum(repr(list(lines)).encode())
    if len(set(gather(digest, f"{name}.digest", process_set))) == 1:
        return
    place = first_difference(gather([one for _, one in lines], f"{name}.lines", process_set))
    if place is None:
        raise HvdPipeError("ranks compare different numbers of parameters.")
    details = gather(detail(place), f"{name}.detail", process_set)
    raise RanksDisagreeError(disagreement(when, lines[place][0], details, members(process_set)))


def first_difference(everyone: Sequence[Sequence[object]]) -> int | None:
    """Return the first place in which some rank has another checksum than the first rank.

    >>> first_difference([["1", "2"], ["1", "3"]]), first_difference([["1"], ["1"]])
    (1, None)
    """
    rows = enumerate(zip(*everyone, strict=False))
    return next((place for place, row in rows if len(set(row)) > 1), None)


def disagreement(when: str, label: str, sides: Sequence[str], ranks: Sequence[int]) -> str:
    """Say that ranks have different values where all should have the same.

    >>> disagreement("after step 3", "the weight of 'w'", ["a", "a", "b"], [0, 1, 2])[:71]
    "after step 3, ranks disagree on the weight of 'w': rank 0 has a; rank 2"
    """
    other = next((i for i, side in enumerate(sides) if side != sides[0]), 0)
    return (
        f"{when}, ranks disagree on {label}: rank {ranks[0]} has {sides[0]}; rank {ranks[other]} "
        f"has {sides[other]}. Replicas must be equal here, bit for bit: look for ranks that began "
        "differently (hvd.broadcast_parameters, hvd.broadcast_variables), and for code that "
        "changes weights or gradients on one rank alone."
    )


OFF = Check(None)
active = from_environment(os.environ)
"""The process's one."""
