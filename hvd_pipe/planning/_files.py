"""The JSON objects that planning reads: a schema name, known keys, and errors that say which."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["check_keys", "read_object"]


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
