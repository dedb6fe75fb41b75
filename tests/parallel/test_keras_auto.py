"""``strategy="auto"`` and plans under ``fit``: what is computed, and that ranks go together."""

from __future__ import annotations

import re
from typing import Any

import keras_reference
import numpy as np
import pytest
import workers_keras_auto as workers
from cases import of_case
from keras_problem import STEPS
from ranks import once, run_ranks
from workers_keras_auto import SLEEP, SWITCH

N = 2
TWICE = ["merged-gradient", "anew", "merged-gradient"]  # as usual, then with what measures

observed = once(lambda: run_ranks(N, workers.everything, timeout=400))


def ranks_of(case: str) -> list[Any]:
    return of_case(observed(), case)


def assert_alike(case: str, key: str = "weights") -> None:
    first, *others = (found[key] for found in ranks_of(case))
    for other in others:
        assert np.array_equal(other, first)
    assert np.isfinite(first).all()


@pytest.mark.parametrize(
    ("case", "chosen", "equal_to"),
    [
        ("merged-gradient", "merged-gradient", "merged-gradient"),
        ("pipe-sgd", "pipe-sgd", f"pipe-sgd:warmup_steps={SWITCH}"),
        ("cocod", "cocod:period=5", f"cocod:period=5,warmup_steps={SWITCH}"),
        ("default", "merged-gradient", "merged-gradient"),
    ],
)
def test_all_ranks_go_on_with_rank_0s_choice(case: str, chosen: str, equal_to: str) -> None:
    """Rank 0 computes fast, the last rank slowly, and each sees another network.

    With its own times alone, rank 0 would take CoCoD even where Pipe-SGD hides everything.
    """
    wanted = keras_reference.trajectory(N, equal_to, "momentum")
    for rank, found in enumerate(ranks_of(case)):
        assert found["chosen"] == chosen
        np.testing.assert_allclose(found["records"], wanted[rank], rtol=0, atol=1e-10)
        method = chosen.partition(":")[0]
        assert found["traced"] == [*TWICE, "anew", method]
    first, *others = (found["records"][-1] for found in ranks_of(case))
    for other in others:
        assert np.array_equal(other, first)


@pytest.mark.parametrize("case", ["merged-gradient", "pipe-sgd", "cocod"])
def test_rank_0_says_what_it_predicts_and_chooses(case: str) -> None:
    first, *others = (found["lines"] for found in ranks_of(case))
    assert others == [[]] * (N - 1)
    (line,) = first
    assert re.fullmatch(rf"auto: chose {case}\S*: predicted [\d.]+ ms a step \(.*, .*\)", line)


def test_merged_gradient_is_planned_from_the_slowest_ranks_times() -> None:
    """Free as rank 0's network were, one message would do; its own times leave no time either."""
    wanted = keras_reference.trajectory(N, "merged-gradient", "momentum")
    for rank, found in enumerate(ranks_of("plan")):
        assert found["traced"] == [*TWICE, "anew", "merged-gradient"]
        assert len(found["plan"]) > 1  # all in one, before
        assert found["plan"] == ranks_of("plan")[0]["plan"]
        assert found["chosen"] is None
        np.testing.assert_allclose(found["records"], wanted[rank], rtol=0, atol=1e-10)
    assert_alike("plan", "records")


@pytest.mark.parametrize(
    ("case", "tried", "stays"),
    [
        ("raced", ((1, 3.0), (6, 2.0), (2, 4.0)), 6),
        ("raced, the third wins", ((1, 3.0), (6, 2.0), (2, 1.5)), 2),
    ],
)
def test_the_plan_that_the_slowest_rank_is_fastest_with_stays(
    case: str, tried: tuple[tuple[int, float], ...], stays: int
) -> None:
    """Rank 0, which decides, is fastest with the third plan in both cases."""
    wanted = keras_reference.trajectory(N, "merged-gradient", "momentum")
    for rank, found in enumerate(ranks_of(case)):
        assert found["plan"] == ranks_of(case)[0]["plan"]
        assert len(found["plan"].buckets) == stays
        assert found["plan"].tried == tried
        assert "tried" in str(found["plan"])
        assert found["traced"] == [*TWICE, *3 * ["anew", "merged-gradient"]]
        np.testing.assert_allclose(found["records"], wanted[rank], rtol=0, atol=1e-10)
    assert_alike(case, "records")


