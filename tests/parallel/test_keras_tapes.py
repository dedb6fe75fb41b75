"""Tapes with sources that are tensors, with several gradients a step, and of models that go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import of_case
from workers_keras_mending import N, observed
from workers_keras_tapes import MODES, STEPS, STRATEGIES

MEAN = (N + 1) / 2
DUE = {
    "merged-gradient": MEAN * np.arange(1, STEPS + 1),
    "pipe-sgd": MEAN * np.arange(STEPS),
}


def ranks_of(case: str) -> list[dict[str, Any]]:
    return of_case(observed(), case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sources_may_be_tensors(strategy: str, mode: str) -> None:
    """A tensor that is watched has no name when executed eagerly: AttributeError."""
    due = list(DUE[strategy]) + [MEAN * STEPS] * (strategy == "pipe-sgd")
    for found in ranks_of(f"tensors {strategy} {mode}"):
        wanted = [[[each, each], [2 * each, 3 * each]] for each in due]
        np.testing.assert_allclose(found["seen"], wanted, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_persistent_tape_has_several_gradients_a_step(strategy: str, mode: str) -> None:
    """Under pipe-sgd, the gradient of one loss was returned for the other's."""
    for found in ranks_of(f"two losses {strategy} {mode} persistent"):
        due = DUE[strategy]
        np.testing.assert_allclose(found["seen"], np.stack([due, 100 * due], 1), rtol=1e-6)
        left = 101 * MEAN * STEPS * (strategy == "pipe-sgd")
        np.testing.assert_allclose(found["drained"], left, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_tapes_in_a_step_lose_nothing(strategy: str, mode: str) -> None:
    """Each is a step of Pipe-SGD; in one graph, their messages had the same names at once."""
    for found in ranks_of(f"two losses {strategy} {mode} two tapes"):
        if strategy == "merged-gradient":
            due = DUE[strategy]
            np.testing.assert_allclose(found["seen"], np.stack([due, 100 * due], 1), rtol=1e-6)
        total = np.sum(found["seen"]) + found["drained"]
        np.testing.assert_allclose(total, 101 * MEAN * sum(range(1, STEPS + 1)), rtol=1e-6)


def test_a_tape_may_be_recorded_anew_in_each_step() -> None:
    for found in ranks_of("one tape"):
        np.testing.assert_allclose(found["seen"], DUE["pipe-sgd"])
        np.testing.assert_allclose(found["drained"], MEAN * STEPS)


def test_an_optimizer_may_be_applied_twice_in_a_graph() -> None:
    for found in ranks_of("applied twice"):
        total = 101 * sum(range(1, STEPS + 1))
        np.testing.assert_allclose(found["weight"], -MEAN * total, rtol=1e-6)
        rows = [-(rank + 1) / N * total for rank in range(N)]
        np.testing.assert_allclose(found["rows"][:N, 0], rows, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_models_that_were_taped_are_let_go(mode: str) -> None:
    """What a tape had in flight was kept by the process for ever, and with it every model."""
    for found in ranks_of(f"gone {mode}"):
        assert found["kept"] == 0


def test_hosts_may_change_when_one_rank_has_dropped_a_model() -> None:
    """Each rank's collector takes a dropped model at its own time.

    The rank that still had it averaged what that had in flight, alone, and waited for ever.
    """
    first, second = ranks_of("gone on one rank")
    np.testing.assert_allclose([first["kept"], second["kept"]], MEAN)
    assert sorted(second) == ["kept"]
    np.testing.assert_allclose(first["dropped"], 1.0)
