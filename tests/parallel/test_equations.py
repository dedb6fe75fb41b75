"""Each strategy is its equation: every weight after every step, against the serial reference."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest
import workers_equations
from cases import of_case
from cells import CELLS, STOCK, Cell
from ranks import once, run_ranks

TOLERANCE = 1e-12

trajectories = once(lambda n: run_ranks(n, workers_equations.trajectories))


@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_trajectory(n: int, cell: Cell) -> None:
    expected = cell.expected(n)
    for rank, actual in enumerate(of_case(trajectories(n), cell)):
        assert actual.shape == expected[rank].shape
        errors = np.abs(actual - expected[rank]).max(axis=1)
        wrong = np.flatnonzero(~(errors <= TOLERANCE))  # ~(<=): a NaN is wrong, too
        assert not len(wrong), (
            f"rank {rank}: {len(wrong)} of {len(errors)} records differ, first record {wrong[0]} "
            f"by {errors[wrong[0]]:.3g}, at most by {np.nanmax(errors):.3g}"
        )


@pytest.mark.parametrize("cell", CELLS, ids=str)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_replicas_are_equal_bit_for_bit(n: int, cell: Cell) -> None:
    """After the last ``synchronize()``; where all ranks update alike, after every step."""
    first, *others = of_case(trajectories(n), cell)
    records = slice(-1, None) if cell.strategy.startswith("cocod") else slice(None)
    for other in others:
        assert np.array_equal(other[records], first[records])


def test_the_equations_can_be_told_apart() -> None:
    """A tolerance of 1e-12 shows something only where a wrong strategy is off by far more."""

    def spread(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
        return float(np.abs(a - b).max())

    named = [STOCK, "pipe-sgd", "pipe-sgd:warmup_steps=5", "cocod:period=1", "cocod:period=4"]
    for optimizer in ("momentum", "adam", "adamw-groups"):
        cells = [Cell(strategy, optimizer) for strategy in named]
        for one, other in combinations(cells, 2):
            assert spread(one.expected(2)[:, :-1], other.expected(2)[:, :-1]) > 1e-3, (one, other)
        for cell in cells:  # and of the average: one worker alone goes elsewhere
            assert spread(cell.expected(2)[0], cell.expected(1)[0]) > 1e-3, cell