def test_a_wait_is_the_median_of_what_the_last_rank_waits_in_each_step() -> None:
    """Each rank waits for long in most steps, and the last one in each step but one does not."""
    first, _ = ranks_of("raced")
    waits, errors = zip(*first["trials"], strict=True)
    assert waits == (workers.WAIT,) * 3
    assert errors[1:] == (0.0, 0.0)
    assert errors[0] == pytest.approx(1.253 * 1.4826 * 0.1 / 5**0.5)


def test_a_given_plan_is_kept() -> None:
    for found in ranks_of("given plan"):
        assert found["traced"] == ["merged-gradient"]
        assert len(found["plan"]) == 6


@pytest.mark.parametrize("case", ["measured", "measured, several steps"])
def test_whatever_is_chosen_it_learns_and_ranks_end_equal(case: str) -> None:
    assert_alike(case)
    assert len({found["chosen"] for found in ranks_of(case)}) == 1
    for found in ranks_of(case):
        assert found["chosen"] is not None
        assert found["losses"][-1] < 0.5 * found["losses"][0]


def test_steps_count_over_all_calls_of_fit() -> None:
    """Each call has its own callbacks, which once began to measure anew."""
    assert_alike("in pieces")
    for found in ranks_of("in pieces"):
        assert found["chosen"] == "pipe-sgd"
        assert found["traced"] == [*TWICE, "anew", "pipe-sgd"]


@pytest.mark.parametrize("case", ["accumulating", "embedding"])
def test_it_is_what_the_chosen_strategy_is(case: str) -> None:
    for found, wanted in zip(ranks_of(case), ranks_of(f"{case} pipe-sgd"), strict=True):
        assert found["chosen"] == "pipe-sgd"
        np.testing.assert_allclose(found["weights"], wanted["weights"], rtol=0, atol=1e-10)
    assert_alike(case)


def test_it_works_within_a_loss_scale_optimizer() -> None:
    assert_alike("scaled")
    for found in ranks_of("scaled"):
        assert found["class"] == "LossScaleOptimizer"
        assert found["chosen"] == "pipe-sgd"


def test_a_resumed_run_goes_on_with_the_choice() -> None:
    for found in ranks_of("resumed"):
        assert (found["loaded"], found["chosen"]) == ("pipe-sgd", "pipe-sgd")
        assert np.array_equal(found["resumed"], found["whole"])


def test_saved_before_the_choice_it_is_still_to_choose() -> None:
    for found in ranks_of("resumed before"):
        assert (found["loaded"], found["chosen"]) == (None, "pipe-sgd")
        same = SWITCH - 4  # the unbroken run is Pipe-SGD from there on
        assert np.array_equal(found["resumed"][:same], found["whole"][:same])


def test_a_choice_that_only_one_rank_loads_is_told() -> None:
    for found in ranks_of("resumed on rank 0"):
        assert "ranks disagree on what auto has chosen: rank 0 has pipe-sgd" in found["said"]
        assert "rank 1 has nothing yet" in found["said"]


def test_what_rank_0_alone_decides_fails_on_every_rank() -> None:
    own, told = ranks_of("failing")
    assert own == "ValueError: no choice"
    assert told == f"HvdPipeError: rank 0, which decides for all, failed: {own}"


@pytest.mark.parametrize("case", ["seen by rank 0", "seen by rank 0, several steps"])
def test_the_slowest_ranks_times_count(case: str) -> None:
    found, *_ = ranks_of(case)
    assert found["forward"] >= SLEEP
    assert len(found["order"]) == 4
    assert found["ready"] == sorted(found["ready"])
    assert found["ready"][-1] >= 2 * SLEEP
    assert found["update"] >= SLEEP


def test_what_the_arguments_refuse_is_left_out() -> None:
    (forward, dropped, chose, chosen), (_,) = ranks_of("left out")
    assert forward.startswith(
        "auto: merged-gradient:overlap=forward is left out: auto does not choose "
        "overlap='forward' under Keras"
    )
    assert dropped.startswith("auto: cocod is left out: op=hvd.Sum has no meaning under CoCoD")
    assert chose.startswith("auto: chose pipe-sgd: predicted")
    assert chosen == "pipe-sgd"


def test_one_worker_has_nothing_to_choose() -> None:
    (found,) = run_ranks(1, workers.alone)
    assert found["chosen"] is None
    assert found["traced"] == ["merged-gradient"]
    wanted = keras_reference.trajectory(1, "merged-gradient", "momentum")
    np.testing.assert_allclose(found["weights"], wanted[0][STEPS], rtol=0, atol=1e-10)
