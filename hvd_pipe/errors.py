"""Errors of hvd_pipe's own; wrong arguments raise plain ValueError and TypeError."""

import sys

__all__ = ["HvdPipeError", "RanksDisagreeError", "is_failing", "require_int"]


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
