"""``import horovod.tensorflow as hvd`` stays; only the optimizer, or the tape, is hvd_pipe's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import workers_keras_swapped as workers
from cases import of_case
from ranks import once, run_ranks
from workers_keras_swapped import CALLBACKS, STRATEGIES, TAPES

results = once(lambda: run_ranks(2, workers.observations, timeout=280))


def ranks_of(case: str) -> list[Any]:
    return of_case(results(), case)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rank_0s_state_reaches_all(strategy: str) -> None:
    first, second = ranks_of(f"resumed {strategy}")
    assert first["epoch"] == second["epoch"] == 7
    for one, other in zip(first["started"], second["started"], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(first["weights"], second["weights"])


@pytest.mark.parametrize("strategy", [*STRATEGIES, *(f"tape {each}" for each in TAPES)])
def test_horovods_own_shutdown_and_init(strategy: str) -> None:
    """Nobody saw Horovod's own end: the old workers' message names, counts and graphs went on."""
    for found in ranks_of(f"again {strategy}"):
        np.testing.assert_array_equal(found["again"], found["whole"])


def test_an_optimizer_made_after_horovods_own_init() -> None:
    first, second = ranks_of("anew")
    np.testing.assert_array_equal(first, second)


def test_a_rank_joins() -> None:
    (last, first), (other, second) = ranks_of("join")
    assert last == other == 1
    np.testing.assert_array_equal(first, second)


def test_a_rank_does_not_join_under_cocod() -> None:
    """Horovod gave the others zeros for the model of the rank that had left: theirs was halved."""
    for found in ranks_of("join refused"):
        assert "CoCoD would average these" in found


def test_a_copy_by_from_config_is_distributed() -> None:
    """Scripts copy an optimizer so. Ours came without what distributes it."""
    for found in ranks_of("copy"):
        np.testing.assert_array_equal(found, [-0.5])


@pytest.mark.parametrize("name", ["variables", "TensorFlowKerasState", "KerasState"])
def test_calls_of_keras_2_name_ours(name: str) -> None:
    """Horovod's Keras states ended in "'list' object is not callable"."""
    for found in ranks_of("Keras 2"):
        assert "hvd_pipe.tensorflow.keras.elastic" in found[name]
        assert "hvd_pipe.tensorflow.elastic" in found[name]


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_of_keras_2_name_ours(name: str) -> None:
    """They ended in "'Variable' object has no attribute 'ref'" and the like, after a batch."""
    for found in ranks_of("Keras 2"):
        assert f"pass hvd_pipe.tensorflow.keras.callbacks.{name}" in found[name]


def test_horovods_elastic_callbacks() -> None:
    first, second = ranks_of("elastic callbacks")
    assert first["epoch"] == second["epoch"] == 2
    assert first["commits"] == second["commits"] == 2 * (4 // 2 + 1)
    np.testing.assert_array_equal(first["weights"], second["weights"])
    assert "pass hvd_pipe.tensorflow.keras.elastic.UpdateBatchStateCallback" in first["warned"]


def test_horovods_state_of_plain_variables() -> None:
    for found in ranks_of("TensorFlowState"):
        np.testing.assert_array_equal(found["restored"], found["saved"])
        assert found["step"] == 4
