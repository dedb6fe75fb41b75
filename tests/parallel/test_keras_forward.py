"""``merged-gradient:overlap=forward`` under Keras' ``fit``: exact, with messages for later."""

from __future__ import annotations

import keras_reference
import numpy as np
import pytest
import workers_keras_forward
from cases import of_case
from ranks import once, run_ranks

from hvd_pipe.planning.trials import SETTLE_STEPS, TRIAL_STEPS
from hvd_pipe.runtime.bucket_planner import SKIP_STEPS
from hvd_pipe.tensorflow.strategies.replan import PLANS

Found = workers_keras_forward.Found

CASES = list(workers_keras_forward.CASES)
JOBS = [CASES[start::4] for start in range(4)]  # a job's time is limited

found_by_ranks = once(
    lambda job: run_ranks(2, workers_keras_forward.cases, JOBS[job], timeout=400)
)

FIRST_LAYER = 35  # weights, which are never late


def ranks_of(case: str) -> list[Found]:
    return of_case(found_by_ranks(next(i for i, job in enumerate(JOBS) if case in job)), case)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "scheduled"])
def test_each_step_is_the_equation(name: str) -> None:
    """Late layers are one update old between two calls, and in no step."""
    for rank, found in enumerate(ranks_of(name)):
        wanted = keras_reference.trajectory(2, "merged-gradient", name)[rank]
        records, late = found["forward"]["records"], slice(FIRST_LAYER, None)
        assert np.abs(records[:, :FIRST_LAYER] - wanted[:-1, :FIRST_LAYER]).max() < 1e-12
        begun, end = SKIP_STEPS, len(records) - 1
        assert np.abs(records[:begun, late] - wanted[:begun, late]).max() < 1e-12
        old = wanted[begun - 1 : end - 1, late]
        assert np.abs(records[begun:end, late] - old).max() < 1e-12
        assert np.abs(wanted[begun:end, late] - old).max() > 1e-4
        assert np.abs(found["forward"]["weights"] - wanted[-1]).max() < 1e-12


of_three_ranks = once(
    lambda: run_ranks(3, workers_keras_forward.cases, ["adam", "two of three"], timeout=400)
)


def test_three_ranks_end_as_the_equation_does() -> None:
    """Where the order of sums counts."""
    for rank, found in enumerate(of_case(of_three_ranks(), "adam")):
        wanted = keras_reference.trajectory(3, "merged-gradient", "adam")[rank]
        for weights in (found["forward"]["weights"], found["barrier"]["weights"]):
            assert np.abs(weights - wanted[-1]).max() < 1e-12


def test_a_rank_outside_of_the_process_set_is_not_asked() -> None:
    """It trains by itself, also in another call of fit."""
    wanted = keras_reference.trajectory(2, "merged-gradient", "adam")[0]
    for found in of_case(of_three_ranks(), "two of three")[:2]:
        assert np.abs(found["weights"] - wanted[-1]).max() < 1e-12


def assert_alike(name: str) -> None:
    for found in ranks_of(name):
        forward, barrier = found["forward"], found["barrier"]
        for key in ("weights", "state", "iterations", "history"):
            assert np.array_equal(forward[key], barrier[key]), key


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "scheduled"])
def test_it_ends_as_with_the_barrier_bit_for_bit(name: str) -> None:
    assert_alike(name)


@pytest.mark.parametrize(
    "name", ["frozen", "normalized", "constrained", "shared", "rates", "sum", "fp16"]
)
def test_what_it_trains_ends_as_with_the_barrier(name: str) -> None:
    assert_alike(name)
    for found in ranks_of(name):  # and messages were left for later
        assert not np.array_equal(found["forward"]["records"], found["barrier"]["records"])


def test_several_steps_an_execution_are_the_same_steps() -> None:
    assert_alike("executions")


def test_what_validation_and_callbacks_of_one_rank_see_is_whole() -> None:
    assert_alike("validation")
    forward, barrier = ranks_of("validation")[0]["read"]
    assert len(forward) == 3
    assert np.array_equal(forward, barrier)


