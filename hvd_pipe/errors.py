"""The errors that are hvd_pipe's own; wrong arguments raise plain ValueError and TypeError."""

__all__ = ["HvdPipeError", "RanksDisagreeError"]


class HvdPipeError(RuntimeError):
    """Something that hvd_pipe cannot carry out; the message names the way out."""


class RanksDisagreeError(HvdPipeError):
    """Two workers came with different models, strategies or plans; raised on every worker."""
