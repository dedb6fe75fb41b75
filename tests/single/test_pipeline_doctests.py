"""The examples of pipelines and of planning run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import hvd_pipe
from hvd_pipe.planning.schedule import brief

ROOT = Path(hvd_pipe.__file__).parent
FILES = ("planning/*.py", "pipeline/*.py", "*/pipedream/[!p]*.py", "units.py")
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for files in FILES
    for path in ROOT.glob(files)
    if ">>>" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(f"hvd_pipe.{name}")
    found = doctest.testmod(module, extraglobs={"brief": brief}, optionflags=doctest.ELLIPSIS)
    assert found.attempted
    assert not found.failed
