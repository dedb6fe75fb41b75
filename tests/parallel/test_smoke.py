"""One small job a framework, for `make test-fast`: every strategy is its equation on two ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import keras_pipeline
import keras_reference
import numpy as np
import pytest
import workers_equations
import workers_keras_equations
import workers_keras_pipedream as keras_job
import workers_pipedream
from cases import of_case
from cells import Cell
from ranks import once, run_ranks

STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=4")
CELLS = [Cell(strategy, "momentum") for strategy in STRATEGIES]
FITS = [("fit", strategy, "momentum") for strategy in STRATEGIES]
PIPELINES = [f"1-1 {mode} momentum" for mode in ("stash", "2bw", "flush")]
FEW_STAGES = keras_job.Case("stash", (1, 1), "momentum")


@once
def results(function: Callable[..., Any], *args: object) -> Any:
    """Of a function that runs many cases, those of this file alone."""
    names = [re.escape(str(case)) for case in (*CELLS, *FITS, *PIPELINES, FEW_STAGES)]
    return run_ranks(2, function, *args, env={"ONLY_CASES": f"^({'|'.join(names)})$"})


def assert_close(found: Iterable[Any], wanted: Iterable[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_torch(cell: Cell) -> None:
    assert_close(of_case(results(workers_equations.trajectories), cell), cell.expected(2))


@pytest.mark.parametrize("case", FITS, ids="-".join)
def test_keras(case: tuple[str, str, str]) -> None:
    found = of_case(results(workers_keras_equations.trajectories, tuple(FITS)), case)
    assert_close(found, keras_reference.trajectory(2, *case[1:]))


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_of_torch(name: str) -> None:
    wanted = workers_pipedream.expected(workers_pipedream.CASES[name])
    for found in of_case(results(workers_pipedream.run, 2), name):
        assert_close(found.losses, wanted.losses)
        for state, equation in zip(found.states, wanted.states, strict=True):
            assert_close(state.values(), equation.values())


def test_pipelines_of_keras() -> None:
    mode, replicas, optimizer, *_ = FEW_STAGES
    layers, make = keras_pipeline.STAGES[len(replicas)], keras_pipeline.OPTIMIZERS[optimizer]
    reference = keras_pipeline.Reference(layers, replicas, mode, make, 1)
    batches = keras_pipeline.make_batches(keras_job.MINIBATCHES)
    wanted = [reference.train_epoch(batches) for _ in range(keras_job.EPOCHS)]
    for losses, weights, _ in of_case(results(keras_job.equations, (FEW_STAGES,)), FEW_STAGES):
        assert losses == pytest.approx(wanted, abs=1e-10)
        assert keras_job.is_close(weights, keras_pipeline.values_of(reference.model)) <= 1e-10
