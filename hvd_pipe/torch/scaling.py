"""Gradients of a scaled loss (``torch.amp.GradScaler``): divide them, look for an overflow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

__all__ = ["are_finite", "unscale"]


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


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the gradient's numbers."""
    return gradient._values() if gradient.is_sparse else gradient
