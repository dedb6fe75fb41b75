"""How the modules of hvd_pipe hang together, and how large they are.

Imports are read from the sources, so nothing is imported here. What `if TYPE_CHECKING:` holds is
no import. A lazy import is one inside of a function.

The limits are a ratchet: each holds now, and may only be lowered.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "hvd_pipe").rglob("*.py"))

MAX_FILE_LINES = 700  # where a file is one idea
MAX_FUNCTION_LINES = 60  # without its docstring
MAX_FLOORS = 7  # of hvd_pipe.torch, from one of its strategies down

# Lazy imports that close a circle, as (importer, imported), and why each has to. Better none.
LAZY_CIRCLES: dict[tuple[str, str], str] = {}

Graph = dict[str, set[str]]


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path): path for path in SOURCES}
FRAMEWORKS = ("horovod", "torch", "tensorflow", "keras")


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(node: ast.AST, *, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run with a module, or (lazy) those in its functions as well."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _imports(ast.Module(child.orelse, []), lazy=lazy)
        elif lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _imports(child, lazy=lazy)


def _imported(module: str, *, lazy: bool) -> set[str]:
    """Return the full names of what a module imports; of `from a import b`, a.b if a module."""
    found: set[str] = set()
    for node in _imports(_tree(MODULES[module]), lazy=lazy):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
            continue
        assert not node.level, f"{module}: relative imports hide which module is meant"
        assert node.module is not None
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            found.add(inner if inner in MODULES else node.module)
    return found - {module}


@functools.cache
def _graph(*, lazy: bool) -> Graph:
    return {module: _imported(module, lazy=lazy) & set(MODULES) for module in MODULES}


def _circle(graph: Graph) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # each imports the next
    return []


def test_a_circle_is_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def test_lazy_imports_are_told_apart() -> None:
    source = (
        "import a\n"
        "if TYPE_CHECKING:\n    import b\nelse:\n    import c\n"
        "class C:\n    import d\n    def f(self):\n        import e\n"
    )
    names = {
        lazy: [node.names[0].name for node in _imports(ast.parse(source), lazy=lazy)]
        for lazy in (False, True)
    }
    assert names == {False: ["a", "c", "d"], True: ["a", "c", "d", "e"]}


def test_no_import_circle() -> None:
    circle = _circle(_graph(lazy=False))
    assert not circle, " -> ".join(circle)


def test_no_circle_of_lazy_imports() -> None:
    graph = {
        module: {other for other in others if (module, other) not in LAZY_CIRCLES}
        for module, others in _graph(lazy=True).items()
    }
    circle = _circle(graph)
    assert not circle, " -> ".join(circle)


def test_planning_imports_no_framework() -> None:
    for module in MODULES:
        if module.startswith("hvd_pipe.planning"):
            names = {name.partition(".")[0] for name in _imported(module, lazy=True)}
            assert not names & set(FRAMEWORKS), module


def test_measuring_needs_no_horovod() -> None:
    """So `hvd-pipe check` works where Horovod is not built yet."""
    for module in ("hvd_pipe.cli.check", "hvd_pipe.measuring.script"):
        for name in _needed(module):
            assert not name.startswith(("horovod", "hvd_pipe.torch", "hvd_pipe.tensorflow")), name


def _needed(module: str) -> set[str]:
    """Return what a module imports, and what the modules that it imports do."""
    names, new = set[str](), {module}
    while new:
        names |= new
        new = set[str]().union(*(_imported(x, lazy=False) for x in new & set(MODULES))) - names
    return names


def test_the_root_imports_a_plan_alone_of_planning() -> None:
    """Planning may import what lies beside it, so these may not import planning: but its leaf."""
    for module in ("hvd_pipe.strategy", "hvd_pipe.units", "hvd_pipe.timeline", "hvd_pipe.errors"):
        found = {name for name in _imported(module, lazy=True) if "hvd_pipe.planning" in name}
        assert found <= {"hvd_pipe.planning.plan"}, module
    below = _imported("hvd_pipe.planning.plan", lazy=True) & set(MODULES)
    assert below == {"hvd_pipe.planning._checks"}


ROOMS = {
    "cli": 4,
    "torch": 3,
    "tensorflow": 3,
    "measuring": 2,
    "pipeline": 2,
    "runtime": 1,
    "planning": 0,
}
"""The rooms and the storeys on which they are; see docs/architecture.md."""


def test_rooms_import_only_rooms_further_down() -> None:
    for module in MODULES:
        room = module.split(".")[1] if module.count(".") else ""
        for other in _imported(module, lazy=True) & set(MODULES):
            below = other.split(".")[1] if other.count(".") else ""
            if room != below and below in ROOMS and other != "hvd_pipe.planning.plan":
                allowed = room in ROOMS and ROOMS[below] < ROOMS[room]
                assert allowed or module == "hvd_pipe.__main__", (module, other)


@pytest.mark.parametrize(("ours", "other"), [("torch", "tensorflow"), ("tensorflow", "torch")])
def test_frameworks_do_not_meet(ours: str, other: str) -> None:
    allowed = {"tensorflow": {"tensorflow", "keras", "horovod.tensorflow", "hvd_pipe.tensorflow"}}
    names = allowed.get(other, {"torch", "horovod.torch", "hvd_pipe.torch"})
    for module in MODULES:
        if module.startswith(f"hvd_pipe.{ours}"):
            for name in _imported(module, lazy=True):
                assert not any(f"{name}.".startswith(f"{each}.") for each in names), (module, name)


def test_files_are_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert not {path.name: n for path, n in lines.items() if n > MAX_FILE_LINES}


def test_functions_are_short() -> None:
    long = {}
    for module, path in MODULES.items():
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = _lines(node)
                if size > MAX_FUNCTION_LINES:
                    long[f"{module}.{node.name}"] = size
    assert not long


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count a function's lines from `def` on, without its docstring."""
    assert function.end_lineno is not None
    size = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        assert docstring.end_lineno is not None
        size -= docstring.end_lineno - docstring.lineno + 1
    return size


def test_floors_below_a_strategy_of_torch() -> None:
    """A strategy stands on modules of `hvd_pipe.torch`, these on others: at most so many."""
    graph = _graph(lazy=False)

    @functools.cache
    def chain(module: str) -> tuple[str, ...]:
        below = [chain(other) for other in graph[module] if other.startswith("hvd_pipe.torch.")]
        return (module, *max(below, key=len, default=()))

    strategies = [name for name in MODULES if name.startswith("hvd_pipe.torch.strategies.")]
    assert strategies
    longest = max(map(chain, strategies), key=len)
    assert len(longest) <= MAX_FLOORS, " -> ".join(longest)
