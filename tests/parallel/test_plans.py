"""Gradients are views into one buffer a bucket, and the buckets are those of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import workers_plans
from branching import SWITCH
from cases import of_case
from cells import Cell
from ranks import once, run_ranks
from workers_plans import BUCKETS, PLANS, Buckets, Plans

TENSORS = 6  # of the model
SLOW_S = (TENSORS - 1) * workers_plans.PAUSE_S  # at least, from its first gradient to its last


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    return once(lambda: run_ranks(2, workers_plans.run, str(path)))


def part(results: Any, number: int) -> list[Mapping[str, Any]]:
    return [rank[number] for rank in results()]


@pytest.mark.parametrize("strategy", BUCKETS)
def test_gradients_are_views_into_one_buffer_a_bucket(results: Any, strategy: str) -> None:
    for rank in of_case(part(results, 0), strategy):
        for step in rank:
            assert isinstance(step, Buckets)
            assert step.found == step.planned
            assert step.storages == len(step.planned)


@pytest.mark.parametrize("strategy", BUCKETS)
def test_one_allreduce_a_bucket(results: Any, strategy: str) -> None:
    for rank in of_case(part(results, 0), strategy):
        assert [step.allreduces for step in rank] == [len(step.planned) for step in rank]


def test_the_number_of_buckets(results: Any) -> None:
    def count(strategy: str) -> int:
        return len(of_case(part(results, 0), "merged-gradient:" + strategy)[0][0].planned)

    assert count("plan=single") == 1
    assert count("plan=wfbp") == TENSORS
    # 64 bytes: 2.bias (32) and 4.bias (24) may share one, every other tensor exceeds it with them.
    assert TENSORS - 1 <= count("bucket_bytes=64") <= TENSORS


@pytest.mark.parametrize("case", PLANS)
def test_all_ranks_have_the_same_plan_at_the_same_step(results: Any, case: str) -> None:
    ranks: list[Plans] = of_case(part(results, 1), case)
    assert ranks[0].plans == ranks[1].plans
    assert len(ranks[0].plans) == len(ranks[0].weights)


@pytest.mark.parametrize("case", ["even", "a slow rank", "branches that change places"])
def test_the_fastest_of_the_plans_that_were_tried_stays(results: Any, case: str) -> None:
    for rank in of_case(part(results, 1), case):
        assert rank.plans[0].tried == ()
        plan = rank.plans[29]
        assert 1 <= len(plan.tried) <= 4
        assert len(plan.buckets) in [count for count, _ in plan.tried]
        assert str(plan).splitlines()[-1].startswith("tried in training, a step with ")


def test_the_slowest_ranks_times_count(results: Any) -> None:
    """A bucket leaves when the last rank has filled it; rank 0, which plans, is not that rank."""
    planner, other = of_case(part(results, 1), "a slow rank")
    assert planner.last_ready_s > SLOW_S
    assert other.last_ready_s is None


@pytest.mark.parametrize("case", ["even", "a slow rank"])
def test_the_equation_holds_whatever_the_plan(results: Any, case: str) -> None:
    expected = Cell("merged-gradient", "momentum").expected(2)
    for rank, actual in enumerate(of_case(part(results, 1), case)):
        np.testing.assert_allclose(actual.weights, expected[rank][:-1], rtol=0, atol=1e-12)


def test_another_order_of_gradients_leads_to_another_plan(results: Any) -> None:
    for rank in of_case(part(results, 1), "branches that change places, in small buckets"):
        before, after = rank.plans[SWITCH - 1].names, rank.plans[-1].names
        assert set(before) == set(after)
        # Backward reaches the later layer first.
        assert before.index("b.weight") < before.index("a.weight")
        assert after.index("a.weight") < after.index("b.weight")


def test_a_plan_is_printed_saved_and_given_back(results: Any) -> None:
    for rank in of_case(part(results, 2), "saved"):
        measured, from_file, given, ordered, kept = rank
        assert (kept.buckets, kept.order) == (ordered.buckets, ordered.order)
        assert from_file.buckets == given.buckets == measured.buckets
        text = str(measured)
        assert text.startswith(f"{measured.method}: {TENSORS} tensors in ")
        assert all(bucket[0] in text for bucket in measured.buckets)


def test_trials_go_on_after_a_join(results: Any) -> None:
    """A join in the middle of a trial threw away what was seen, and the plan on trial stayed."""
    ranks = of_case(part(results, 2), "joins")
    assert ranks[0][-1] == ranks[1][-1]
    first, last = ranks[0][0], ranks[0][-1]
    assert len(last.tried) > 1
    assert last.tried[0][0] == len(first.buckets)


def test_a_plan_on_trial_is_not_saved(results: Any) -> None:
    """Parameters have joined: the plan is tried anew, and may be a bad one meanwhile."""
    for holds, tried in of_case(part(results, 2), "saved in a trial"):
        found = [bool(count) for count in tried]
        assert holds[: -workers_plans.TRIAL_STEPS] == found[: -workers_plans.TRIAL_STEPS]
        assert holds[-workers_plans.TRIAL_STEPS - 1]
        assert not any(holds[-workers_plans.TRIAL_STEPS :])
