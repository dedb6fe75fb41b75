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
    """Its text is there once, and the result is Python."""
    before = mutations.sources_of(mutation)
    after = mutations.applied(mutation, before)
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_a_fault_has_tests(mutation: Mutation) -> None:
    """Each is a function of a test file; nothing checks the parameters in brackets here."""
    files = {test.partition("::")[0] for test in mutation.tests}
    functions = {
        f"{file}::{node.name}"
        for file in files
        for node in ast.parse((mutations.ROOT / file).read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert mutation.tests
    assert {test.partition("[")[0] for test in mutation.tests} <= functions


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
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    assert mutations.plant(wrong_answer(tmp_path, test)).verdict == verdict


def wrong_answer(tree: Path, tests: str) -> Mutation:
    """Write a small package and its tests, and return a fault of it."""
    (tree / "hvd_pipe").mkdir()
    (tree / "hvd_pipe" / "__init__.py").touch()
    (tree / "hvd_pipe" / "own.py").write_text("def answer(): return 42\n")
    (tree / "tests").mkdir()
    (tree / "tests" / "test_own.py").write_text(f"from hvd_pipe.own import answer\n{tests}\n")
    (tree / "pyproject.toml").touch()
    return Mutation("wrong", "own.py", "return 42", "return 41", ["tests/test_own.py"])


@pytest.mark.parametrize(
    ("quick", "by"),
    [("answer() == 42", "test_quick"), ("answer()", "test_nightly")],
    ids=["fails", "passes"],
)
def test_a_nightly_test_catches_what_make_test_misses(
    quick: str, by: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A nightly test that ran first was said to have caught what ``make test`` catches, too."""
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    tests = (
        "import pytest\n@pytest.mark.nightly\ndef test_nightly(): assert answer() == 42\n"
        f"def test_quick(): assert {quick}"
    )
    outcome = mutations.plant(wrong_answer(tmp_path, tests))
    assert outcome.verdict == mutations.CAUGHT
    assert outcome.by == f"tests/test_own.py::{by}"
    assert outcome.in_make_test == (by == "test_quick")


def test_a_test_on_ranks_depends_on_what_runs_ranks() -> None:
    file = "tests/parallel/test_keras_forward.py"
    helpers = ("conftest", "on_ranks", "rank_pytest", "rank_main", "keras_training")
    needed = {file, "tests/conftest.py", *(f"tests/parallel/{name}.py" for name in helpers)}
    assert needed <= mutations.modules_of(file)
    assert "tests/parallel/cases.py" not in mutations.modules_of(file)


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
