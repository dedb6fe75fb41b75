"""Ranks that differ, and training that stops half-way: all decide alike, and nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import workers_keras_unlike_ranks as workers
from cases import of_case
from ranks import once, run_ranks

N = 2
observed = once(lambda: run_ranks(N, workers.observations, timeout=300))


def ranks_of(case: str) -> list[dict[str, Any]]:
    return of_case(observed(), case)


@pytest.mark.parametrize("strategy", workers.OVERFLOWS)
def test_an_overflow_on_one_rank_is_one_for_all(strategy: str) -> None:
    """Also where each rank steps by itself, and where a guess would carry it on for ever."""
    first, second = ranks_of(f"overflow {strategy}")
    for found in (first, second):
        assert np.isfinite(found["weights"]).all()
        assert found["scale"] == first["scale"]
        assert found["iterations"] == first["iterations"]
    np.testing.assert_array_equal(first["weights"], second["weights"])


def test_an_overflow_of_a_local_gradient_is_one_for_all() -> None:
    for found in ranks_of("local overflow"):
        assert found == {"shared": 0.0, "scale": 2.0, "iterations": 0}


@pytest.mark.parametrize("strategy", workers.IN_FLIGHT)
def test_ranks_start_alike_when_the_first_alone_has_loaded(strategy: str) -> None:
    first, second = ranks_of(f"loaded {strategy}")
    np.testing.assert_array_equal(first["weights"], second["weights"])
    assert first["iterations"] == second["iterations"]


@pytest.mark.parametrize("strategy", workers.IN_FLIGHT)
def test_what_was_read_is_written_again(strategy: str) -> None:
    for found in ranks_of(f"written {strategy}"):
        np.testing.assert_array_equal(found["read again"], found["went on"])


@pytest.mark.parametrize("name", workers.WINDOWS)
def test_a_checkpoint_between_two_passes_goes_on(name: str) -> None:
    for found in ranks_of(f"window {name}"):
        np.testing.assert_array_equal(found["resumed"], found["whole"])
        assert np.all(found["whole"] != 0)


def test_a_keras_file_between_two_passes_goes_on() -> None:
    for found in ranks_of("window in a file"):
        np.testing.assert_array_equal(found["resumed"], found["whole"])


def test_each_list_of_variables_has_passes_of_its_own() -> None:
    for found in ranks_of("two lists"):
        assert found["weights"] == [-2.0, -20.0]


def test_what_a_codec_has_lost_stays_with_its_bucket() -> None:
    for found in ranks_of("buckets"):
        assert found["before"] > 0
        assert found["after"] == 0


def test_stock_horovod_averages_nothing_under_fit() -> None:
    """Why hvd_pipe wraps ``apply``: Keras 3 calls nothing else, and Horovod does not know it.

    Nobody is told.
    """
    first, second = ranks_of("stock")
    np.testing.assert_array_equal(first["began"], second["began"])
    assert not np.allclose(first["weights"], second["weights"])


def test_a_step_may_broadcast_twice() -> None:
    for found in ranks_of("two broadcasts"):
        assert found["values"] == [1.0] * 3 + [11.0] * 3


def test_epochs_of_unlike_length_are_refused() -> None:
    """The rank with more batches would wait for ever."""
    for found in ranks_of("unlike epochs"):
        assert "the batches of an epoch" in found["error"]
        assert "rank 0 has 4" in found["error"]
        assert "rank 1 has 3" in found["error"]


def test_a_rank_may_have_built_its_optimizer_before() -> None:
    """Names of messages counted traces; that rank had fewer, and all ranks waited for ever."""
    first, second = ranks_of("unlike traces")
    np.testing.assert_array_equal(first["weights"], second["weights"])
    assert (first["traces"], second["traces"]) == (2, 1)


def test_fit_traces_a_step_of_keras_once() -> None:
    """It has built the optimizer by then, on each rank that has not."""
    first, second = ranks_of("one trace")
    np.testing.assert_array_equal(first["weights"], second["weights"])
    assert (first["traces"], second["traces"]) == (1, 1)


def test_groups_of_other_variables_are_refused() -> None:
    for found in ranks_of("unlike groups"):
        assert "groups" in found["error"]
        assert "[[0], [1, 2]]" in found["error"]


def test_a_forgotten_broadcast_is_told() -> None:
    first, second = ranks_of("forgotten")
    assert any("BroadcastGlobalVariablesCallback(0)" in text for text in first["said"])
    assert second["said"] == []


@pytest.mark.parametrize("way", workers.STATISTICS)
def test_statistics_are_averaged_with_the_weights(way: str) -> None:
    """Without the callback, and in own loops, rank 0's were saved beside averaged weights."""
    first, second = ranks_of(f"statistics {way}")
    for one, other in zip(first["statistics"], second["statistics"], strict=True):
        np.testing.assert_array_equal(one, other)
    mean = (first["mean here"] + second["mean here"]) / 2
    np.testing.assert_allclose(first["statistics"][0], mean, rtol=0, atol=1e-10)


def test_a_model_may_have_optimizers_of_its_own() -> None:
    """They are broadcast, and finished at the end of ``fit``, as the compiled one is."""
    first, second = ranks_of("optimizers")
    assert first["updates"] == second["updates"] == [7, 7]
    for one, other in zip(first["weights"], second["weights"], strict=True):
        np.testing.assert_array_equal(one, other)


def test_memory_that_one_rank_lacks_is_missed_on_every_rank() -> None:
    """Under Keras, the other ranks went on to measure, and waited for it."""
    told, own = ranks_of("no memory")
    assert own["error"] == "MemoryError: too little"
    assert told["error"].startswith("HvdPipeError: rank 1 could not allocate 4000 bytes")
