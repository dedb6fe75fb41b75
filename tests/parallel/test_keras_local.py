"""Variables that are a rank's own: they do not travel, so that ranks need not have the same."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import of_case
from workers_keras_local import COUNTING, GRADIENTS, STRATEGIES, plain
from workers_keras_mending import observed


def ranks_of(case: str) -> list[dict[str, Any]]:
    return of_case(observed(), case)


def descent(gradients: list[float], momentum: float = 0.5) -> float:
    """Where these gradients lead a weight of 0, with a learning rate of 1."""
    weight = velocity = 0.0
    for gradient in gradients:
        velocity = momentum * velocity - gradient
        weight += velocity
    return weight


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_may_have_tables_of_unlike_shapes(strategy: str) -> None:
    """A model-parallel table was refused, as ranks had other shapes of it, and other numbers."""
    for rank, found in enumerate(ranks_of(f"unlike tables {strategy}")):
        assert [each.shape for each in found["tables"]] == [(rank + 2, 3)] * (rank + 1)
        for each in found["tables"]:
            own = descent([(rank + 1.0) * step for step in (1, 2, 3)])
            np.testing.assert_allclose(each, own, rtol=0, atol=1e-12)
        mean = descent([1.5 * step for step in (1, 2, 3)])
        np.testing.assert_allclose(found["shared"], mean, rtol=0, atol=1e-12)


def test_layers_of_a_rank_are_neither_broadcast_nor_averaged() -> None:
    """Slots, moving averages and statistics of local layers have unlike shapes as well."""
    first, second = ranks_of("partial optimizer")
    np.testing.assert_array_equal(first["shared"], second["shared"])
    for found in (first, second):
        assert found["own"].shape == found["began"].shape
        assert np.all(found["own"] != found["began"])
    assert first["statistics"].shape != second["statistics"].shape


def test_a_tape_leaves_layers_of_unlike_shapes_alone() -> None:
    found = ranks_of("partial tape")
    mean = np.mean([each["hidden"] for each in found])
    for rank, each in enumerate(found):
        np.testing.assert_allclose(each["own"], np.full((2, rank + 2), rank + 1.0))
        np.testing.assert_allclose(each["shared"], [[mean]])


def test_a_variable_that_is_local_on_one_rank_only_is_told() -> None:
    for found in ranks_of("local on one rank"):
        assert "rank 0 has 2" in found["error"]
        assert "rank 1 has 1" in found["error"]


@pytest.mark.parametrize("strategy", [*STRATEGIES, "pipe-sgd:prediction=local"])
def test_all_variables_may_be_local(strategy: str) -> None:
    """Where nothing was sent, ``tf.stack([])`` raised, and a plan of no buckets."""
    for found in ranks_of(f"nothing shared {strategy}"):
        np.testing.assert_allclose(found["weight"], -6.0)


@pytest.mark.parametrize("name", COUNTING)
def test_a_table_on_one_rank_leaves_what_is_shared_alone(name: str) -> None:
    """The first step of Pipe-SGD applies a table's gradient alone, and counted as an update.

    Where one rank had a table, its bias correction, learning rate and moving averages were a step
    ahead of the others', and shared weights left each other.
    """
    weight, serial = keras.Variable(np.zeros(2), name="weight"), plain(name)
    for factor in GRADIENTS:
        serial.apply([tf.ones(2, tf.float64) * factor * 1.5], [weight])
    for found in ranks_of(f"counted alike {name}"):
        assert found["iterations"] == len(GRADIENTS)
        np.testing.assert_allclose(found["shared"], np.array(weight), rtol=0, atol=1e-12)
    assert all(np.any(each) for each in found["tables"])


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_an_overflow_in_a_table_of_one_rank_is_one_on_all(mode: str) -> None:
    """Ranks without a table did not vote in Pipe-SGD's first step, and the others waited."""
    first, second = ranks_of(f"scaled {mode}")
    for found in (first, second):
        np.testing.assert_allclose(found["shared"], -1.5 * sum(GRADIENTS), rtol=0, atol=1e-12)
        assert found["scale"] == 4.0
        assert found["counter"] == len(GRADIENTS) - 1
    np.testing.assert_allclose(second["tables"], -sum(GRADIENTS[1:]) * np.ones((1, 3)))
