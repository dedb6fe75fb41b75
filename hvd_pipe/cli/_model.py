"""Find and make the model that the command line names, and describe its inputs."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hvd_pipe.cli.output import InputError

__all__ = ["Shape", "error_text", "find", "made"]

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")
_SHAPE = re.compile(r"(?P<sizes>[1-9][0-9]*(,[1-9][0-9]*)*)(:(?P<dtype>\w+))?")


@dataclass(frozen=True)
class Shape:
    """One input of a model: ``32,3,224,224`` or ``32,128:int64``.

    It is made of normal numbers, or of zeros and ones where it has integers, which are indices of
    every embedding and classes of every task with two.

    Example:
        >>> Shape.parse("32,128:int64").sizes
        (32, 128)
    """

    text: str
    sizes: tuple[int, ...]
    dtype: str

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read one; ValueError says what is accepted."""
        match = _SHAPE.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"--input takes sizes and perhaps a dtype, 32,3,224,224 or 32,128:int64; "
                f"got {text!r}"
            )
        name = match["dtype"] or "float32"
        if name not in DTYPES:
            raise ValueError(f"--input {text}: the dtype is one of {', '.join(DTYPES)}")
        return cls(text, tuple(map(int, match["sizes"].split(","))), name)


def made(name: str) -> Any:
    """Return what the factory that ``name`` names makes."""
    factory = find(name)
    try:
        return factory()
    except Exception as error:
        raise InputError(
            f"{name}() failed: {error_text(error)}; it is called without arguments"
        ) from error


def find(name: str) -> Callable[..., Any]:
    """Return what ``package.module:attribute`` or ``file.py:attribute`` names."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise InputError(f"{name!r} is no module:name: write package.module:name or file.py:name")
    module = _module(where)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            callables = [
                key
                for key, value in vars(module).items()
                if callable(value) and getattr(value, "__module__", "") == module.__name__
            ]
            has = f"; it has {', '.join(callables[:8])}" if callables else ""
            raise InputError(f"{where} has no {attribute}{has}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{name} is {type(found).__name__}, not a function or class to call")
    return found  # type: ignore[no-any-return]


def _module(where: str) -> ModuleType:
    path = Path(where)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise InputError(f"{where}: No such file")
    # A console script does not look for modules here, as `python -m` would.
    sys.path.insert(0, str(path.parent.resolve() if is_file else Path.cwd()))
    try:
        if not is_file:
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"importing {where} failed: {error_text(error)}") from error
    return module


def error_text(error: BaseException) -> str:
    """Return an error's kind and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"
