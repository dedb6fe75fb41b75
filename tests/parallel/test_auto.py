"""``strategy="auto"``: what it computes is what the method that it is at computes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import workers_auto
from cases import of_case
from ranks import once, run_ranks

from hvd_pipe.planning.methods import parse
from hvd_pipe.planning.profile import ModelProfile


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    ranks = once(lambda: run_ranks(2, workers_auto.run, str(path), timeout=280))
    return path, ranks


def of(results: Any, case: str) -> list[Any]:
    return of_case(results[1](), case)


@pytest.mark.parametrize("case", ["as merged-gradient", "as merged-gradient, a slow rank"])
def test_by_default_it_is_merged_gradient_bit_for_bit(results: Any, case: str) -> None:
    for run in of(results, case):
        assert np.array_equal(run.weights, run.expected)
        assert run.chosen == "merged-gradient"


@pytest.mark.parametrize(
    "case", ["pipe-sgd, momentum", "pipe-sgd, adam, a slow rank", "feedback", "groups", "scaler"]
)
def test_from_the_switch_on_it_is_pipe_sgd(results: Any, case: str) -> None:
    """Each gradient is applied once: the last one by the ``synchronize()`` at the end."""
    for run in of(results, case):
        np.testing.assert_allclose(run.weights, run.expected, rtol=0, atol=1e-12)
        assert run.chosen == "pipe-sgd"


def test_pipe_sgd_that_was_chosen_tries_its_plans(results: Any) -> None:
    """In which the slowest rank's steps count; what was reached is said of the plan that stays."""
    for rank, (run, plans, said_after) in enumerate(of(results, "race")):
        np.testing.assert_allclose(run.weights, run.expected, rtol=0, atol=1e-12)
        assert run.chosen == "pipe-sgd"
        assert plans[-1].tried == ((6, 4.0), (4, 3.5), (1, 3.0))
        assert len(plans[-1].buckets) == 1
        over = next(i for i, plan in enumerate(plans, 1) if len(plan.tried) == 3)
        if rank == 0:
            chose, reached = said_after
            assert chose == workers_auto.SWITCH < over < reached


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        ("resumed after", "pipe-sgd"),
        ("resumed after, as pipe-sgd", None),
        ("copied after", "pipe-sgd"),
    ],
)
def test_a_resumed_run_goes_on_with_the_choice(
    results: Any, case: str, chosen: str | None
) -> None:
    for run in of(results, case):
        assert np.array_equal(run.weights, run.expected)
        assert run.chosen == chosen


def test_saved_before_the_choice_it_is_still_to_choose(results: Any) -> None:
    for run in of(results, "resumed before"):
        same = workers_auto.SWITCH - 4  # the unbroken run is Pipe-SGD from there on
        assert np.array_equal(run.weights[:same], run.expected[:same])
        assert run.chosen is None


def test_rank_0s_choice_is_broadcast(results: Any) -> None:
    first, second = of(results, "resumed on rank 0")
    assert (first[1], second[1]) == ("pipe-sgd", "pipe-sgd")
    assert np.array_equal(first[0], second[0])


@pytest.mark.parametrize("case", ["any", "any, a slow rank"])
def test_ranks_make_the_same_choice(results: Any, case: str) -> None:
    (weights, chosen, lines), (others, other, silent) = of(results, case)
    assert chosen == other is not None
    assert np.array_equal(weights, others)
    assert silent == []  # the first rank speaks
    assert re.fullmatch(rf"auto: chose {chosen}: predicted [\d.]+ ms a step \(.*\)", lines[0])
    assert len(lines) == 2 or chosen.startswith("cocod")  # a round may be long here
    for line in lines[1:]:
        assert re.fullmatch(rf"auto: {chosen} reached .* ms a step \(predicted .* ms\)", line)


def test_cocod_is_equal_at_the_end(results: Any) -> None:
    (apart, end, chosen), (other_apart, other_end, other) = of(results, "cocod")
    assert not np.array_equal(apart, other_apart)
    assert np.array_equal(end, other_end)
    assert chosen == other
    assert parse(chosen).period >= 2  # "cocod" alone has one of 4


@pytest.mark.parametrize(
    "case", ["joining before", "joining after", "joined before", "joined after"]
)
def test_parameters_and_ranks_may_join(results: Any, case: str) -> None:
    first, second = of(results, case)
    assert np.array_equal(first[0], second[0])
    assert (first[1], second[1]) == ("pipe-sgd", "pipe-sgd")


def test_what_the_arguments_refuse_is_left_out(results: Any) -> None:
    (lines, raised), (silent, raised_too) = of(results, "lines")
    assert silent == []
    assert lines[0].startswith("auto: cocod is left out: op=hvd.Sum has no meaning under CoCoD")
    assert lines[1].startswith("auto: chose merged-gradient: predicted")
    assert lines[2].startswith("auto: merged-gradient reached")
    assert raised == raised_too
    assert "leaves nothing to choose from. With 'cocod': op=hvd.Sum" in raised[0]
    assert "leaves nothing to choose from. With 'pipe-sgd': op=hvd.Adasum" in raised[1]
    assert of(results, "nothing to choose") == [["adasum", "merged-gradient"]] * 2


