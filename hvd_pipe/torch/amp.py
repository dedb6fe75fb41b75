"""The part that ``torch.amp.GradScaler`` leaves to the optimizer: unscale, find an overflow."""

from __future__ import annotations

import sys

import torch

__all__ = ["read_by_grad_scaler"]


def read_by_grad_scaler() -> bool:
    """Return whether torch's GradScaler is reading the property that calls this.

    ``GradScaler.step`` reads ``_step_supports_amp_scaling`` just before it looks for an overflow,
    keeps what it has found to itself, and calls ``step()``. So gradients must be averaged at that
    read, or each rank would find another overflow and another scale. A debugger reads the same
    property, on one rank, and must not make it communicate.
    """
    reader = sys._getframe(2)
    return reader.f_globals.get("__name__") == torch.amp.GradScaler.__module__
