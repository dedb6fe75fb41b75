"""Every use under every strategy, one after the other: test_uses.py looks at them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import uses_common
import uses_state
import uses_training
from cases import Raised, run_cases
from uses import STRATEGIES, Use

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError

USES = [*uses_training.USES, *uses_state.USES]

Cell = tuple[str, str]  # the use's name, the strategy


@dataclass(frozen=True)
class Refused:
    """In place of the result of a cell that was to be refused, and was."""

    message: str


def run(ranks: int) -> dict[Cell, Any | Raised]:
    """What became of all cells that are for this number of ranks."""
    hvd.init(process_sets=uses_common.PROCESS_SETS[ranks])
    return run_cases(
        {
            (use.name, strategy): partial(attempt, use, strategy)
            for use in USES
            if use.ranks == ranks
            for strategy in STRATEGIES
        }
    )


def attempt(use: Use, strategy: str) -> Any:
    try:
        return use.run(strategy)
    except (HvdPipeError, TypeError, ValueError) as error:
        if strategy not in use.refused:
            raise
        return Refused(str(error))
