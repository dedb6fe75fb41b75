"""Each strategy is its equation: every weight after every step, against the serial reference."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cells import CELLS, PREDICTIONS, STOCK, Cell
from on_ranks import on_ranks
from problem import OPTIMIZERS as COMMON
from problem import STEPS, loss_of, make_model, weights_of
from trajectories import compare

import hvd_pipe.torch as hvd

TOLERANCE = 1e-12
RANKS = {n: on_ranks(n, init=hvd.init) for n in (1, 2, 3)}
FEW = ("merged-gradient", "pipe-sgd", "cocod:period=4")


def shows_more(n: int, cell: Cell) -> bool:
    """Whether a cell on n ranks shows what no other one does."""
    special, momentum = cell.drains or cell.passes > 1, cell.optimizer == "momentum"
    if n == 2:
        predicts = cell.strategy in PREDICTIONS
        return bool(cell.strategy in FEW or momentum or special or predicts)
    return cell.strategy in FEW and momentum and (n == 3 or not special)


@pytest.mark.parametrize(
    ("n", "cell"),
    [
        pytest.param(n, cell, marks=RANKS[n], id=f"{n}-{cell}")
        for n in RANKS
        for cell in CELLS
        if shows_more(n, cell)
    ],
)
def test_trajectory(n: int, cell: Cell) -> None:
    """Replicas are also equal bit for bit, where all ranks update alike after every step."""
    ranks = compare(cell.run(), partial(cell.expected, n), TOLERANCE)
    apart = cell.strategy.startswith("cocod") or "local" in cell.strategy
    records = slice(-1, None) if apart else slice(None)
    for other in ranks[1:]:
        assert np.array_equal(other[records], ranks[0][records])


@RANKS[2]
def test_the_equations_can_be_told_apart() -> None:
    """A tolerance of 1e-12 shows something only where a wrong strategy is off by far more."""
    if hvd.rank() != 0:  # the first rank has computed most of them
        return

    def spread(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
        return float(np.abs(a - b).max())

    named = [
        STOCK,
        *PREDICTIONS,
        "pipe-sgd",
        "pipe-sgd:warmup_steps=5",
        "cocod:period=1",
        "cocod:period=4",
    ]
    for optimizer in ("momentum", "adam", "adamw-groups"):
        cells = [Cell(strategy, optimizer) for strategy in named]
        for one, other in combinations(cells, 2):
            assert spread(one.expected(2)[:, :-1], other.expected(2)[:, :-1]) > 1e-3, (one, other)
        for cell in cells:  # and of the average: one worker alone goes elsewhere
            assert spread(cell.expected(2)[0], cell.expected(1)[0]) > 1e-3, cell


@RANKS[2]
@pytest.mark.parametrize(
    "pair",
    [("merged-gradient", "pipe-sgd"), ("cocod:period=4", "pipe-sgd:warmup_steps=5")],
    ids=" and ".join,
)
def test_two_optimizers_in_one_script(pair: tuple[str, str]) -> None:
    """As for a GAN: two models with equal names, their optimizers stepping in turns."""
    cells = [Cell(strategy, kind) for strategy, kind in zip(pair, COMMON, strict=False)]
    models = [make_model() for _ in cells]
    optimizers: list[Any] = [
        hvd.DistributedOptimizer(
            COMMON[cell.optimizer](model), model.named_parameters(), strategy=cell.strategy
        )
        for model, cell in zip(models, cells, strict=True)
    ]
    for step in range(STEPS):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
        for optimizer in optimizers:
            optimizer.step()
    for model, cell, optimizer in zip(models, cells, optimizers, strict=True):
        optimizer.synchronize()
        wanted = cell.expected(2)[hvd.rank(), -1]
        np.testing.assert_allclose(weights_of(model), wanted, rtol=0, atol=TOLERANCE)
