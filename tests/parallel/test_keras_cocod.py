"""CoCoD with fragments and within nodes: it goes on from any moment, and ranks decide alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import workers_keras_cocod as workers
from cases import of_case
from ranks import once, run_ranks

in_fragments = once(lambda: run_ranks(2, workers.in_fragments, timeout=400))
within_nodes = once(lambda: run_ranks(4, workers.within_nodes, timeout=400))


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("name", [*workers.FRAGMENTED, "within"])
def test_training_goes_on_from_every_moment_of_a_round(name: str) -> None:
    """Bit for bit, with all that is in flight, of whichever fragment."""
    if name == "within":
        everyone = of_case(within_nodes(), "resumed")
    else:
        everyone = of_case(in_fragments(), f"resumed {name}")
    for found in everyone:
        wanted = found.pop("whole")
        assert found.keys() == set(range(1, workers.PERIOD + 2))
        assert any("sent" in name for name in wanted)
        for each in found.values():
            assert_same(each, wanted)


@pytest.mark.parametrize(("before", "after"), workers.CUTS)
def test_a_model_in_other_fragments_keeps_its_anchors(before: int, after: int) -> None:
    """What was in flight of other fragments is dropped, and a round begins anew."""
    first, second = (found[before, after] for found in of_case(in_fragments(), "cuts"))
    for found in (first, second):
        assert len(found["saved"]) == 12  # of six variables, in all fragments
        assert_same(found["loaded"], found["saved"])
        assert found["same"]
        assert not found["ahead"]
        assert found["local steps"] == 0
        assert found["ahead later"]
    np.testing.assert_array_equal(first["weights"], second["weights"])
    assert np.isfinite(first["weights"]).all()


def test_more_fragments_than_variables_are_refused_on_every_rank() -> None:
    first, second = of_case(in_fragments(), "too many")
    assert "give at most 6 fragments" in first["told"]
    assert first["told"] == second["told"]
    np.testing.assert_array_equal(first["weights"], second["weights"])


@pytest.mark.parametrize("what", ["unlike variables", "unlike fragments"])
def test_unlike_ranks_are_told(what: str) -> None:
    wanted = {"unlike variables": "variables that are not local", "unlike fragments": "fragments="}
    for found in of_case(in_fragments(), what):
        assert "RanksDisagreeError: ranks disagree on " in found["told"]
        assert wanted[what] in found["told"]


def test_a_rank_that_can_add_no_process_set_is_told_of_on_every_rank() -> None:
    *others, last = of_case(within_nodes(), "static sets")
    assert last["told"].startswith("HvdPipeError: within=")
    for found in others:
        assert found["told"].startswith("RanksDisagreeError: rank 3 was given something wrong")
        assert 'hvd.init(process_sets="dynamic")' in found["told"]


def test_nodes_are_of_all_ranks() -> None:
    for found in of_case(within_nodes(), "process set"):
        assert "within='node' makes process sets of its own" in found["told"]


def test_an_overflow_on_one_rank_of_one_node_is_one_for_all() -> None:
    first, *others = of_case(within_nodes(), "overflow")
    assert first["scale"] == 2.0**14
    for found in (first, *others):
        assert np.isfinite(found["weights"]).all()
        assert found["scale"] == first["scale"]
        assert found["iterations"] == first["iterations"]
        np.testing.assert_array_equal(found["weights"], first["weights"])


def test_a_node_is_synchronous() -> None:
    a, b, c, d = (found["rows"] for found in of_case(within_nodes(), "one node"))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(c, d)
    assert not np.isclose(a, c).all(axis=1).any()
    first, *others = (found["ended"] for found in of_case(within_nodes(), "one node"))
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_weights_are_as_exact_as_the_model() -> None:
    """Factors of a float64 mean were rounded to float32."""
    gradients, weights = np.arange(4) + 1.0, workers.WEIGHTS
    everyone = np.average(gradients, weights=weights)
    nodes = [np.average(gradients[i : i + 2], weights=weights[i : i + 2]) for i in (0, 2)]
    ended = everyone + np.average(np.repeat(nodes, 2), weights=weights)
    for rank, found in enumerate(of_case(within_nodes(), "weights")):
        wanted = [-everyone, -everyone - nodes[rank // 2], -ended]
        np.testing.assert_allclose(found["weights"], wanted, rtol=1e-14)


def test_nodes_find_each_other_again_after_horovods_end() -> None:
    """Its process sets end with it, and graphs that were traced hold their numbers."""
    for found in of_case(within_nodes(), "again"):
        assert_same(found["again"], found["whole"])


def test_no_rank_joins() -> None:
    for found in of_case(within_nodes(), "join"):
        assert "CoCoD would average these" in found["told"]
