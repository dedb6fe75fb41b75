"""DistributedOptimizer keeps what the user's optimizer is and has; schedulers follow it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import workers_wrapping
from cases import of_case
from cells import Cell
from problem import OPTIMIZERS, STEPS
from ranks import once, run_ranks
from reference import Workers, mean
from workers_wrapping import LOCAL_STEPS, PAIRS, SCHEDULED_STEPS, STRATEGIES, WAYS

results = once(lambda: run_ranks(2, workers_wrapping.run))


def assert_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("before", [True, False], ids=["made before", "made after"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_scheduler_follows(strategy: str, before: bool) -> None:
    rates = 0.5 ** np.arange(SCHEDULED_STEPS)
    for rank, updates in enumerate(of_case(results(), ("scheduled", strategy, before))):
        if strategy == "pipe-sgd":
            assert_close(updates, 1.5 * rates * (rates < 1))  # the first step applies nothing
        elif strategy == "merged-gradient":
            assert_close(updates, 1.5 * rates)
        else:  # local updates; a round that starts with equal models ends with nothing to add
            assert_close(updates, (rank + 1) * rates)


def test_momentum_from_before_survives() -> None:
    workers = Workers(2, OPTIMIZERS["momentum"])
    for step in range(LOCAL_STEPS):
        gradients = workers.gradients(step)
        workers.update([gradients[0], gradients[0]])
    for step in range(STEPS):
        workers.update(mean(workers.gradients(step)))
        workers.record()
    for rank, weights in enumerate(of_case(results(), "continued")):
        assert_close(weights, workers.trajectory[rank])


def test_it_is_what_the_user_made() -> None:
    for rank in of_case(results(), "identity"):
        assert rank == {
            "is an SGD": True,
            "class": "SGD",
            "defaults": True,
            "groups": [True] * 6,
        }


def test_hooks_run_once_a_step() -> None:
    assert of_case(results(), "hooked") == [(STEPS, STEPS)] * 2


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_optimizers_in_one_script(pair: tuple[str, str]) -> None:
    for rank, ends in enumerate(of_case(results(), ("two", pair))):
        for end, strategy, optimizer in zip(ends, pair, ("momentum", "adam"), strict=True):
            assert_close(end, Cell(strategy, optimizer).expected(2)[rank, -1])


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_give_a_strategy(way: str) -> None:
    *_, strategy = WAYS[way]
    expected = Cell(strategy, "momentum").expected(2)
    for rank, weights in enumerate(of_case(results(), ("given", way))):
        assert_close(weights, expected[rank])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_closure(strategy: str) -> None:
    expected = Cell(strategy, "momentum").expected(2)
    for rank, (weights, returned) in enumerate(of_case(results(), ("closure", strategy))):
        assert_close(weights, expected[rank, -1])
        assert returned == [True] * STEPS
