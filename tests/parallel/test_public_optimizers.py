"""Optimizers from PyPI work under every strategy: `public_optimizers`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks
from public_optimizers import (
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


@pytest.mark.parametrize(
    ("row", "strategy"), [case(row, each) for row in ROWS.values() for each in STRATEGIES]
)
def test_it_has_the_weights_of_one_process(row: Row, strategy: str) -> None:
    rows, deferred = run(row, strategy)
    assert deferred == (row.defers and strategy == FORWARD)
    ranks = compare(rows, functools.partial(wanted, row.name, strategy), row.tolerance)
    assert np.array_equal(*ranks), "replicas differ"
