"""Gradients of a scaled loss (``torch.amp.GradScaler``): divide them, look for an overflow."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import torch

__all__ = ["are_finite", "read_by_grad_scaler", "unscale"]


def unscale(parameters: Sequence[torch.Tensor], scale: float) -> None:
    """Divide all gradients by ``scale``, in place."""
    gradients = [_dense(p.grad) for p in parameters if p.grad is not None]
    if scale != 1.0 and gradients:
        torch._foreach_mul_(gradients, 1.0 / scale)


def are_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Return whether no element is infinite or NaN; the host waits once for each device."""
    answers: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        answers.setdefault(gradient.device, []).append(torch.isfinite(_dense(gradient)).all())
    return all(bool(torch.stack(each).all()) for each in answers.values())


def read_by_grad_scaler() -> bool:
    """Return whether torch's GradScaler is reading the property that calls this.

    ``GradScaler.step`` reads ``_step_supports_amp_scaling`` just before it looks for an overflow,
    keeps what it has found to itself, and calls ``step()``. So gradients must be averaged at that
    read, or each rank would find another overflow and another scale. A debugger reads the same
    property, on one rank, and must not make it communicate.
    """
    reader = sys._getframe(2)
    return reader.f_globals.get("__name__") == torch.amp.GradScaler.__module__


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the gradient's numbers."""
    return gradient._values() if gradient.is_sparse else gradient
