"""On ranks: the weights after every step, held to a reference that rank 0 alone computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from on_ranks import gather, place

Rows = npt.NDArray[Any]  # one row a step: the weights, and what else is worth comparing


def assert_close(ranks: Sequence[Rows], wanted: Sequence[Any], tolerance: float) -> None:
    """Compare each rank's rows with its own reference, and say which rows differ."""
    for rank, (mine, one) in enumerate(zip(ranks, wanted, strict=True)):
        assert np.shape(mine) == np.shape(one), rank
        errors = np.abs(np.subtract(mine, one)).reshape(len(mine), -1).max(axis=1)
        wrong = np.flatnonzero(~(errors <= tolerance))  # ~(<=): a NaN is wrong, too
        assert not len(wrong), (
            f"rank {rank}: {len(wrong)} of {len(errors)} rows differ, the first is row {wrong[0]} "
            f"by {errors[wrong[0]]:.3g}, at most by {np.nanmax(errors):.3g}"
        )


def compare(mine: Rows, wanted: Callable[[], Sequence[Any]], tolerance: float) -> list[Rows]:
    """On all ranks: have rank 0 compare all ranks' rows with the reference; return these rows."""
    ranks = gather(mine)
    if place()[1] == 0:
        assert_close(ranks, wanted(), tolerance)
    return ranks
