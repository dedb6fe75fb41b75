"""PipeSGD: every gradient is applied exactly once, one step late, whatever the script does."""

from __future__ import annotations

from itertools import pairwise
from math import hypot

import numpy as np
import pytest
import workers_pipe_sgd
from cases import of_case
from cells import Cell
from ranks import once, run_ranks
from workers_pipe_sgd import CLEAR, CLIP, STRATEGIES, WARMUP, Applied, Clipped, expected

results = once(lambda: run_ranks(2, workers_pipe_sgd.run))


def test_each_gradient_is_applied_exactly_once() -> None:
    """Across the end of the warm-up, a drain and a second pipeline after it."""
    for rank in of_case(results(), "applied"):
        assert isinstance(rank, Applied)
        assert rank.gradients == [expected(step) for step in range(14)]


def test_when_gradients_are_applied() -> None:
    for rank in of_case(results(), "applied"):
        assert rank.after_steps[:WARMUP] == [1, 2, 3]
        assert rank.after_steps[WARMUP:] == [3, 4, 5, 6, 7, 8, 9]  # the launch applies nothing
        assert rank.after_synchronize == 10
        assert rank.after_more_steps == [10, 11, 12, 13]  # launches again
        assert rank.after_second_synchronize == 14
        assert rank.after_third_synchronize == 14  # nothing was left


def test_clipping_sees_the_gradient_that_is_applied() -> None:
    for rank in of_case(results(), "clipped"):
        assert isinstance(rank, Clipped)
        assert rank.gradients[:WARMUP] == [expected(step) for step in range(WARMUP)]
        stale = [expected(step) for step in range(WARMUP, len(rank.gradients) - 1)]
        assert rank.gradients[WARMUP + 1 :] == stale
        weights = np.array([[0.0, 0.0, 0.0], *rank.weights])
        for step, (before, after) in enumerate(pairwise(weights)):
            if step == WARMUP:  # the launch
                assert np.array_equal(before, after)
                continue
            gradient = np.array(expected(step if step < WARMUP else step - 1))
            gradient *= CLIP / (hypot(*gradient) + 1e-6)  # clip_grad_norm_'s own formula
            np.testing.assert_allclose(before - after, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", CLEAR)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_may_be_cleared_in_any_way(strategy: str, way: str) -> None:
    trajectory = Cell(strategy, "momentum").expected(2)
    for rank, weights in enumerate(of_case(results(), (strategy, way))):
        np.testing.assert_allclose(weights, trajectory[rank], rtol=0, atol=1e-12)
