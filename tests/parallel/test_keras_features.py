"""Keras' and Horovod's features under every strategy, on ranks that differ on purpose."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import workers_keras_features as features
from cases import of_case
from ranks import once, run_ranks
from test_exchange import emulated
from workers_keras_features import CODECS, EXACT, MOMENTA, STEPS, UPDATES

from hvd_pipe.torch.compression import Int8

N = 2
MAX_FUNCTIONS, MAX_FILES = 16, 7
MEAN = 1.5  # of rank + 1 over the ranks

observed = once(lambda: run_ranks(N, features.observations, timeout=400))


def ranks_of(case: str) -> list[dict[str, Any]]:
    return of_case(observed(), case)


def assert_alike(case: str, key: str = "weights") -> None:
    first, *others = (found[key] for found in ranks_of(case))
    for other in others:
        np.testing.assert_array_equal(other, first)
    assert np.isfinite(first).all()


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("way", ["plain", "several steps", "eagerly", "custom step"])
def test_fit_trains_alike_however_it_runs(way: str, strategy: str) -> None:
    assert_alike(f"{way} {strategy}")
    found, plain = (ranks_of(f"{name} {strategy}")[0] for name in (way, "plain"))
    np.testing.assert_allclose(found["weights"], plain["weights"], rtol=0, atol=1e-10)
    assert found.get("iterations", STEPS) == STEPS


@pytest.mark.parametrize("way", ["eager", "traced"])
def test_a_step_calls_few_functions_in_few_files(way: str) -> None:
    """A ratchet: a reader follows a gradient through these (docs/architecture.md draws them)."""
    for found in ranks_of(f"functions of the {way} step"):
        functions = found["functions"]
        listed = "\n".join(f"{file}: {name}" for file, name in functions)
        assert len(functions) <= MAX_FUNCTIONS, listed
        assert len({file for file, _ in functions}) <= MAX_FILES, listed


def test_xla_is_never_chosen_for_a_distributed_optimizer() -> None:
    assert not any(found["jit"] for found in ranks_of("xla"))


@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd"])
def test_an_overflow_on_one_rank_leaves_the_update_out_on_all(strategy: str) -> None:
    """Keras' LossScaleOptimizer looks at local gradients: one rank would go its own way."""
    assert_alike(f"overflow {strategy}")
    for found in ranks_of(f"overflow {strategy}"):
        assert found["class"] == "LossScaleOptimizer"
        assert found["scale"] == 2.0**14
        assert found["iterations"] == STEPS - 1


def test_a_saved_model_is_a_plain_one_and_goes_on_here() -> None:
    assert_alike("saved")
    for found in ranks_of("saved"):
        assert found["is plain"], found["plain"]
        assert found["iterations"] == STEPS
        assert found["same slots"]
        assert found["iterations after"] == 2 * STEPS


@pytest.mark.parametrize("strategy", EXACT[:2])
def test_a_gradient_that_one_rank_lacks_counts_as_zero(strategy: str) -> None:
    assert_alike(f"lacking {strategy}")
    assert [found["missing"] for found in ranks_of(f"lacking {strategy}")] == [False, True]
    for found in ranks_of(f"lacking {strategy}"):
        # Two biases, whose gradient is 3 (images) on all ranks but the last; 3 updates of 0.1.
        np.testing.assert_allclose(found["moved"][-2:], -0.1 * 3 * 3 * (N - 1) / N)


@pytest.mark.parametrize(
    ("case", "stale"), [("sparse", False), ("dense", False), ("pipe-sgd", True)]
)
def test_rows_of_an_embedding_are_averaged(case: str, stale: bool) -> None:
    assert_alike(f"embedding {case}", "after")
    found = ranks_of(f"embedding {case}")[0]
    table, pending = found["before"].copy(), np.zeros_like(found["before"])
    for number in range(3):
        gradient = np.zeros_like(table)
        for rank in range(N):
            for row in (rank, rank + number, 11):
                gradient[row] += 2 * table[row] / N
        table -= 0.5 * (pending if stale else gradient)
        pending = gradient
    if stale:
        table -= 0.5 * pending
    np.testing.assert_allclose(found["after"], table, rtol=0, atol=1e-12)


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("codec", CODECS[1:])
def test_compression_loses_little(codec: str, strategy: str) -> None:
    assert_alike(f"compressed {codec} {strategy}")
    exact, found = (
        ranks_of(f"compressed {name} {strategy}")[0]["weights"] for name in ("none", codec)
    )
    assert 1e-9 < np.abs(found - exact).max() < 0.05


def test_coded_averages_are_those_of_two_phases() -> None:
    """Ranks encode, slices are summed and encoded again, and what is lost is added next time.

    Up to rounding, by which a few values may lie a step of the code apart.
    """
    lost = np.zeros((N + 1, features.CODED), np.float32)
    found = [each["rounds"] for each in ranks_of("coded")]
    for number in range(features.CODED_ROUNDS):
        mine = [features.coded_values(rank, number) for rank in range(N)]
        wanted = emulated(Int8(chunk=16, error_feedback=True), mine, lost=lost)
        for rounds in found:
            assert np.mean(np.abs(rounds[number] - wanted) > 1e-5) < 0.01


