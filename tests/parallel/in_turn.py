"""Ranks that do something one after the other: a rank that waits for a later one is seen."""

from __future__ import annotations

from collections.abc import Callable

from on_ranks import gather, place

LONG_S = 40.0
"""What a rank may take for what waits for nobody."""


def one_after_the_other(call: Callable[[], object]) -> None:
    """On a rank: make a call when all ranks before this one have returned from theirs."""
    _, mine, size = place()
    for rank in range(size):
        if rank == mine:
            call()
        gather(None, LONG_S)