@pytest.mark.parametrize("name", ["forward", "merged-gradient", "pipe-sgd", "tape"])
def test_a_step_whose_data_has_run_out_changes_no_weights(name: str) -> None:
    for found in ranks_of("unknown length"):
        assert np.array_equal(found[f"{name}, unknown"], found[f"{name}, known"])
        assert np.array_equal(found["forward, known"], found["merged-gradient, known"])


@pytest.mark.parametrize("name", ["ends, executions", "ends, stopped"])
def test_a_callback_before_ours_reads_whole_weights(name: str) -> None:
    for found in ranks_of(name):
        assert len(found["forward"]) == (1 if name == "ends, stopped" else 3)
        assert np.array_equal(found["forward"], found["merged-gradient"])


def test_steps_after_an_exception_that_ends_fit_are_whole() -> None:
    for found in ranks_of("exception"):
        assert np.array_equal(found["forward"], found["merged-gradient"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [("second averages", "a step uses"), ("second applies twice", "a step applies gradients")],
)
def test_a_second_model_keeps_the_barrier(name: str, reason: str) -> None:
    found = ranks_of(name)
    for each in found:
        assert np.array_equal(each["forward"], each["merged-gradient"])
    assert f"updates stay in their step, as {reason}" in found[0]["forward, said"]


def test_variables_that_are_no_longer_trained_send_nothing_more() -> None:
    """The first step of the new graph finishes what is pending; it is traced anew without."""
    for found in ranks_of("frozen later"):
        sent = found["merged-gradient:overlap=forward, sent"]
        last = max(i for i, name in enumerate(sent) if name.endswith("gradients.0"))
        assert [name for name in sent[:last] if "late" in name]
        assert not [name for name in sent[last - 1 :] if "late" in name]
        assert np.array_equal(found["merged-gradient:overlap=forward"], found["merged-gradient"])


def test_tensors_of_messages_are_not_kept() -> None:
    for found in ranks_of("frozen later"):
        assert found["merged-gradient:overlap=forward, kept"] == 0


def test_a_checkpoint_has_what_is_still_to_come() -> None:
    """Before it is made, the weights that are read are those of between two calls."""
    for rank, found in enumerate(ranks_of("saved")):
        wanted = keras_reference.trajectory(2, "merged-gradient", "adam")[rank]
        assert np.array_equal(found["read"], found["records"][9])
        assert np.abs(found["read"] - wanted[9]).max() > 1e-4
        assert np.array_equal(found["resumed"], found["whole"])


def test_a_checkpoint_after_synchronize_is_whole() -> None:
    for found in ranks_of("saved when finished"):
        wanted = keras_reference.trajectory(2, "merged-gradient", "adam")[0]
        assert np.abs(found["read"] - wanted[9]).max() < 1e-12
        assert np.array_equal(found["resumed"], found["whole"])


def test_an_optimizer_that_trains_goes_back_to_a_checkpoint() -> None:
    for rank, found in enumerate(ranks_of("restored")):
        wanted = keras_reference.trajectory(2, "merged-gradient", "adam")[rank]
        assert np.abs(found["weights"] - wanted[-1]).max() < 1e-12


def test_a_checkpoint_that_one_rank_alone_loads_between_calls_is_an_error_on_all() -> None:
    for said in ranks_of("loaded alone between"):
        assert len(said) == 1
        assert "load the checkpoint on all ranks" in said[0]


def test_a_commit_has_the_gradients_of_all_ranks() -> None:
    """They go on from rank 0's, which is of no use to others where it is a gradient."""
    for found in ranks_of("committed"):
        assert np.array_equal(found["forward"], found["barrier"])


def test_a_step_without_a_graph_asks_for_what_a_checkpoint_holds() -> None:
    """Its gradient was computed before that update."""
    for found in ranks_of("resumed eagerly"):
        assert "call optimizer.synchronize() on all ranks" in found["said"]
        assert np.array_equal(found["resumed"], found["whole"])


REASONS = {
    "clipped": "global_clipnorm needs all gradients at once",
    "own clipping": "OwnClipping._clip_gradients() is its own",
    "own decay": "OwnDecay._apply_weight_decay() is its own",
    "averaged": "use_ema averages all weights after each step",
    "accumulating": "gradients of several passes are summed up",
    "nadam": "Nadam._backend_update_step() is its own",
    "twice": "a step applies gradients more than once",
    "eager": "the model runs eagerly",
    "one rank": "as of its own",
    "used after": "a step uses",
    "saver": "ModelCheckpoint saves weights within an epoch",
    "int8": "compressed messages have residuals of their own",
    "sparse": "is sparse (sparse_as_dense=True sends a dense one)",
}


@pytest.mark.parametrize("name", sorted(REASONS))
def test_the_barrier_stays_with_the_reason(name: str) -> None:
    found = ranks_of(name)
    assert found[0]["forward"]["said"].count("updates stay in their step") == 1
    assert REASONS[name] in found[0]["forward"]["said"]
    # A sum over all gradients may be in another order, and a code has one scale a message.
    limit = 0.05 if name == "int8" else 1e-14
    for each in found:
        errors = np.abs(each["forward"]["records"] - each["barrier"]["records"])
        assert errors.max() < limit


def test_the_barrier_stays_within_a_loss_scale_optimizer() -> None:
    for found in ranks_of("scaled"):
        wanted = keras_reference.trajectory(2, "merged-gradient", "sgd")[0]
        assert np.abs(found["weights"] - wanted[-1]).max() < 1e-12
    assert "a LossScaleOptimizer decides" in ranks_of("scaled")[0]["said"]


def test_a_step_outside_of_fit_asks_for_synchronize() -> None:
    for found in ranks_of("outside"):
        assert len(found["said"]) == 2
        assert all("call optimizer.synchronize() on all ranks" in each for each in found["said"])
        assert np.isfinite(found["weights"]).all()


def test_steps_of_ones_own_keep_the_barrier_and_say_so_once() -> None:
    for rank, found in enumerate(ranks_of("own loop")):
        wanted = keras_reference.trajectory(2, "merged-gradient", "sgd")[rank]
        assert np.abs(found["records"] - wanted[:6]).max() < 1e-12
        assert found["said"].count("updates stay in their step") == (rank == 0)


def test_under_check_mode_a_read_that_is_too_early_is_nan() -> None:
    """Also in a checkpoint, whose run goes on with the right weights."""
    for rank, found in enumerate(ranks_of("checked")):
        wanted = keras_reference.trajectory(2, "merged-gradient", "adam")[rank]
        records = found["records"][SKIP_STEPS:-1]
        assert np.isfinite(records[:, :FIRST_LAYER]).all()
        assert np.isnan(records[:, FIRST_LAYER:]).all()
        assert np.isnan(found["read"][FIRST_LAYER:]).all()
        for end in (found["whole"], found["resumed"]):
            assert np.abs(end - wanted[-1]).max() < 1e-12


def test_ranks_that_run_eagerly_alone_are_refused_on_all() -> None:
    for said in ranks_of("eager on one rank"):
        assert "ranks disagree on run_eagerly" in said


def test_a_step_that_no_call_of_fit_watches_is_whole() -> None:
    """Neither another call of fit without the callback, nor train_on_batch, nor a join."""
    for found in ranks_of("unwatched"):
        forward, barrier = found["forward"], found["barrier"]
        assert not np.array_equal(forward["first"], barrier["first"])
        for key in ("unwatched", "weights"):
            assert np.array_equal(forward[key], barrier[key]), key
        assert not np.array_equal(forward["again"], barrier["again"])


def test_a_layer_waits_for_its_own_messages_alone() -> None:
    """In the order 0 1 0 2 | 1 0 of buckets, of which the first layer has the last."""
    for found in ranks_of("waits"):
        assert found["layers"] == [set(), {"late.4"}, {"late.4", "late.5"}]
        late, messages = {"late.4", "late.5"}, found["messages"]
        assert set(messages) == late | {f"gradients.{place}" for place in range(4)}
        assert messages["late.5"] == {"late.5"}  # two may be on their way
        assert messages["gradients.0"] - late == {"gradients.0"}
        assert messages["gradients.2"] - late == {"gradients.2", "gradients.0"}
        assert messages["gradients.3"] - late == {"gradients.3", "gradients.1"}


FASTER, SLOWER = "tried, faster", "tried, slower"


@pytest.mark.parametrize("case", [FASTER, SLOWER])
def test_a_plan_that_is_tried_changes_nothing_that_is_computed(case: str) -> None:
    for found in ranks_of(case):
        forward, barrier = found["merged-gradient:overlap=forward"], found["merged-gradient"]
        assert np.array_equal(forward["weights"], barrier["weights"])
        first = SKIP_STEPS + PLANS * (SETTLE_STEPS + TRIAL_STEPS)
        last = first + SETTLE_STEPS + TRIAL_STEPS
        same = (forward["records"] == barrier["records"]).all(axis=1)
        assert same[:first].all()
        assert not same[first : last - 1].any()
        assert same[last + 1 : -1].all() == (case != FASTER)


@pytest.mark.parametrize("case", [FASTER, SLOWER])
def test_a_run_that_is_resumed_goes_on_with_the_plan_that_stayed(case: str) -> None:
    for found in ranks_of(case):
        forward, barrier = found["merged-gradient:overlap=forward"], found["merged-gradient"]
        resumed, other = forward["resumed"], barrier["resumed"]
        for key in ("order", "tried", "tried_forward"):  # names are of another model
            assert getattr(resumed["plan"], key) == getattr(forward["plan"], key)
        assert not resumed["raced"]
        assert other["raced"]
        assert np.array_equal(resumed["weights"], other["weights"])
        same = (resumed["records"] == other["records"]).all(axis=1)
        assert same[:SKIP_STEPS].all()
        assert same[SKIP_STEPS:-1].all() == (case != FASTER)


@pytest.mark.parametrize(("case", "forward_s"), [(FASTER, 11.0), (SLOWER, 12.5)])
def test_what_was_faster_on_the_slowest_rank_stays(case: str, forward_s: float) -> None:
    plans = [found["merged-gradient:overlap=forward"]["plan"] for found in ranks_of(case)]
    assert plans[0] == plans[1]
    assert (plans[0].order is not None) == (case == FASTER)
    assert [seconds for _, seconds in plans[0].tried] == [13.0, 12.0, 14.0]
    assert [seconds for _, seconds in plans[0].tried_forward] == [forward_s]


def test_a_trial_does_not_go_on_beside_a_callback_that_saves() -> None:
    for found in ranks_of("saver in a trial"):
        forward, barrier = found["merged-gradient:overlap=forward"], found["merged-gradient"]
        assert np.array_equal(forward["records"], barrier["records"])
        assert forward["plan"].order is None


def test_a_trial_ends_once() -> None:
    for found in ranks_of("ended twice"):
        assert found["before"].order is not None
        assert found["after"] == found["before"]
        assert found["stays"]


@pytest.mark.parametrize("name", ["warm-up", "warm-up, momentum"])
def test_a_warm_up_changes_nothing_that_is_computed(name: str) -> None:
    for found in ranks_of(name):
        forward, barrier = found["merged-gradient:overlap=forward"], found["merged-gradient"]
        assert np.array_equal(forward["weights"], barrier["weights"])


def test_a_warm_up_finishes_updates_for_velocities_alone() -> None:
    """And a trial in which it did so begins anew: it ends long after its first batch."""
    begun = SKIP_STEPS + PLANS * (SETTLE_STEPS + TRIAL_STEPS)
    for name, last in (("warm-up", begun), ("warm-up, momentum", WARM_UP - 1)):
        for found in ranks_of(name):
            forward = found["merged-gradient:overlap=forward"]
            assert any(forward["late"][:WARM_UP]) == (name == "warm-up")
            assert any(forward["late"][WARM_UP:])
            assert forward["ends"][-1] == last + SETTLE_STEPS + TRIAL_STEPS


WARM_UP = 26
"""Batches."""
