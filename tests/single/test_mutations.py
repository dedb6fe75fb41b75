"""The faults of mutations.py can still be planted: the sources that they change move."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))

import mutations  # noqa: E402
from mutation_table import MUTATIONS, Mutation  # noqa: E402


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_a_fault_can_be_planted(mutation: Mutation) -> None:
    """Its text is there once, the result is Python, and its tests are in the suite."""
    before = mutations.sources_of(mutation)
    after = mutations.applied(mutation, before)
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))
