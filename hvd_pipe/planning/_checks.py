"""Checks of what planning is given: files, JSON objects, numbers; errors say which is wrong."""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import UnionType
from typing import (
    Any,
    ClassVar,
    Self,
    SupportsIndex,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

T = TypeVar("T")


class Document:
    """A dataclass that is kept in a file as a JSON document."""

    _BINARY: ClassVar[str]

    def to_json(self) -> str:
        """A JSON document; :meth:`from_json` reads it back exactly."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What a JSON document holds; ValueError says what is wrong in it."""
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_json` to a file."""
        Path(path).write_text(self.to_json().rstrip("\n") + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """What a file that :meth:`save` wrote holds; ValueError names the file."""
        return load_text(path, cls.from_json, cls._BINARY)


def read_fields(
    cls: Callable[..., T], data: Mapping[str, Any], words: Mapping[str, str], where: str = ""
) -> T:
    """The dataclass whose fields a JSON object has; ValueError says which has another type."""
    values = {}
    for name, hint in get_type_hints(cls).items():
        if name in data:
            try:
                values[name] = _read(hint, data[name])
            except (TypeError, ValueError):
                null = " or null" if type(None) in get_args(hint) else ""
                kinds = {float: "a number of seconds", str: "a string", bool: "true or false"}
                kind = next(
                    (kinds[k] for k in kinds if k in (hint, *get_args(hint))), "an integer"
                )
                kind = words.get(name, kind) + null
                raise ValueError(f'{where}"{name}" is {kind}, got {data[name]!r}') from None
    return cls(**values)


def _read(hint: Any, value: Any) -> Any:
    """The value of a field; TypeError or ValueError where it has another type."""
    inner = get_args(hint)
    if get_origin(hint) is UnionType:
        return None if value is None else _read(inner[0], value)
    if isinstance(value, tuple):  # which JSON does not know: it was read before
        return value
    if get_origin(hint) is tuple and isinstance(value, list):
        if inner[-1] is not ...:
            return tuple(_read(*pair) for pair in zip(inner, value, strict=True))
        return tuple(_read(inner[0], item) for item in value)
    if isinstance(hint, type) and type(value) in ((int, float) if hint is float else (hint,)):
        return value
    raise TypeError(hint)


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
    """The JSON object in a text, checked for its schema and its keys."""
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


def check_integer(name: str, value: object, least: int = 1) -> None:
    """TypeError or ValueError unless it is an integer, of numpy too, of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if operator.index(value) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_finite(name: str, value: object, positive: bool = False) -> None:
    """TypeError or ValueError unless it is a finite number of at least 0, or above."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ValueError(
            f"{name} must be finite and {'above' if positive else 'at least'} 0, got {value}"
        )
