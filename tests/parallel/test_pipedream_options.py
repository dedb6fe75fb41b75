"""Options of PyTorch's PipeDream: each does what it says, as the equations have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import workers_pipedream_options
from cases import of_case
from pipeline_problem import make_mixed
from ranks import once, run_ranks
from test_pipedream import assert_equal
from workers_pipedream import Case, Result, State, expected, reference
from workers_pipedream_options import (
    FORMATS,
    MOVED,
    OPTIONS,
    RECOMPUTED,
    RESUMED,
    ROUNDED,
    SAVED,
    Resumed,
    make_formats,
    make_rounded,
    moved,
)

results = once(lambda workers: run_ranks(workers, workers_pipedream_options.run, workers))


@once
def checkpoints(workers: int, folder: Path) -> list[Any]:
    """What ranks save and load; three workers come first, as others go on with what they save."""
    if workers != 3:
        checkpoints(3, folder)
    return run_ranks(workers, workers_pipedream_options.run_checkpoints, workers, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints go."""
    return tmp_path_factory.mktemp("checkpoints")


def assert_same(found: State, wanted: State) -> None:
    """Bit for bit."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert np.array_equal(found[name], value), name


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputing_changes_nothing(name: str) -> None:
    """Not the masks of dropout, and running statistics are not updated twice."""
    workers = RECOMPUTED[name].plan.workers
    kept: list[Result] = of_case(results(workers), f"kept {name}")
    for one, other in zip(kept, of_case(results(workers), f"recomputed {name}"), strict=True):
        assert one.losses == other.losses
        for state, same in zip(one.states, other.states, strict=True):
            assert_same(state, same)
        assert one.evaluated == other.evaluated


def test_dropout_drops() -> None:
    """Else the test above would say little: other seeds, other losses."""
    dropping = RECOMPUTED["1-1 stash"]
    ours = of_case(results(2), "kept 1-1 stash")[0].losses
    assert not np.allclose(ours, expected(dropping).losses, rtol=1e-6)


@pytest.mark.parametrize("name", ROUNDED)
def test_bfloat16_on_the_wire_rounds_at_the_cuts(name: str) -> None:
    """Activations and their gradients, and nothing else: weights and their gradients are exact."""
    case = ROUNDED[name]
    wanted = expected(case, make_rounded(case))
    for rank in of_case(results(case.plan.workers), f"rounded {name}"):
        np.testing.assert_allclose(rank.losses, wanted.losses, rtol=1e-12)
        for state, equation in zip(rank.states, wanted.states, strict=True):
            for key, value in equation.items():
                np.testing.assert_allclose(state[key], value, rtol=1e-12, atol=1e-12, err_msg=key)
    assert not np.allclose(wanted.losses, expected(case).losses, rtol=1e-9)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_in_the_equations(name: str) -> None:
    case, options = OPTIONS[name]
    wanted = expected(case, **options)
    for rank in of_case(results(case.plan.workers), name):
        assert_equal(rank, wanted)
    assert not np.allclose(wanted.losses, expected(case).losses, rtol=1e-6)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on_bit_for_bit(name: str, folder: Path) -> None:
    """With dropout and running statistics, in a new engine that has done something else."""
    ranks: list[Resumed] = of_case(checkpoints(RESUMED[name].plan.workers, folder), name)
    for rank in ranks:
        assert rank.losses[0] == rank.losses[1]
        assert_same(rank.resumed, rank.whole)


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("name", MOVED)
def test_other_workers_go_on_with_a_checkpoint(name: str, saved: str, folder: Path) -> None:
    """With another plan and mode: momenta move with their parameters."""
    case = Case(MOVED[name].plan, MOVED[name].mode, saved, microbatches=MOVED[name].microbatches)
    wanted = moved(SAVED[saved], case)
    for rank in of_case(checkpoints(case.plan.workers, folder), f"{saved} {name}"):
        assert_equal(rank, wanted)


@pytest.mark.parametrize("saved", SAVED)
def test_the_saved_model_loads_without_us(saved: str, folder: Path) -> None:
    states = of_case(checkpoints(3, folder), f"save {saved}")
    model = make_mixed()
    state = torch.load(folder / saved / "model.pt", weights_only=True)
    model.load_state_dict(state)
    for rank in states:
        assert_same(rank, {name: t.numpy() for name, t in model.state_dict().items()})


def test_weights_in_bfloat16_and_channels_last() -> None:
    """Horovod's own broadcast ended in a ValueError of one word, as the pipeline was built."""
    serial = reference(FORMATS, make_formats(0))
    loss = serial.train_epoch(FORMATS.data(0))
    wanted = {name: tensor.double().numpy() for name, tensor in serial.state_dict().items()}
    for found in of_case(results(2), "formats"):
        assert found.losses == pytest.approx([loss], rel=1e-6)
        for name, value in wanted.items():
            np.testing.assert_allclose(found.states[0][name], value, rtol=0, atol=0.01)
