"""PipeSGD: every gradient is applied exactly once, one step late, whatever the script does."""

from __future__ import annotations

from itertools import pairwise
from math import hypot

import numpy as np
import pytest
import workers_pipe_sgd
from cases import of_case
from cells import Cell
from problem import OPTIMIZERS, STEPS, Weights, loss_of, make_model
from ranks import once, run_ranks
from serial import make_workers
from workers_pipe_sgd import (
    AFTER,
    BY_HAND,
    CLEAR,
    CLIP,
    LOADED,
    PATTERNS,
    RACED,
    RACES,
    SAVES,
    STRATEGIES,
    WARMUP,
    WAYS,
    Applied,
    Clipped,
    expected,
)

results = once(lambda: run_ranks(2, workers_pipe_sgd.run))
restarted = once(lambda: run_ranks(2, workers_pipe_sgd.run_started_again))


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


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("strategy", LOADED)
def test_a_state_is_loaded_where_gradients_stay_in_place(strategy: str, after: int) -> None:
    """The pending gradient of a state went into the buffer that p.grad led to, in every second
    step: zero_grad(set_to_none=False) cleared it, and the next gradient was applied twice.
    """
    trajectory = Cell(strategy, "momentum").expected(2)
    for rank, weights in enumerate(of_case(results(), ("loaded", strategy, after))):
        np.testing.assert_allclose(weights, trajectory[rank], rtol=0, atol=1e-12)


def drained_twice(strategy: str) -> Weights:
    """All workers' weights in a run that is drained in the middle and at its end."""
    workers = make_workers(strategy, 2, make_model, OPTIMIZERS["momentum"])
    for step in range(STEPS):
        workers.backward(loss_of, step)
        workers.step()
        workers.record()
        if step in (STEPS // 2, STEPS - 1):
            workers.synchronize()
            workers.record()
    return workers.trajectory


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", BY_HAND)
def test_gradients_may_be_set_by_hand(strategy: str, way: str, pattern: str) -> None:
    """synchronize() heard of hooks only. Pipe-SGD drained, and then sent again what it had just
    applied: the first gradient was applied for ever. CoCoD averaged models in every step, and
    merged-gradient applied each rank's own gradient after a drain.
    """
    trajectory = drained_twice(strategy)
    for rank, weights in enumerate(of_case(results(), (strategy, way, pattern))):
        np.testing.assert_allclose(weights, trajectory[rank], rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", BY_HAND[1:])
def test_gradients_that_nobody_can_see_are_refused(strategy: str) -> None:
    """A write by ``.data`` counts no version: what was applied before was applied again."""
    for said in of_case(results(), ("data", strategy)):
        assert "synchronize() found no new gradient" in said


@pytest.mark.parametrize("case", ["copied", "started again"])
@pytest.mark.parametrize("strategy", BY_HAND)
def test_a_new_engine_knows_what_was_applied(strategy: str, case: str) -> None:
    """After hvd.shutdown() and hvd.init(), Pipe-SGD took a gradient that it had applied for a new
    one, sent it again and dropped the pending one.
    """
    trajectory = drained_twice(strategy)
    again = case == "started again"
    ranks = of_case(restarted(), strategy) if again else of_case(results(), (case, strategy))
    for rank, weights in enumerate(ranks):
        np.testing.assert_allclose(weights, trajectory[rank], rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", RACES)
def test_plans_are_tried_and_nothing_is_lost_on_the_way(case: str) -> None:
    """A change of buckets moves no bit: two ranks' sums are the same in any message."""
    fixed = of_case(results(), ("no race", case))
    for rank, with_race in enumerate(of_case(results(), ("race", case))):
        assert np.array_equal(with_race.weights, fixed[rank].weights)
        plan, stays = with_race.plans[-1], RACES[case]["stays"]
        assert plan.tried, "a plan stays"
        if case not in {"sparse", "grows"}:
            assert [count for count, _ in plan.tried] == list(RACED)
            assert len(plan.buckets) == stays
        assert all(plan.tried == () for plan in fixed[rank].plans)


def test_which_plan_is_in_use_when() -> None:
    """Three steps are left out, then each is timed for five; ranks agree on the slowest one."""
    for stays in RACED:
        for rank in of_case(results(), ("race", f"{stays} stay")):
            counts = [len(plan.buckets) for plan in rank.plans]
            assert counts == [6] * 8 + [4] * 8 + [1] * 8 + [stays] * (STEPS - 24)
            assert [bool(plan.tried) for plan in rank.plans] == [False] * 24 + [True] * 6
    (planner, _) = of_case(results(), ("race", "1 stay"))
    assert planner.plans[-1].tried == ((6, 4.0), (4, 3.5), (1, 3.0))


def test_a_checkpoint_holds_the_plan_that_stays_and_none_before() -> None:
    (saver, _) = of_case(results(), ("race", "4 stay"))
    assert saver.holds == [step > 24 for step in SAVES]
    (loader, _) = of_case(results(), ("race", "loaded"))
    stay = [bool(plan.tried) for plan in loader.plans]
    assert stay == sorted(stay)  # a state with the plan is loaded without new trials
    assert stay[44]


def test_a_rank_that_has_joined_is_not_asked() -> None:
    """It takes part in all-reduces only: the plan is timed anew when all are back."""
    ranks, fixed = (of_case(results(), (name, "joins")) for name in ("race", "no race"))
    for (weights, plans), (expected_weights, _) in zip(ranks, fixed, strict=True):
        assert np.array_equal(weights, expected_weights)
        assert plans == ranks[0][1]
        assert len(plans[-1].tried) == len(RACED)


def test_what_int8_has_lost_survives_a_change_of_buckets() -> None:
    for rank in of_case(results(), ("race", "int8")):
        assert len(set(rank.plans)) > 1
        assert np.abs(rank.residuals).max() > 1e-3
        np.testing.assert_allclose(rank.applied + rank.residuals, rank.computed, atol=1e-4)
