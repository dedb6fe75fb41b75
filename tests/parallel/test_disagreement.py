"""Ranks that differ are told so when the optimizer is built: all of them, with both sides.

Bounded time is part of it: a rank that waited for ever would be ended by the harness, and its case
reported as raised by the stall check or by the deadline.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import workers_disagreement
from cases import of_case
from cells import Cell
from ranks import once, run_ranks
from workers_disagreement import ODD, Told

RANKS = 3

# What the others have, and what rank ODD has, as the message of every rank must show it.
DIFFERENCES = {
    "name": ("b.weight", "c.weight"),
    "shape": ("(3, 3)", "(2, 3)"),
    "dtype": ("float32", "float64"),
    "more parameters": ("", "c.weight"),
    "fewer parameters": ("b.weight", ""),
    "strategy": ("MergedGradient", "PipeSGD"),
    "strategy's option": ("warmup_steps=3", "warmup_steps=5"),
    "plan file": ("'b.bias', 'b.weight'", "'b.bias',)"),
    "op": ("Average", "Sum"),
    "compression": ("NoneCompressor", "FP16Compressor"),
    "passes": ("has 1", "has 2"),
    "environment": ("PipeSGD", "CoCoD(period=6"),
}
# What is wrong on rank ODD alone: the class that it raises, what it says, and what it is about.
# The others hear of it in an error of our family.
MISTAKES = {
    "bad strategy": ("ValueError", "pipe-sdg"),
    "bad type of strategy": ("TypeError", "17"),
    "bad passes": ("ValueError", "backward_passes_per_step"),
    "bad names": ("ValueError", "named_parameters"),
    "bad process set": ("TypeError", "process_set"),
    "plan of another model": ("ValueError", "b.bias"),
    "plan file that is not there": ("OSError", "missing.json"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = str(tmp_path_factory.mktemp("plans"))
    return once(lambda: run_ranks(RANKS, workers_disagreement.run, directory))


@pytest.mark.parametrize("case", DIFFERENCES)
def test_every_rank_is_told_both_sides(results: Any, case: str) -> None:
    usual, odd = DIFFERENCES[case]
    for told in of_case(results(), case):
        assert isinstance(told, Told), "nothing was raised"
        assert "HvdPipeError" in told.kinds
        # "... rank 0 has the usual; rank 2 has the odd ..."
        _, _, message = told.message.partition("rank 0 ")
        ours, _, theirs = message.partition(f"rank {ODD} ")
        assert usual in ours, told.message
        assert odd in theirs, told.message


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_on_one_rank_is_told_to_all(results: Any, case: str) -> None:
    kind, says = MISTAKES[case]
    for rank, told in enumerate(of_case(results(), case)):
        assert isinstance(told, Told), "nothing was raised"
        assert (kind if rank == ODD else "HvdPipeError") in told.kinds
        assert says in told.message
        assert rank == ODD or f"rank {ODD}" in told.message


def test_training_works_afterwards(results: Any) -> None:
    expected = Cell("merged-gradient", "momentum").expected(RANKS)
    for rank, weights in enumerate(of_case(results(), "afterwards")):
        np.testing.assert_allclose(weights, expected[rank], rtol=0, atol=1e-12)
