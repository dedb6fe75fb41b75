"""Private names of Horovod, torch, Keras and TensorFlow: each has a row, and is looked for.

They were checked nowhere: with a release that lacks one, an import failed bare, or a step did.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hvd_pipe.runtime import private_names
from hvd_pipe.runtime.private_names import KNOWN_TO_WORK, ROWS, PrivateName

PACKAGE = Path(private_names.__file__).parents[1]
OF_PYTHON = {"_current_frames", "_exit", "_getframe", "_replace"}
PRIVATE = ("keras.src", "tensorflow.python")
TREES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
OURS = ("self", "cls")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def of_us() -> Iterator[str]:
    """The private members that classes of hvd_pipe define."""
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for member in node.body:
                    if isinstance(member, ast.FunctionDef):
                        yield member.name
                    elif isinstance(member, ast.AnnAssign | ast.Assign):
                        targets = getattr(member, "targets", [getattr(member, "target", None)])
                        yield from (each.id for each in targets if isinstance(each, ast.Name))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own = isinstance(node.value, ast.Name) and node.value.id in OURS
                if own or node.attr.startswith("_hvd_pipe"):
                    yield node.attr


def used(tree: ast.AST, ours: set[str]) -> Iterator[str]:
    """The private names of others in a module: attributes, imports, and words for getattr."""
    modules: dict[str, str] = {}  # a private module, by the name that it is imported under
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("hvd_pipe"):
            module = node.module or ""
            for alias in node.names:
                if module.startswith(PRIVATE) or any(map(is_private, module.split("."))):
                    modules[alias.name] = f"{module}.{alias.name}"
                if is_private(alias.name):
                    yield alias.name
    reached = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if (
                isinstance(node.value, ast.Name)
                and node.value.id in modules
                and node.value.id.islower()  # a module, and no class
            ):
                reached.add(node.value.id)
                yield node.attr
            if is_private(node.attr) and node.attr not in ours:
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            word = str(getattr(node.args[1], "value", ""))
            if is_private(word) and word not in ours:
                yield word
    for name in modules:
        if name not in reached:  # what is imported is the thing itself
            yield name


@pytest.fixture(scope="module")
def found() -> dict[str, set[str]]:
    """Each private name that hvd_pipe uses, with the modules that do."""
    ours, names = set(of_us()), {}
    for path, tree in TREES.items():
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for name in set(used(tree, ours)) - OF_PYTHON:
            names.setdefault(name, set()).add(module.removesuffix(".__init__"))
    return names


def test_every_private_name_in_the_sources_has_a_row(found: dict[str, set[str]]) -> None:
    known = {part for row in ROWS for part in row.name.split(".")} | {"_pytree"}
    new = {name: modules for name, modules in found.items() if name not in known}
    assert not new, f"add to hvd_pipe/runtime/private_names.py: {new}"


def test_every_function_that_is_surrounded_has_a_row() -> None:
    """These have no underscore; a release without one raised AttributeError at an optimizer."""
    calls = [node for tree in TREES.values() for node in ast.walk(tree)]
    calls = [node for node in calls if isinstance(node, ast.Call)]
    names = {
        str(node.args[1].value)
        for node in calls
        if ast.unparse(node.func).endswith("surround") and isinstance(node.args[1], ast.Constant)
    }
    assert names >= {"horovod_torch_join", "horovod_join", "horovod_shutdown"}
    known = {row.name.rpartition(".")[2] for row in ROWS}
    assert names | {"MPI_LIB_CTYPES", "horovod_init", "horovod_init_multi_comm"} <= known


def test_a_parameter_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its value is read in a running call of Horovod's, far from the import."""
    from horovod.torch import functions  # noqa: PLC0415 - only here

    def renamed(optimizer: object, root: int) -> None: ...

    monkeypatch.setattr(functions, "broadcast_optimizer_state", renamed)
    with pytest.raises(ImportError, match=r"functions\.broadcast_optimizer_state\.root_rank"):
        private_names.check("torch")


@pytest.mark.parametrize("row", sorted({(row.name, row.user) for row in ROWS}))
def test_every_row_is_needed(row: tuple[str, str]) -> None:
    name, user = row
    source = (PACKAGE / f"{user.replace('.', '/')}.py").read_text()
    assert name.rpartition(".")[2] in source


def test_a_new_private_name_is_found() -> None:
    source = (
        "from keras.src.models import functional\n"
        "from torch._utils import tidy\n"
        "functional.walk(model._secret)\n"
        "getattr(model, '_hidden', None)\n"
        "self._own\n"
    )
    names = set(used(ast.parse(source), {"_own"}))
    assert names == {"walk", "tidy", "_secret", "_hidden"}


@pytest.mark.parametrize("adapter", ["torch", "tensorflow"])
def test_all_are_there(adapter: str) -> None:
    importlib.import_module(f"hvd_pipe.{adapter}")
    private_names.check(adapter)


def test_every_library_has_a_version_that_is_known_to_work() -> None:
    assert {row.library for row in ROWS} == set(KNOWN_TO_WORK)


def test_a_name_that_is_gone_is_named_with_a_version_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from horovod.torch import mpi_ops  # noqa: PLC0415 - only here

    monkeypatch.delattr(mpi_ops, "_handle_map")
    monkeypatch.delattr(torch, "_foreach_sub_")
    with pytest.raises(ImportError) as refused:
        private_names.check("torch")
    text = str(refused.value)
    assert "hvd_pipe.torch relies on private names that horovod 0.28.1, torch" in text
    assert "horovod.torch.mpi_ops._handle_map (for hvd_pipe.torch.messages.pending)" in text
    assert "torch._foreach_sub_ (for hvd_pipe.torch.strategies.model_average)" in text
    assert "Known to work: horovod==0.28.1 torch==2.13.0" in text


@pytest.mark.parametrize(
    ("module", "name", "exists"),
    [
        ("torch", "_foreach_add_", True),
        ("torch", "_foreach_gone_", False),
        ("torch._no_such_module", "x", False),
        ("torch", "Tensor._no_such_member", False),
        ("torch", "NoSuchClass._member", False),
        ("torch.fx", "Graph._codegen", True),  # instances have it
        ("horovod.common.process_sets", "_basics", True),  # None until Horovod is initialised
    ],
)
def test_where_a_name_is_looked_for(module: str, name: str, exists: bool) -> None:
    assert PrivateName("torch", module, name, "torch").exists == exists


def test_the_adapter_says_so_at_its_import() -> None:
    """In a process of its own: the name goes before hvd_pipe.torch is imported."""
    program = (
        "import horovod.torch.mpi_ops as ops\n"
        "del ops._handle_map\n"
        "import hvd_pipe\n"
        "try:\n    import hvd_pipe.torch\n"
        "except ImportError as error:\n    print(error)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200
    )
    assert "horovod.torch.mpi_ops._handle_map" in answer.stdout
    assert "hvd-pipe build-horovod" in answer.stdout