def test_what_was_not_measured_changes_nothing(results: Any) -> None:
    """With all times 0 stale methods looked twice as fast, and auto changed the mathematics."""
    for chosen, _ in of(results, "nothing measured"):
        assert chosen == "merged-gradient"
    (_, lines), _ = of(results, "nothing measured")
    assert "auto: no step could be measured: goes on with merged-gradient" in lines


def test_a_choice_that_is_not_allowed_is_made_again(results: Any) -> None:
    assert of(results, "resumed, not allowed") == [("merged-gradient", "pipe-sgd")] * 2


@pytest.mark.parametrize("case", ["resumed, other workers", "resumed, another version"])
def test_a_choice_of_another_job_or_version_is_not_taken(results: Any, case: str) -> None:
    (*choices, lines), (*others, _) = of(results, case)
    assert choices == others == [None, "pipe-sgd"]
    warned = "auto: pipe-sgd was chosen for 3 workers: measures again"
    assert (warned in lines) == (case == "resumed, other workers")


@pytest.mark.parametrize("found", ["choice", "plan"])
def test_what_rank_0_alone_decides_fails_on_every_rank(results: Any, found: str) -> None:
    verb = {"choice": "choose", "plan": "plan"}[found]
    own, told = of(results, f"rank 0 cannot {verb}")
    assert own == f"ValueError: no {found}"
    assert told == f"HvdPipeError: rank 0, which decides for all, failed: {own}"


def test_memory_that_one_rank_lacks_is_missed_on_every_rank(results: Any) -> None:
    told, own = of(results, "no memory")
    assert own == "OutOfMemoryError: too little"
    assert told.startswith("HvdPipeError: rank 1 could not allocate ")
    assert "measure smaller messages" in told


def test_the_slowest_ranks_times_count(results: Any) -> None:
    (ready, last), _ = of(results, "seen by rank 0")
    assert ready == sorted(ready)
    assert ready[-1] >= workers_auto.SLEEP
    assert last >= workers_auto.SLEEP


def test_an_optimizer_that_is_gone_leaves_no_hooks(results: Any) -> None:
    assert of(results, "gone") == [0, 0]


def test_lbfgs_has_no_profile_and_says_so_once(results: Any) -> None:
    (said,), silent = of(results, "profile, lbfgs")
    assert silent == []
    assert "no profile is written, as LBFGS computes gradients within its steps" in said
    assert not Path(f"{results[0]}.lbfgs").exists()


def test_the_environment_may_ask_for_it(results: Any) -> None:
    assert of(results, "environment") == ["merged-gradient"] * 2


def assert_as_expected(run: workers_auto.Forward) -> None:
    for found, expected in zip(run.weights, run.expected, strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    "case", ["forward", "forward, adamw in groups", "forward, groups", "forward alone"]
)
def test_all_ranks_choose_overlap_forward_by_the_slowest_ranks_times(
    results: Any, case: str
) -> None:
    """And compute what stock Horovod computes, in every bit."""
    (first, second), end = of(results, case), workers_auto.TRIED + 30
    for run in (first, second):
        assert_as_expected(run)
        assert run.chosen == workers_auto.FORWARD
        # Uses are watched for plans, and groups are given.
        begun = workers_auto.SWITCH if "groups" in case.split(", ") else workers_auto.DEFERS
        assert run.deferred[0] == begun
        assert set(range(workers_auto.TRIED, end)) <= set(run.deferred)
    said = rf"auto: chose {workers_auto.FORWARD}: predicted [\d.]+ ms a step( \(.*\))?"
    assert re.fullmatch(said, first.lines[0])
    assert ("pipe-sgd" in first.lines[0]) == (case in ("forward", "forward, adamw in groups"))
    assert first.lines[1].startswith(f"auto: {workers_auto.FORWARD} reached")
    assert second.lines == []


def test_weights_that_are_read_after_the_choice_are_new(results: Any) -> None:
    for run in of(results, "forward, weights that are read"):
        assert_as_expected(run)
        assert run.chosen == workers_auto.FORWARD
        assert run.deferred


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("forward, sparse", "the gradient of '.*' is sparse .*"),
        ("forward, not separable", "it is not known whether the optimizer updates each .*"),
    ],
)
def test_overlap_forward_is_left_out_where_it_would_not_defer(
    results: Any, case: str, why: str
) -> None:
    for run in of(results, case):
        assert_as_expected(run)
        assert (run.chosen, run.deferred) == ("merged-gradient", [])
        left_out = f"auto: {workers_auto.FORWARD} is left out: {why}"
        assert sum(bool(re.fullmatch(left_out, line)) for line in run.lines) == 1


