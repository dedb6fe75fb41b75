"""Each strategy is its equation: every weight after every step, against the serial reference."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pytest
from cells import CELLS, STOCK, Cell
from on_ranks import on_ranks
from trajectories import compare

import hvd_pipe.torch as hvd

TOLERANCE = 1e-12
RANKS = {n: on_ranks(n, init=hvd.init) for n in (1, 2, 3, 4)}
FEW = ("merged-gradient", "pipe-sgd", "cocod:period=4")


def marks(n: int, cell: Cell) -> list[pytest.MarkDecorator]:
    special, momentum = cell.drains or cell.passes > 1, cell.optimizer == "momentum"
    # nightly: other optimizers of plans and periods, what two ranks show as well, and four ranks,
    # which test_cocod_options has
    kept = {
        1: cell.strategy in FEW and momentum and not special,
        2: cell.strategy in FEW or momentum or special,
        3: special or (cell.strategy in FEW and momentum),
        4: False,
    }
    return [RANKS[n], *([pytest.mark.nightly] * (not kept[n]))]


@pytest.mark.parametrize(
    ("n", "cell"),
    [
        pytest.param(n, cell, marks=marks(n, cell), id=f"{n}-{cell}")
        for n in RANKS
        for cell in CELLS
    ],
)
def test_trajectory(n: int, cell: Cell) -> None:
    """Replicas are also equal bit for bit, where all ranks update alike after every step."""
    ranks = compare(cell.run(), partial(cell.expected, n), TOLERANCE)
    records = slice(-1, None) if cell.strategy.startswith("cocod") else slice(None)
    for other in ranks[1:]:
        assert np.array_equal(other[records], ranks[0][records])


@RANKS[2]
def test_the_equations_can_be_told_apart() -> None:
    """A tolerance of 1e-12 shows something only where a wrong strategy is off by far more."""
    if hvd.rank() != 0:  # the first rank has computed most of them
        return

    def spread(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
        return float(np.abs(a - b).max())

    named = [STOCK, "pipe-sgd", "pipe-sgd:warmup_steps=5", "cocod:period=1", "cocod:period=4"]
    for optimizer in ("momentum", "adam", "adamw-groups"):
        cells = [Cell(strategy, optimizer) for strategy in named]
        for one, other in combinations(cells, 2):
            assert spread(one.expected(2)[:, :-1], other.expected(2)[:, :-1]) > 1e-3, (one, other)
        for cell in cells:  # and of the average: one worker alone goes elsewhere
            assert spread(cell.expected(2)[0], cell.expected(1)[0]) > 1e-3, cell
