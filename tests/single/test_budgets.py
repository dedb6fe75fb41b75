"""The size of the repository: a budget for each room, which may only be lowered.

``pytest -s tests/single/test_budgets.py`` prints the table. *Code* is what is left of a Python
file without docstrings, comments, blank lines and imports. Long lines, several statements in one
line, and Python in files of another kind would hide code, so the linter and a test below refuse
them.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Size(NamedTuple):
    """How much a room has, or may have."""

    files: int
    lines: int
    code: int
    functions: int
    branches: int

    def plus(self, other: Size) -> Size:
        return Size(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Room:
    """Files of the repository, and their budget.

    Args:
        folders: Where they are; the last room that has a file's folder counts it.
        suffixes: Which files count.
        budget: The most that they may have.
    """

    folders: tuple[str, ...]
    suffixes: tuple[str, ...]
    budget: Size


BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.While,
    ast.ExceptHandler,
    ast.match_case,
    ast.comprehension,
)

PYTHON = (".py",)
TEXT = (".py", ".sh", ".toml", ".cfg", ".patch", ".md", ".yaml")

ROOMS = {
    "hvd_pipe/*.py": Room(("hvd_pipe",), PYTHON, Size(9, 1360, 770, 60, 260)),
    "build_horovod": Room(("hvd_pipe/build_horovod",), TEXT, Size(12, 870, 360, 30, 90)),
    "cli": Room(("hvd_pipe/cli",), PYTHON, Size(14, 2920, 2080, 140, 540)),
    "measuring": Room(("hvd_pipe/measuring",), PYTHON, Size(5, 620, 390, 50, 110)),
    "pipeline": Room(("hvd_pipe/pipeline",), PYTHON, Size(13, 2400, 1490, 160, 300)),
    "planning": Room(("hvd_pipe/planning",), PYTHON, Size(23, 7540, 4650, 350, 1230)),
    "runtime": Room(("hvd_pipe/runtime",), PYTHON, Size(18, 2870, 1730, 200, 470)),
    "tensorflow": Room(("hvd_pipe/tensorflow",), PYTHON, Size(36, 7140, 4310, 470, 1180)),
    "tensorflow/pipedream": Room(
        ("hvd_pipe/tensorflow/pipedream",), PYTHON, Size(8, 1680, 1050, 110, 270)
    ),
    "torch": Room(("hvd_pipe/torch",), PYTHON, Size(42, 10_110, 6480, 750, 1840)),
    "torch/pipedream": Room(("hvd_pipe/torch/pipedream",), PYTHON, Size(11, 2500, 1640, 160, 540)),
    "tests": Room(("tests",), (".py", ".toml"), Size(232, 46_020, 29_580, 3050, 4280)),
    "benchmarks, docker": Room(("benchmarks", "docker"), TEXT, Size(46, 9050, 5950, 510, 1300)),
    "examples": Room(("torch_examples", "tf_examples"), PYTHON, Size(26, 3500, 2260, 190, 310)),
}
PAGES = 36
ALL_PYTHON = 97_000


@cache
def tracked() -> tuple[str, ...]:
    """Return the files that git knows, but for those that are deleted here."""
    listed = subprocess.run(
        ["git", "ls-files"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return tuple(path for path in listed if (ROOT / path).is_file())


@cache
def size_of(path: str) -> Size:
    """Return the size of one file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.count("\n")
    if not path.endswith(".py"):
        return Size(1, lines, 0, 0, 0)
    tree = ast.parse(text)
    functions = branches = 0
    code = set(range(1, lines + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions += 1
        elif isinstance(node, BRANCHES):
            branches += 1
        elif isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
        elif isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            assert isinstance(node, ast.stmt)
            assert node.end_lineno is not None
            code -= set(range(node.lineno, node.end_lineno + 1))
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            code.discard(number)
    return Size(1, lines, len(code), functions, branches)


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def room_of(path: str) -> str | None:
    """Return the room that has a file: the one with the longest folder."""
    candidates = [
        (len(folder), name)
        for name, room in ROOMS.items()
        for folder in room.folders
        if path.startswith(f"{folder}/") and path.endswith(room.suffixes)
    ]
    return max(candidates)[1] if candidates else None


@cache
def sizes() -> dict[str, Size]:
    """Return the size of each room."""
    total = dict.fromkeys(ROOMS, Size(0, 0, 0, 0, 0))
    for path in tracked():
        room = room_of(path)
        if room is not None:
            total[room] = total[room].plus(size_of(path))
    return total


def table(rows: Iterable[tuple[str, Size]]) -> str:
    """Return the sizes as a Markdown table."""
    head = f"| room | {' | '.join(Size._fields)} |\n| --- | {' | '.join(['--:'] * 5)} |"
    lines = [f"| {name} | {' | '.join(f'{n:,}' for n in size)} |" for name, size in rows]
    return "\n".join([head, *lines])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_keeps_its_budget(room: str) -> None:
    size, budget = sizes()[room], ROOMS[room].budget
    over = {
        field: f"{n} of {most}"
        for field, n, most in zip(Size._fields, size, budget, strict=True)
        if n > most
    }
    assert not over, f"{room}: merge or delete something; a budget is not raised"


def test_the_repository_keeps_its_budget() -> None:
    package = Size(0, 0, 0, 0, 0)
    for name, size in sizes().items():
        if ROOMS[name].folders[0].startswith("hvd_pipe"):
            package = package.plus(size)
    print(f"\n{table([*sizes().items(), ('hvd_pipe, all of it', package)])}")
    pages = [path for path in tracked() if path.startswith("docs/") and path.endswith(".md")]
    python = sum(size_of(path).lines for path in tracked() if path.endswith(".py"))
    print(f"pages: {len(pages)}; lines of Python in the repository: {python:,}")
    assert len(pages) <= PAGES
    assert python <= ALL_PYTHON


def test_no_python_hides_in_other_files() -> None:
    """Templates and data have no functions."""
    hidden = {
        path
        for path in tracked()
        if path.endswith((".txt", ".json", ".in", ".tmpl", ".pyi", ".csv"))
        and "\ndef " in (ROOT / path).read_text(encoding="utf-8", errors="replace")
    }
    assert not hidden
