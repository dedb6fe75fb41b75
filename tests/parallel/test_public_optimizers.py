"""Optimizers from PyPI work under every strategy: `public_optimizers`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks
from problem import make_model
from public_optimizers import (
    COCOD,
    FORWARD,
    ROWS,
    STRATEGIES,
    Array,
    Row,
    expected,
    run,
)
from trajectories import compare

import hvd_pipe.torch as hvd

pytestmark = on_ranks(2, init=hvd.init)

UNLIKE = {  # nightly: others take gradients and keep states as these, or as Adam and SGD do
    "AdamWScheduleFree",  # has a mode
    "Prodigy",  # shares a number over all parameters
    "SAM, the first pass in `no_sync()`",  # two passes
}


def case(row: Row, *more: str) -> Any:
    marks = [] if row.name in UNLIKE else [pytest.mark.nightly]
    return pytest.param(row, *more, id="-".join([row.name, *more]), marks=marks)


@functools.cache
def wanted(name: str, strategy: str) -> Array:
    return expected(ROWS[name], strategy)


def test_names_are_of_rows() -> None:
    assert set(ROWS) >= UNLIKE


@pytest.mark.parametrize(
    ("row", "strategy"), [case(row, each) for row in ROWS.values() for each in STRATEGIES]
)
def test_it_has_the_weights_of_one_process(row: Row, strategy: str) -> None:
    rows, deferred = run(row, strategy)
    assert deferred == (row.defers and strategy == FORWARD)
    ranks = compare(rows, functools.partial(wanted, row.name, strategy), row.tolerance)
    assert np.array_equal(*ranks), "replicas differ"


@pytest.mark.parametrize("row", [case(row) for row in ROWS.values()])
def test_an_average_makes_a_difference(row: Row) -> None:
    if hvd.rank() != 0:  # the first rank has computed them
        return
    [alone] = expected(row, COCOD, n=1)
    for strategy in STRATEGIES:
        assert np.abs(wanted(row.name, strategy)[0] - alone).max() > 1e-3, strategy


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Lion", "AdamWScheduleFree"])
def test_one_that_counts_steps_in_its_groups_is_not_deferred(name: str) -> None:
    """A user who says that it updates each parameter by itself is told what it also does."""
    row, model = ROWS[name], make_model()
    plain: Any = row.make(model)
    plain.updates_each_parameter = True
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=FORWARD)
    row.step(model, optimizer, 0)  # updates are deferred from the next one on
    row.step(model, optimizer, 1)
    with pytest.raises(ValueError, match="of its param_groups, which overlap='forward' would"):
        optimizer.synchronize()