@pytest.mark.parametrize(
    ("case", "factor", "iterations"),
    [
        ("average", MEAN, 1),
        ("sum", N * MEAN, 1),
        ("predivide", MEAN, 1),
        ("passes", 3 * MEAN + 3, 3),
        ("averaged passes", MEAN + 1, 3),
    ],
)
def test_arguments_mean_what_they_mean_to_horovod(
    case: str, factor: float, iterations: int
) -> None:
    assert case in UPDATES
    for found in ranks_of(f"update {case}"):
        np.testing.assert_allclose(found["weight"], -factor * np.array([1.0, 2.0, 3.0]))
        assert found["iterations"] == iterations


def test_a_local_variable_keeps_its_gradient() -> None:
    for rank, found in enumerate(ranks_of("local")):
        np.testing.assert_allclose(found["mine"], -(rank + 1) / N)
        np.testing.assert_allclose(found["shared"], -MEAN)


def test_groups_are_messages() -> None:
    for found, plain in zip(ranks_of("groups"), ranks_of("plain merged-gradient"), strict=True):
        assert found["buckets"] == 2
        np.testing.assert_allclose(found["weights"], plain["weights"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", ["planning", "planning twice"])
def test_the_planning_callback_plans_once_by_its_own_name(case: str) -> None:
    """Beside a broadcast callback, which has one as well, no step is counted twice."""
    assert_alike(case)
    first, *others = (found["plans"] for found in ranks_of(case))
    assert all(other == first for other in others)
    for plans in (first, *others):
        planned = next(i for i, plan in enumerate(plans, 1) if plan.tried)
        trials = len(plans[-1].tried)
        assert planned == features.SKIP_STEPS + trials * features.TRIED_FOR
        assert 1 <= trials <= features.PLANS
        changes = [i for i, (one, two) in enumerate(pairwise(plans), 2) if one != two]
        assert changes == [planned - n * features.TRIED_FOR for n in reversed(range(trials))]


def test_the_broadcast_callback_makes_ranks_start_alike() -> None:
    assert_alike("beginnings")
    assert_alike("beginnings", "mae")


def test_the_warm_up_callback_raises_the_learning_rate() -> None:
    for found in ranks_of("rates"):
        epochs = np.arange(8) / 4 + 1 / 4
        wanted = 0.8 / N * (epochs * (N - 1) / 2 + 1)
        np.testing.assert_allclose(found["rates"][:8], wanted)
        np.testing.assert_allclose(found["rates"][8:], 0.8)


@pytest.mark.parametrize("mode", ["function", "eager"])
@pytest.mark.parametrize("strategy", EXACT[:2])
def test_a_tape_trains_as_the_optimizer_does(strategy: str, mode: str) -> None:
    case = f"tape {strategy} {mode}"
    assert_alike(case)
    plain = ranks_of(f"plain {strategy}")
    for found, other in zip(ranks_of(case), plain, strict=True):
        np.testing.assert_allclose(found["weights"], other["weights"], rtol=0, atol=1e-10)
        assert found["drained"] == (strategy == "pipe-sgd")


def test_a_tape_that_goes_on_after_a_drain() -> None:
    """The first step after it returned once more what had been drained: it was applied twice."""
    for found in ranks_of("drained"):
        assert found["weight"] == -4 * MEAN


def test_tapes_of_all_kinds() -> None:
    for rank, found in enumerate(ranks_of("tapes")):
        np.testing.assert_allclose(found["one"], [MEAN * 4, MEAN * 6])
        np.testing.assert_allclose(found["named"], [MEAN * 4, MEAN * 6])
        assert found["unused"]
        np.testing.assert_allclose(found["again"], [MEAN, MEAN])
        np.testing.assert_allclose(found["sparse"][:, 0], [1 / N, 2 / N, 0, 0])
        np.testing.assert_allclose(found["local"], (rank + 1) / N)
        np.testing.assert_allclose(found["global"], MEAN)


@pytest.mark.parametrize("strategy", [*EXACT, MOMENTA])
def test_a_checkpoint_goes_on_bit_for_bit(strategy: str) -> None:
    for found in ranks_of(f"checkpoint {strategy}"):
        np.testing.assert_array_equal(found["resumed"], found["whole"])
        # Pipe-SGD's last gradient was in flight.
        assert found["iterations"] == STEPS + (strategy != "pipe-sgd")


def test_ranks_that_differ_are_all_told() -> None:
    for found in ranks_of("disagreeing strategy"):
        assert found["kind"] == "RanksDisagreeError"
        assert "rank 0 has MergedGradient" in found["text"]
        assert "rank 1 has PipeSGD" in found["text"]
    first, last = ranks_of("disagreeing argument")
    assert first["kind"] == "RanksDisagreeError"
    assert "rank 1 was given something wrong" in first["text"]
    assert last["kind"] == "ValueError"
    for found in ranks_of("disagreeing model"):
        assert found["kind"] == "RanksDisagreeError"
        assert "the variable weight" in found["text"]
    for found in ranks_of("disagreeing momenta"):
        assert found["kind"] == "RanksDisagreeError"
        assert "weight.momentums" in found["text"]


def test_horovods_names_are_there() -> None:
    for found in ranks_of("names"):
        assert found == {"tensorflow": [], "keras": []}
