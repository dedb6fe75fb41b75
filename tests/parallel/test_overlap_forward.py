"""`overlap="forward"`: the bits of stock Horovod, though weights are updated as they are needed.

At two ranks a sum has one rounding whatever the order of its terms, so equality is exact. Losses
are recorded in every step: they tell whether each layer had its new weights in time.
"""

from __future__ import annotations

import numpy as np
import pytest
import workers_overlap_forward as workers
from cases import of_case
from ranks import once, run_ranks
from workers_overlap_forward import (
    AGAINST_STOCK,
    ALONE,
    BARRIER,
    BEGUN,
    FALLBACKS,
    LONG,
    LOOKS,
    ODD,
    PLANNED,
    RACED,
    REFUSALS,
    SAID,
    SERIAL,
    SHORT,
    UNLIKE,
    Run,
)

at_two = once(lambda: run_ranks(2, workers.at_two, timeout=400))
at_three = once(lambda: run_ranks(3, workers.at_three, timeout=300))


def assert_same(one: Run, other: Run) -> None:
    pairs = zip(one.losses, other.losses, strict=True)
    different = [step for step, (a, b) in enumerate(pairs) if a != b]
    assert not different, f"losses differ from step {different[0]} on"
    for a, b in zip(one.weights, other.weights, strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    assert not np.array_equal(one.weights[0], one.weights[-1])  # it did learn something


def assert_deferred(run: Run, steps: int) -> None:
    """All steps but the first ones, and those before another plan, leave messages pending."""
    assert run.deferred, "no step has deferred anything: this shows nothing"
    assert run.messages >= 1
    begun = RACED if steps == LONG else BEGUN
    assert run.deferred[0] <= begun
    assert run.deferred[-1] == steps - 1
    assert len(run.deferred) >= steps - begun - 5


@pytest.mark.parametrize("case", AGAINST_STOCK)
def test_equal_to_stock_horovod(case: str) -> None:
    for stock, ours in of_case(at_two(), case):
        assert not stock.deferred
        assert_same(stock, ours)
        assert_deferred(ours, LONG if case.endswith("planned") else SHORT)


@pytest.mark.parametrize("strategy", [PLANNED, ALONE])
@pytest.mark.parametrize("name", SERIAL)
def test_equal_to_one_process_that_has_all_gradients(name: str, strategy: str) -> None:
    steps = LONG if strategy == PLANNED else SHORT
    script = {key: SERIAL[name][key] for key in ("make", "loss") if key in SERIAL[name]}
    wanted = workers.serial(3, steps=steps, **script)
    for run in of_case(at_three(), (name, strategy)):
        assert_deferred(run, steps)
        np.testing.assert_allclose(run.weights, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LOOKS)
def test_who_looks_early_sees_new_weights(name: str) -> None:
    for plain, ours in of_case(at_two(), ("look", name)):
        assert_deferred(ours, SHORT)
        assert len(ours.looked) == SHORT - BEGUN
        for wanted, seen in zip(plain.looked, ours.looked, strict=True):
            assert wanted
            for a, b in zip(wanted, seen, strict=True):
                assert a.equal(b)
        if name != "load_state_dict":  # which goes on from the same weights every time
            assert not ours.looked[0][0].equal(ours.looked[-1][0])
            assert_same(plain, ours)
        else:
            assert plain.losses == ours.losses


@pytest.mark.parametrize("name", FALLBACKS)
def test_where_updates_stay_in_step(name: str) -> None:
    """Training is right, and a warning names the reason."""
    for plain, ours, warned in of_case(at_two(), ("fallback", name)):
        assert_same(plain, ours)
        assert not ours.deferred
        said = [line for line in warned if "updates stay in step()" in line]
        assert len(said) == 1
        assert FALLBACKS[name][0] in said[0]


@pytest.mark.parametrize("name", SAID)
def test_what_keeps_single_steps_with_the_barrier_is_said_once(name: str) -> None:
    stay = "overlap='forward': updates stay in step()"
    hook = "a hook is registered on the optimizer, or for all optimizers"
    hooked = [f"{stay} while {hook} (said once)"]
    said = {
        "nothing": ([], []),
        "clipping now and then": ([], []),
        "clipping": ([], []),
        "one has a hook": ([], hooked),
    }
    for rank, (plain, ours, warned) in enumerate(of_case(at_two(), ("said", name))):
        assert [line for line in warned if "step()" in line] == said[name][rank]
        assert bool(ours.deferred) == (name != "clipping")
        assert_same(plain, ours)


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    for said in of_case(at_two(), ("refusal", name)):
        assert said.startswith("ValueError: ")
        assert REFUSALS[name][0] in said


@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_that_differ(name: str) -> None:
    runs = of_case(at_two(), ("unlike", name))
    for plain, ours in runs:
        assert_same(plain, ours)
        assert ours.deferred
    first, second = (ours for _, ours in runs)
    assert np.array_equal(first.weights, second.weights)
    if name == "clipping":
        assert {step % 3 for step in first.deferred} == {0, 2}
    elif name == "one has a hook":
        assert first.deferred[-1] == SHORT - 1
        assert second.deferred[-1] == ODD - 1
    else:
        assert_deferred(first, SHORT)
        assert_deferred(second, SHORT)


def test_join_with_uneven_steps() -> None:
    """Weights are read as they are: to join waits for updates."""
    for (ours, deferred, last), (plain, _, plain_last) in zip(
        of_case(at_two(), ("join", ALONE)), of_case(at_two(), ("join", BARRIER)), strict=True
    ):
        assert np.array_equal(ours, plain)
        assert deferred >= SHORT - 3 - BEGUN
        assert last == plain_last == 0  # the last one to join


def test_a_join_while_plans_are_tried() -> None:
    """Ranks have made different numbers of steps by then, and count them anew."""
    for deferred in of_case(at_two(), "joined in a trial"):
        assert deferred > 24


def test_the_barrier_comes_back_where_its_steps_were_faster() -> None:
    """Its plan tells what was tried, and a resumed run tries nothing again."""
    for back in of_case(at_two(), "barrier wins"):
        stock, ours = back.runs
        assert_same(stock, ours)
        assert ours.deferred[0] <= RACED
        assert 20 <= len(ours.deferred) <= 28  # four plans
        assert ours.deferred[-1] < LONG - 1
        plan, resumed = back.plans
        assert plan.order is None
        assert len(plan.tried_forward) == 4
        assert 1 <= len(plan.tried) <= 4
        assert "behind the next forward, a step with" in str(plan)
        assert resumed == plan
        assert not back.went_on


def test_ranks_with_unlike_times_keep_the_plan_of_the_slowest_ones() -> None:
    """By itself, rank 0 would keep the first plan and rank 1 the third."""
    first, second = of_case(at_two(), "timed unlike")
    assert np.array_equal(first.weights, second.weights)
    for tried, kept, _ in (first, second):
        assert [seconds for _, seconds in kept.tried_forward] == [4e-9, 3e-9, 4e-9, 5e-9]
        assert (kept.buckets, kept.order) == (tried[1].buckets, tried[1].order)
        assert (tried[0].buckets, tried[0].order) != (tried[1].buckets, tried[1].order)
    assert first.tried == second.tried
    assert first.kept == second.kept


def test_a_state_of_any_phase_can_be_loaded_in_any_other() -> None:
    """What a state says of its plan holds, whatever this run has tried or chosen."""
    for found in of_case(at_two(), "loaded later"):
        assert found == {
            "barrier": (True, True),  # of merged-gradient: it was planned, and not raced yet
            "ordered": (True, True),
            "back": (False, False),
            "none": (True, True),
        }


def test_parameters_that_join_while_uses_are_watched() -> None:
    pairs = [of_case(at_two(), ("joined while watched", each)) for each in (ALONE, BARRIER)]
    for (ours, deferred), (plain, _) in zip(*pairs, strict=True):
        assert deferred
        assert np.array_equal(ours, plain)


def test_parameters_that_one_rank_alone_adds() -> None:
    """Both ranks are told, and neither waits for ever."""
    for said in run_ranks(2, workers.adds_alone):
        assert "ranks have sent different things at the same step" in said


def test_an_optimizer_that_goes_out_of_scope_makes_its_last_update() -> None:
    for (ours, deferred), (plain, _) in zip(
        of_case(at_two(), ("let_go", ALONE)), of_case(at_two(), ("let_go", BARRIER)), strict=True
    ):
        assert deferred
        assert np.array_equal(ours, plain)


def test_an_optimizer_that_is_replaced_makes_its_last_update() -> None:
    for (losses, ours, deferred), (plain_losses, plain, _) in zip(
        of_case(at_two(), ("replaced", ALONE)),
        of_case(at_two(), ("replaced", BARRIER)),
        strict=True,
    ):
        assert deferred
        assert losses == plain_losses
        assert np.array_equal(ours, plain)


def test_a_rank_that_synchronizes_alone_is_told() -> None:
    """The control flags say so, which are read when updates are finished."""
    for step, said in of_case(at_two(), "apart"):
        assert ODD < step <= ODD + 3
        assert "ranks have gone apart" in said


def test_a_script_may_end_with_a_step() -> None:
    """With updates pending; no rank hangs or fails."""
    assert run_ranks(2, workers.ends_without_waiting) == [True, True]


def test_shutdown_applies_what_is_pending() -> None:
    for ours, wanted, deferred in run_ranks(2, workers.shut_down):
        assert deferred
        np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-12)