def test_overlap_forward_is_left_out_where_one_rank_would_not_defer(results: Any) -> None:
    (chosen, deferred, lines), (other, others_deferred, told) = of(
        results, "forward, refused on one rank"
    )
    assert chosen == other == "merged-gradient"
    assert deferred == others_deferred == []
    assert re.fullmatch(r"auto: chose merged-gradient: predicted [\d.]+ ms a step", lines[0])
    assert told == [f"auto: {workers_auto.FORWARD} is left out: of this test"]


@pytest.mark.parametrize("case", ["forward, resumed", "forward, copied"])
def test_a_resumed_run_goes_on_with_overlap_forward_and_its_plan(results: Any, case: str) -> None:
    for run, (plan, *resumed) in of(results, case):
        assert_as_expected(run)
        assert run.chosen == workers_auto.FORWARD
        assert plan.order is not None
        for later in resumed:
            assert (later.buckets, later.order) == (plan.buckets, plan.order)
        begun = workers_auto.TRIED + 5 + 1  # the first step loads, on all ranks
        assert run.deferred == list(range(begun, workers_auto.TRIED + 5 + 50))


def test_a_run_that_was_saved_in_a_trial_tries_again(results: Any) -> None:
    """Which plan stays is for this machine to say; all but the last step of a trial defer."""
    for run, (on_trial, resumed, kept) in of(results, "forward, resumed in a trial"):
        assert_as_expected(run)
        assert run.chosen == workers_auto.FORWARD
        assert on_trial.order is not None
        assert resumed.order is None  # with the barrier, as every run begins
        assert len(kept.tried_forward) == workers_auto.TRIALS
        assert len(run.deferred) >= workers_auto.TRIALS * (workers_auto.TRIAL - 1)


@pytest.mark.parametrize(
    ("case", "chosen"),
    [
        ("forward, loads pipe-sgd", "pipe-sgd"),
        ("forward, loads merged-gradient", "merged-gradient"),
        ("pipe-sgd, loads forward", workers_auto.FORWARD),
    ],
)
def test_a_state_that_has_chosen_otherwise_is_followed(
    results: Any, case: str, chosen: str
) -> None:
    for found, weights, expected in of(results, case):
        assert found == chosen
        assert np.array_equal(weights, expected)


def test_a_choice_outlasts_a_shutdown() -> None:
    first, second = run_ranks(2, workers_auto.forward_shut_down)
    for run in (first, second):
        assert_as_expected(run)
        assert run.chosen == workers_auto.FORWARD
        begun = workers_auto.TRIED + 5 + 1
        assert run.deferred == list(range(begun, workers_auto.TRIED + 35))
    assert f"auto: goes on with {workers_auto.FORWARD}, as chosen before" in first.lines
    assert not any("reached" in line for line in [*first.lines, *second.lines])


def test_overlap_forward_that_is_not_allowed_any_more_is_measured_again(results: Any) -> None:
    found = [(workers_auto.FORWARD, None, "merged-gradient")] * 2
    assert of(results, "forward, not allowed") == found


@pytest.mark.parametrize("when", ["before", "at the choice", "after", "in a trial"])
def test_ranks_may_join_while_overlap_forward_begins(results: Any, when: str) -> None:
    first, second = of(results, f"forward, joined {when}")
    assert first == second
    deferred, chosen = first
    assert deferred > 5
    assert chosen == workers_auto.FORWARD


def test_what_refuses_overlap_forward_leaves_it_out(results: Any) -> None:
    (adasum, lbfgs, raised), others = of(results, "forward left out")
    left_out = f"auto: {workers_auto.FORWARD} is left out: "
    assert adasum.startswith(left_out + "op=hvd.Adasum does not go with strategy=")
    assert lbfgs.startswith(left_out + "LBFGS updates all parameters at once")
    assert f"leaves nothing to choose from. With '{workers_auto.FORWARD}': LBFGS" in raised
    assert others == [raised]


def test_one_worker_has_nothing_to_choose() -> None:
    assert run_ranks(1, workers_auto.alone) == [None]


def test_a_running_job_writes_its_profile(results: Any) -> None:
    for run in of(results, "profile"):
        assert np.array_equal(run.weights, run.expected)
    profile = ModelProfile.load(Path(results[0]))
    names = {f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")}
    assert set(profile.gradient_order()) == names
    assert profile.gradient_bytes().sum() == 8 * (6 * 5 + 5 + 5 * 4 + 4 + 4 * 3 + 3)
    assert profile.gradient_order()[-1].startswith("0.")
    assert profile.forward_s > 0 < profile.update_s


def test_a_newcomer_that_cannot_travel_is_refused_on_every_rank(results: Any) -> None:
    for said in of(results, "newcomer"):
        assert said.startswith("ValueError: Horovod cannot all-reduce")
        assert "two parameters" in said
    for said in run_ranks(2, workers_auto.one_strange_newcomer):
        assert said.startswith("RanksDisagreeError: rank 1 was given something wrong")
        assert "Horovod cannot all-reduce" in said
