"""Checks of what planning is given: files, JSON objects, numbers; errors say which is wrong."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

__all__ = ["check_count", "check_keys", "check_number", "load_text", "read_object"]

T = TypeVar("T")


def load_text(path: str | os.PathLike[str], parse: Callable[[str], T], binary: str) -> T:
    """What ``parse`` makes of a file's text."""
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)}: {binary}") from error
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def read_object(
    text: str, schema: str, keys: Collection[str], optional: Collection[str] = ()
) -> dict[str, Any]:
    """The JSON object in a text, checked for its schema and its keys.

    Args:
        text: the JSON document.
        schema: what its ``"schema"`` must say, e.g. ``"hvd_pipe.plan/1"``.
        keys: the other keys that are required.
        optional: keys that may be there as well.

    Raises:
        ValueError: no JSON object, another schema, or keys that lack or are unknown.

    Example:
        >>> read_object('{"schema": "x/1", "size": 3}', "x/1", {"size"})
        {'schema': 'x/1', 'size': 3}
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is no JSON, so no {schema!r} either: {error}") from error
    if not isinstance(data, dict) or "schema" not in data:
        raise ValueError(f'this is no {schema!r}: expected a JSON object with a "schema" key')
    if data["schema"] != schema:
        raise ValueError(
            f"unknown schema {data['schema']!r}: this version of hvd_pipe reads {schema!r}; "
            "write the file again with the version at hand"
        )
    check_keys(data, {"schema", *keys}, f"a {schema!r}", optional)
    return data


def check_keys(
    data: Any, required: Collection[str], what: str, optional: Collection[str] = ()
) -> None:
    """ValueError unless ``data`` is an object with all required keys and no unknown ones."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} is a JSON object, got {type(data).__name__}")
    missing = sorted(set(required) - set(data))
    unknown = sorted(set(data) - set(required) - set(optional))
    if missing or unknown:
        raise ValueError(f"{what} lacks the keys {missing} and has the unknown keys {unknown}")


def check_number(name: str, value: Any, unit: str) -> float:
    """The number as a float; it must be finite and not negative."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
        raise TypeError(f"{name} must be a number ({unit}), got {value!r}")
    if not (math.isfinite(value) and value >= 0.0):
        raise ValueError(f"{name} must be finite and not negative ({unit}), got {value}")
    return float(value)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """TypeError or ValueError unless it is an int of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
