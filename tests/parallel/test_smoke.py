"""Every strategy of PyTorch is its equation on two ranks, over both launchers."""

from __future__ import annotations

import pytest
from cells import Cell
from on_ranks import on_ranks
from torch_pipelines import check, make_case, train
from trajectories import compare

from hvd_pipe.torch import pipedream

LAUNCHERS = [
    pytest.param(launcher, marks=on_ranks(2, launcher=launcher, init=pipedream.init))
    for launcher in ("mpi", "gloo")
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd", "cocod:period=4"])
def test_a_strategy(strategy: str, launcher: str) -> None:
    cell = Cell(strategy, "momentum")
    compare(cell.run(), lambda: cell.expected(2), 1e-12)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("mode", ["stash", "2bw", "flush"])
def test_a_pipeline(mode: str, launcher: str) -> None:
    case = make_case("1-1", mode)
    check(train(case), case)
