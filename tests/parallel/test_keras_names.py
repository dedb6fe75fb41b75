"""Every name of ``horovod.tensorflow`` and its ``keras``: it works here, or says what to write."""

from __future__ import annotations

from typing import Any

import pytest
import workers_keras_names
from cases import of_case
from ranks import once, run_ranks

observed = once(lambda: run_ranks(2, workers_keras_names.observations, timeout=300))

MEAN = [1.5, 3.0, 4.5, 6.0]
SUM = [3.0, 6.0, 9.0, 12.0]
HALVES = ([1.5, 3.0], [4.5, 6.0])

# By name: what each rank gets, where these differ in a pair.
WANTED: dict[str, Any] = {
    "allreduce": (MEAN, MEAN),
    "allreduce as of old": (SUM, SUM),
    "allreduce Sum": (SUM, SUM),
    "allreduce Min": ([1.0, 2.0, 3.0, 4.0],) * 2,
    "allreduce Max": ([2.0, 4.0, 6.0, 8.0],) * 2,
    "allreduce Product": ([2.0, 8.0, 18.0, 32.0],) * 2,
    "allreduce Adasum": (MEAN, MEAN),  # parallel gradients: the mean
    "allreduce fp16": (MEAN, MEAN),
    "allreduce sparse": ([[0.5, 0.5], [1.5, 1.5], [1.0, 1.0], [0.0, 0.0]],) * 2,
    "grouped_allreduce": ([MEAN, SUM],) * 2,
    "grouped_allreduce mixed": (
        [SUM, [[1.0, 1.0], [3.0, 3.0], [2.0, 2.0], [0.0, 0.0]], [2 * each for each in SUM]],
    )
    * 2,
    "allgather": ([1.0, 2.0, 4.0],) * 2,
    "grouped_allgather": ([[1.0, 2.0, 3.0, 4.0, 2.0, 4.0, 6.0, 8.0], [1.0, 2.0]],) * 2,
    "broadcast": ([2.0, 4.0, 6.0, 8.0],) * 2,
    "alltoall": ([1.0, 2.0, 2.0, 4.0], [3.0, 4.0, 6.0, 8.0]),
    "alltoall splits": ([[1.0, 2.0], [1, 1]], [[2.0, 3.0, 4.0, 4.0, 6.0, 8.0], [3, 3]]),
    "reducescatter": HALVES,
    "grouped_reducescatter": tuple([half, [2 * each for each in half]] for half in HALVES),
    "sizes": ([2, 0, 2, 0, 1], [2, 1, 2, 1, 1]),
}


def ranks_of(case: str) -> list[Any]:
    return of_case(observed(), case)


@pytest.mark.parametrize("how", ["eagerly", "in a graph"])
@pytest.mark.parametrize("name", workers_keras_names.BOTH)
def test_a_call_means_what_it_means_to_horovod(name: str, how: str) -> None:
    assert tuple(ranks_of(f"{name} {how}")) == WANTED[name]


def test_values_of_the_keras_module() -> None:
    for rank, found in enumerate(ranks_of("keras values")):
        assert found == [[1.0, 2.5], [0, 1], [1], [[2.0], [4.0]][rank]]


@pytest.mark.parametrize("kind", ["keras", "tensorflow"])
def test_variables_are_broadcast_in_place(kind: str) -> None:
    """Horovod's ``broadcast_`` does not know Keras 3's variables."""
    for found in ranks_of(f"in place {kind}"):
        assert found == [[[2.0, 2.0]], [2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("case", ["objects", "objects in a graph"])
def test_objects_travel(case: str) -> None:
    """Horovod's look for a session in a graph, and ``broadcast_object_fn`` for a placeholder."""
    for found in ranks_of(case):
        assert found == [{"rank": 1}, {"rank": 1}, [["x"], ["x", "x"]]]


def test_graphs_of_tensorflow_1_are_stock_horovods() -> None:
    for found in ranks_of("graph of TensorFlow 1"):
        assert found == [1.0 - 1.5, 2.0 - 1.5]


def test_questions_are_answered() -> None:
    for found in ranks_of("plain"):
        built = found.pop("built")
        assert built[0]
        assert built[1]
        assert found == {
            "power of 2": [True, False],
            "gpu": True,
            "homogeneous": True,
            "lists": [[1, 2], [3]],
            "extension": None,
            "references": True,
            "average": True,
            "cross": [0, 1],
        }


def test_a_process_set() -> None:
    assert ranks_of("process set") == [[], [[2.0, 4.0, 6.0, 8.0], "here"]]


def test_a_rank_may_leave() -> None:
    first, second = ranks_of("join")
    assert first == second


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("hook", "BroadcastGlobalVariablesCallback"),
        ("all variables", "hvd.broadcast_variables(model.variables"),
        ("codec", "cannot be used in a single Horovod call"),
        ("bfloat16", "not in the list of allowed values"),
        ("Adasum", "use op=hvd.Average"),
    ],
)
def test_what_cannot_work_says_so(what: str, words: str) -> None:
    for found in ranks_of("refusals"):
        assert words in found[what]


def test_another_frameworks_horovod_changes_nothing() -> None:
    """Process sets ask the Horovod that was imported last; ours must not think it is alone."""
    assert of_case(observed(), "beside torch") == [-1.5, -1.5]
