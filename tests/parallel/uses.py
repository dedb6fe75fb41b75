"""The battery: what users do to optimizers, as cells of strategy x use.

A `Use` runs under every strategy on real ranks, and is compared with plain torch that plays all
workers in one process; or it is refused, with a message that says what to do instead. The table
in docs/uses.md is made from these cells: ``python tests/parallel/test_uses.py`` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

FORWARD = "merged-gradient:overlap=forward"
STRATEGIES = ("merged-gradient", FORWARD, "pipe-sgd", "cocod:period=3")


@dataclass(frozen=True)
class Use:
    """One row of the table.

    Args:
        name: As the table has it.
        run: On a rank: takes a strategy, returns an array (weights after every step, as a rule),
            or raises.
        expected: In a test: takes a strategy and the number of ranks, returns each rank's array.
        refused: By strategy, a part of the message with which it is refused.
        tolerance: The largest difference allowed.
        ranks: On how many ranks it runs.
        replicas: Ranks whose arrays must be equal bit for bit: in the last row, and in all rows
            where all ranks update alike (not under CoCoD). None: all ranks; (): no ranks.
        has_own_column: Whether under CoCoD the last column is each rank's own.
    """

    name: str
    run: Callable[[str], Any]
    expected: Callable[[str, int], Any]
    refused: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 1e-12
    ranks: int = 2
    replicas: tuple[int, ...] | None = None
    has_own_column: bool = False
