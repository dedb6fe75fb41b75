"""docs/architecture.md: the code cites the numbers of its diagrams, each at the function named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"

STEP = re.compile(r"^[ |]*([GPFKD]\d+) +(\S+\.py) +([\w.]+)", re.MULTILINE)
CITATION = re.compile(r"^ *# Architecture: ([GPFKD]\d+(?:, [GPFKD]\d+)*)$")

Steps = set[tuple[str, str, str]]


def _drawn() -> Steps:
    return set(STEP.findall(PAGE.read_text(encoding="utf-8")))


def _cited() -> Steps:
    found: Steps = set()
    for path in sorted((ROOT / "hvd_pipe").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "# Architecture: " not in text:
            continue
        functions = _functions(ast.parse(text))
        for number, line in enumerate(text.splitlines(), 1):
            match = CITATION.match(line)
            if match:
                name = functions.get(number + 1, "no function below the comment")
                file = path.relative_to(ROOT / "hvd_pipe").as_posix()
                found.update((step, file, name) for step in match[1].split(", "))
    return found


def _functions(tree: ast.AST, prefix: str = "") -> dict[int, str]:
    """Return the qualified names of functions by the line at which they or decorators begin."""
    found: dict[int, str] = {}
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = f"{prefix}{node.name}."
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if isinstance(node, ast.FunctionDef):
                found[first] = f"{prefix}{node.name}"
        found.update(_functions(node, inner))
    return found


def test_the_code_cites_each_step_where_the_page_says() -> None:
    drawn, cited = _drawn(), _cited()
    assert drawn
    assert cited == drawn


def test_steps_are_numbered_without_gaps() -> None:
    numbers: dict[str, set[int]] = {}
    for step, _, _ in _drawn():
        numbers.setdefault(step[0], set()).add(int(step[1:]))
    assert sorted(numbers) == ["D", "F", "G", "K", "P"]
    assert all(found == set(range(1, len(found) + 1)) for found in numbers.values())
