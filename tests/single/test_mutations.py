"""The faults of mutations.py can still be planted: the sources that they change move."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS))

import mutations  # noqa: E402
from mutations import MUTATIONS, Mutation  # noqa: E402


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_a_fault_can_be_planted(mutation: Mutation) -> None:
    """Its text is there once, the result is Python, and its tests are in the suite."""
    before = mutations.sources_of(mutation)
    after = mutations.applied(mutation, before)
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        ("def test_it(): assert answer() == 42", mutations.CAUGHT),
        ("assert answer() == 42\ndef test_it(): pass", mutations.BROKEN),
        (
            "import pytest\n@pytest.fixture\ndef found(): assert answer() == 42\n"
            "def test_it(found): pass",
            mutations.BROKEN,
        ),
    ],
    ids=["a test fails", "no collection", "a fixture fails"],
)
def test_only_a_test_that_fails_catches_a_fault(
    test: str, verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fault that broke an import counted as caught, and no test had looked at it."""
    (tmp_path / "hvd_pipe").mkdir()
    (tmp_path / "hvd_pipe" / "__init__.py").touch()
    (tmp_path / "hvd_pipe" / "own.py").write_text("def answer(): return 42\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_own.py").write_text(f"from hvd_pipe.own import answer\n{test}\n")
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    fault = Mutation("wrong", "own.py", "return 42", "return 41", ["tests/test_own.py"])
    assert mutations.plant(fault, frozenset()).verdict == verdict


def test_a_fault_goes_into_the_function_that_it_names() -> None:
    text = "def one():\n    return 1\n\nclass Two:\n    def one(self):\n        return 1\n"
    fault = Mutation("wrong", "own.py", "return 1", "return 2", [], "Two.one")
    assert mutations.applied(fault, text) == text[:-2] + "2\n"
    for function in ("Two.three", "three", ""):
        with pytest.raises(ValueError, match=r"give mutations\.toml the text of today"):
            mutations.applied(replace(fault, function=function), text)


def test_make_test_runs_what_the_table_says() -> None:
    makefile = (TESTS.parent / "Makefile").read_text()
    assert f'-m "{mutations.IN_MAKE_TEST}" $(PYTEST)' in makefile
