"""Each test opens with the story of its bug."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import workers_regressions
from cases import of_case
from problem import make_model, weights_of
from ranks import once, run_ranks
from reference import Workers, mean
from workers_regressions import LOSSY, REFUSING, ROLLED_BACK, STEPS, STRATEGIES

results = once(lambda: run_ranks(2, workers_regressions.run))


@pytest.mark.parametrize("case", ["unfrozen", "copied"])
def test_batchnorm_is_averaged_after_a_change_of_parameters(case: str) -> None:
    """CoCoD looked for the model in the forward pass that was over when its engine was made."""
    first, second = of_case(results(), case)
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("strategy", REFUSING)
def test_a_parameter_frozen_on_one_rank(strategy: str) -> None:
    """That rank skipped the update that the other one made, and replicas went apart in silence."""
    for said in of_case(results(), ("frozen alone", strategy)):
        assert "a frozen parameter" in said
        assert "rank 1 has 0.weight" in said


def test_bfloat16_is_broadcast_and_gathered() -> None:
    """Horovod does not know the type: broadcasts and sparse gradients of it raised."""
    first, second = of_case(results(), "bfloat16")
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(first).all()


def test_a_copy_right_after_add_param_group() -> None:
    """The copy had fewer names than parameters, and raised in zip()."""
    workers = Workers(2, lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        gradients = mean(workers.gradients(step))
        trained = 2 if step < 2 else 4  # tensors; the last layer never trains
        for gradient in gradients:
            gradient[trained:] = [torch.zeros_like(g) for g in gradient[trained:]]
        workers.update(gradients)
    for weights in of_case(results(), "added and copied"):
        np.testing.assert_allclose(weights, weights_of(workers.models[0]), rtol=0, atol=1e-12)


def test_weights_that_are_changed_while_they_are_ahead() -> None:
    """The way back to the true weights undid the change without a word."""
    for said in of_case(results(), "clamped"):
        assert "call optimizer.synchronize() before changing them" in said


@pytest.mark.parametrize("strategy", REFUSING)
def test_training_goes_on_after_a_refused_step(strategy: str) -> None:
    """After that error every call was refused for ever."""
    (said, first), (_, second) = of_case(results(), ("goes on", strategy))
    assert "was changed while it was being sent" in said
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, weights_of(make_model()))


def test_adasum_on_channels_last() -> None:
    """The update has the weight's strides, and Horovod wants contiguous tensors."""
    first, second = of_case(results(), "adasum")
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_inspects_the_optimizer(strategy: str) -> None:
    """`_step_supports_amp_scaling` averaged gradients for any reader: a debugger hung the job."""
    first, second = of_case(results(), ("inspected", strategy))
    np.testing.assert_array_equal(first, second)


def test_a_scaler_of_the_users_own() -> None:
    """It reads averages, which overflow on all ranks or on none; it was refused before."""
    (scaled, plain), (elsewhere, _) = of_case(results(), "own scaler")
    np.testing.assert_array_equal(scaled, plain)
    np.testing.assert_array_equal(scaled, elsewhere)
    assert np.isfinite(scaled).all()


def test_residuals_move_to_who_encodes_a_sum_next() -> None:
    """Each rank took along what it had left over, also of sums that others encode from then on."""
    for before, after in of_case(results(), "replanned"):
        np.testing.assert_array_equal(before, after)
        assert before.any()


def test_an_optimizer_that_was_replaced_updates_no_more() -> None:
    """hvd.join() applied the pending gradient of the optimizer that another had replaced."""
    for before, after in of_case(results(), "superseded"):
        np.testing.assert_array_equal(before, after)


def test_an_optimizer_that_is_gone_takes_no_part_in_a_join() -> None:
    """One rank's collector had freed the optimizer and not yet its engine: that rank raised, and
    all others failed.
    """
    for before, after in of_case(results(), "abandoned"):
        np.testing.assert_array_equal(before, after)


def test_an_optimizer_that_awaits_collection_refuses_no_join() -> None:
    """With a codec it refused on the rank that had not collected it, and the others waited."""
    assert of_case(results(), "dropped") == [True, False]


def test_buckets_with_room_for_sparse_gradients_are_let_go() -> None:
    """Pipe-SGD kept both sets that it had replaced: their memory was never free again."""
    assert of_case(results(), "sparse sets") == [2, 2]


@pytest.mark.parametrize("loaded", ["plain", "rank 0's"])
@pytest.mark.parametrize("strategy", LOSSY)
def test_residuals_end_with_the_state_that_they_belong_to(strategy: str, loaded: str) -> None:
    """What error feedback had left over of an exploding step survived the way back to a state."""
    for back, anew in of_case(results(), ("exploded", strategy, loaded)):
        np.testing.assert_array_equal(back, anew)


@pytest.mark.parametrize("drains", [1, 2])
@pytest.mark.parametrize("strategy", ROLLED_BACK)
def test_the_same_steps_again_from_a_state(strategy: str, drains: int) -> None:
    """Pipe-SGD kept control words of the steps that were undone: "have not drained at the same
    steps". CoCoD had no warm-up when it went back into it.
    """
    for once_, again in of_case(results(), ("rolled back", strategy, drains)):
        np.testing.assert_array_equal(once_, again)


@pytest.mark.parametrize(
    ("strategy", "compression", "sparse"),
    [("merged-gradient", "int8", False), ("pipe-sgd", "none", True)],
)
def test_join_is_refused_where_horovod_would_crash(
    strategy: str, compression: str, sparse: bool
) -> None:
    """Horovod segfaulted in the rank that joined, or left the others waiting."""
    case = workers_regressions.joined, strategy, compression, sparse
    for said in run_ranks(2, *case):
        assert "hvd.join() needs dense gradients" in said


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_a_state_that_one_rank_alone_has_loaded(strategy: str, before: int) -> None:
    """Pipe-SGD sent its odd set where others sent the even one, and the job hung; CoCoD's rounds
    ended at different steps on each rank.
    """
    for said in run_ranks(2, workers_regressions.loaded_alone, strategy, before):
        assert "ranks have sent different things" in said


@pytest.mark.parametrize(
    ("strategy", "saved", "before"),
    [
        ("merged-gradient", 45, 5),
        ("merged-gradient:overlap=forward", 5, 33),
        ("auto:steps=9", 20, 5),
    ],
)
def test_a_state_that_one_rank_alone_has_loaded_while_others_try_plans(
    strategy: str, saved: int, before: int
) -> None:
    """It measured no more, or began anew, and the others waited for it."""
    case = workers_regressions.loaded_alone_among_trials, strategy, saved, before
    for said in run_ranks(2, *case):
        assert "ranks have sent different things" in said


def test_a_rank_hears_the_reason_after_the_other_has_left() -> None:
    """The slow rank raised HorovodInternalError: the fast one had shut Horovod down."""
    for said in run_ranks(2, workers_regressions.loaded_alone, "pipe-sgd", 3, 2.0):
        assert "ranks have sent different things" in said
