"""What users rely on, kept as JSON in ``data/frozen``: tests compare what they find with it.

Where a change is meant, one command rewrites the files, and the diff is what reviewers read::

    REWRITE_FROZEN=1 python -m pytest tests/single/test_public_api.py
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "FOLDER",
    "compare",
    "compare_numbers",
    "compare_types",
    "differences",
    "rewriting",
    "schema",
]

FOLDER = Path(__file__).parent / "data" / "frozen"
_REWRITE = "REWRITE_FROZEN"


def compare(name: str, found: Mapping[str, Any]) -> None:
    """Compare a mapping with the file ``name.json``, entry by entry.

    Raises:
        AssertionError: It is another; says what was removed, added and changed.
    """
    path = FOLDER / f"{name}.json"
    text = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if rewriting():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    expected = json.loads(path.read_text())
    given = json.loads(text)
    lines = [f"removed: {key} {expected[key]}" for key in expected if key not in given]
    lines += [f"added:   {key} {given[key]}" for key in given if key not in expected]
    lines += [
        f"changed: {key} {expected[key]}\n     to: {key} {given[key]}"
        for key in expected
        if key in given and given[key] != expected[key]
    ]
    assert not lines, _told(path, lines)


def compare_numbers(name: str, document: Mapping[str, Any]) -> None:
    """Compare a JSON document with the file ``name.json``; numbers may differ by rounding.

    Raises:
        AssertionError: A key is missing or new, or a value differs.
    """
    path = FOLDER / f"{name}.json"
    if rewriting():
        compare(name, document)
        return
    lines = differences(json.loads(path.read_text()), document)
    assert not lines, _told(path, lines)


def differences(expected: Any, found: Any) -> list[str]:
    """Say where two JSON documents differ by more than rounding."""
    return _differences(expected, found, "", _same)


def compare_types(name: str, document: Mapping[str, Any]) -> None:
    """Compare the keys and types of a JSON document with the file ``name.json``.

    What is null on some machines only, and lists that are empty there, make no difference.

    Raises:
        AssertionError: A key is missing or new, or a value has another type.
    """
    path = FOLDER / f"{name}.json"
    found = schema(document)
    if rewriting():
        compare(name, found)
        return
    lines = _differences(json.loads(path.read_text()), found, "", _fits)
    assert not lines, _told(path, lines)


def rewriting() -> bool:
    """Return whether the files are to be rewritten."""
    return bool(os.environ.get(_REWRITE))


def schema(value: Any) -> Any:
    """Return the types of a JSON value: mappings by key, lists as one element that fits all.

    >>> schema({"a": 1, "b": [{"c": None}, {"c": 2.5}], "d": []})
    {'a': 'number', 'b': [{'c': 'null|number'}], 'd': []}
    """
    if isinstance(value, Mapping):
        return {key: schema(item) for key, item in value.items()}
    if isinstance(value, list):
        merged: Any = None
        for item in value:
            merged = schema(item) if merged is None else _merge(merged, schema(item))
        return [] if merged is None else [merged]
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "string" if isinstance(value, str) else "number"


def _merge(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            key: _merge(one[key], other[key])
            if key in one and key in other
            else _merge("absent", one[key] if key in one else other[key])
            for key in [*one, *(key for key in other if key not in one)]
        }
    if isinstance(one, list) and isinstance(other, list):
        return [_merge(one[0], other[0])] if one and other else one or other
    if isinstance(one, str) and isinstance(other, str):
        return "|".join(sorted({*one.split("|"), *other.split("|")}))
    return one if one == other else {"any of": [one, other]}


def _differences(
    expected: Any, found: Any, where: str, same: Callable[[Any, Any], bool]
) -> list[str]:
    if isinstance(expected, dict) and isinstance(found, dict):
        lines = [f"removed: {where}{key}" for key in expected if key not in found]
        lines += [f"added:   {where}{key}" for key in found if key not in expected]
        for key in expected:
            if key in found:
                lines += _differences(expected[key], found[key], f"{where}{key}.", same)
        return lines
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        lines = []
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            lines += _differences(one, other, f"{where}{index}.", same)
        return lines
    if same(expected, found):
        return []
    return [f"changed: {where.rstrip('.')} {expected}\n     to: {found}"]


def _same(expected: Any, found: Any) -> bool:
    numbers = (int, float)
    if isinstance(expected, numbers) and isinstance(found, numbers):
        kinds = isinstance(expected, bool) == isinstance(found, bool)
        return kinds and math.isclose(expected, found, rel_tol=1e-9, abs_tol=1e-15)
    return type(expected) is type(found) and bool(expected == found)


def _fits(expected: Any, found: Any) -> bool:
    if isinstance(expected, str) and isinstance(found, str):
        return set(found.split("|")) <= {*expected.split("|"), "null"}
    return found in ([], "null") or expected == []


def _told(path: Path, lines: list[str]) -> str:
    return "\n".join(
        [
            f"users rely on what data/frozen/{path.relative_to(FOLDER)} lists, and this differs:",
            *lines,
            f"If the change is meant: {_REWRITE}=1 and this test once more rewrite the file.",
        ]
    )
