"""Errors of hvd_pipe's own; wrong arguments raise plain ValueError and TypeError."""

import difflib
import numbers
import sys
from collections.abc import Iterable

__all__ = [
    "HvdPipeError",
    "RanksDisagreeError",
    "is_failing",
    "is_number",
    "nearest",
    "require_int",
    "require_one_of",
]


class HvdPipeError(RuntimeError):
    """Something that hvd_pipe cannot carry out; the message names the way out."""


class RanksDisagreeError(HvdPipeError):
    """Two workers came with different models, strategies or plans; raised on every worker."""


def is_failing() -> bool:
    """Whether this process handles an exception, or ends by one."""
    return getattr(sys, "last_value", None) is not None or sys.exc_info()[0] is not None


def require_int(owner: object, field: str, least: int) -> None:
    """Raise unless a field is an int of at least ``least``."""
    value = getattr(owner, field)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(owner).__name__}: {field} must be an int, got {value!r}.")
    if value < least:
        raise ValueError(f"{type(owner).__name__}: {field} must be >= {least}, got {value}.")


def require_one_of(owner: object, field: str, known: tuple[str, ...]) -> None:
    """Raise unless a field is one of the known words."""
    value = getattr(owner, field)
    if value not in known:
        raise ValueError(
            f"{type(owner).__name__}: {field} must be one of {', '.join(map(repr, known))}, got "
            f"{value!r}{nearest(str(value), known)}."
        )


def is_number(value: object) -> bool:
    """Whether a value is a real number; True and False are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a question for the known word that was meant, perhaps; else nothing.

    >>> nearest("pip-sgd", ["pipe-sgd", "cocod"])
    " (did you mean 'pipe-sgd'?)"
    """
    close = difflib.get_close_matches(word, list(known), 1, 0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
