"""Checks of what both frameworks' engines are given."""

from __future__ import annotations

import math
from typing import Any

from hvd_pipe.planning.modes import Mode

__all__ = ["check_microbatches", "check_positive"]


def check_positive(name: str, value: Any) -> None:
    """Check a number that may be left out.

    Raises:
        TypeError, ValueError: It is none, or not above 0.

    Example:
        >>> check_positive("bandwidth", 1e9)
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number or None, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be finite and above 0, got {value}")


def check_microbatches(count: Any, mode: Mode) -> None:
    """Check into how many microbatches a minibatch is to be cut, where that is said.

    Raises:
        TypeError, ValueError: It is no such number, or the mode has none.

    Example:
        >>> from hvd_pipe.planning.modes import MODES
        >>> check_microbatches(4, MODES["2bw"])
    """
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"microbatches must be an integer or None, got {count!r}")
    if count < 1:
        raise ValueError(f"microbatches must be at least 1, got {count}")
    if count > 1 and not mode.coalesces:
        raise ValueError(
            f"mode {mode.name!r} updates after every minibatch, so it has no microbatches, got "
            f"{count}: give the loader a smaller batch_size, or take mode='2bw' or 'flush'"
        )
