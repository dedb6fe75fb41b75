"""The errors that are hvd_pipe's own; wrong arguments raise plain ValueError and TypeError."""

import sys

__all__ = ["HvdPipeError", "RanksDisagreeError", "is_failing"]


class HvdPipeError(RuntimeError):
    """Something that hvd_pipe cannot carry out; the message names the way out."""


class RanksDisagreeError(HvdPipeError):
    """Two workers came with different models, strategies or plans; raised on every worker."""


def is_failing() -> bool:
    """Whether this process handles an exception, or ends by one."""
    return getattr(sys, "last_value", None) is not None or sys.exc_info()[0] is not None
