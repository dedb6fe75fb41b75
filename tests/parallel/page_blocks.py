"""Run a Python block of a page, on a rank: see `workers_pages` and `workers_keras_pages`."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from contextlib import chdir
from typing import Any

Names = dict[str, Any]


def _nothing(_names: Names) -> None:
    pass


def execute(text: str, names: Names, training: Callable[[Names], object] = _nothing) -> Names:
    """Run a block in a folder of its own, and return the names that it leaves."""
    code = re.sub(r"^( *)\.\.\.( .*)?$", r"\1_training()", text, flags=re.MULTILINE)
    left = {**names, "_training": lambda: training(left)}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        exec(compile(code, "<page>", "exec"), left)  # our own pages
    return left
