"""Gradients of a scaled loss: what ``torch.amp.GradScaler`` leaves to the optimizer.

Local gradients may overflow on one rank alone. But gradients that are being averaged are pending:
the function by which GradScaler checks them reads their averages, which overflow on all ranks or
on none. Where gradients stay local (CoCoD), a rank with an overflow leaves its local step out, and
counts it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.torch.parameters import unscale
from hvd_pipe.torch.strategies.base import Engine


def check_loss_scale(loss_scale: float | None) -> None:
    """Raise unless ``synchronize(loss_scale=...)`` was given a scale, or none."""
    if loss_scale is not None and not 0.0 < float(loss_scale) < math.inf:
        raise ValueError(
            f"loss_scale must be a number above 0, got {loss_scale!r}: pass scaler.get_scale()."
        )


def is_scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a gradient scaler is calling ``step()``: it has set ``found_inf`` before."""
    return "found_inf" in optimizer.__dict__


def scale_of(optimizer: torch.optim.Optimizer, func: Any, args: tuple[Any, ...]) -> float | None:
    """Return the scale by which this function divides gradients; None where it only looks."""
    if func is not torch._amp_foreach_non_finite_check_and_unscale_:
        return None
    inverse = float(args[2])
    looks_only = inverse == 1.0 and optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]
    return None if looks_only else 1.0 / inverse


def note_scale(scale: float, engine: Engine) -> None:
    """Record the scale by which the user divides gradients; Pipe-SGD's may have another one."""
    engine.note_scale(scale)
    gradient_scale = engine.gradient_scale
    if gradient_scale is not None and gradient_scale != scale:
        unscale(engine.settings.parameters, gradient_scale / scale)


def unscale_in_step(optimizer: torch.optim.Optimizer, engine: Engine, given: float | None) -> bool:
    """Divide the gradients by their scale in the scaler's place; False on an overflow."""
    scale: torch.Tensor | None = optimizer.__dict__["grad_scale"]
    found_inf: torch.Tensor = optimizer.__dict__["found_inf"]
    if scale is None and engine.needs_loss_scale and given is None:
        raise HvdPipeError(
            "with scaler.unscale_() this strategy must know the loss scale: call "
            "optimizer.synchronize(loss_scale=scaler.get_scale()) before unscale_."
        )
    # An optimizer that knows of scales (fused=True) must not divide once more.
    optimizer.__dict__.update(grad_scale=None, found_inf=None)
    if scale is not None:
        engine.note_scale(float(scale))
    if float(found_inf) != 0.0:
        return False
    if scale is not None:
        own_scale = engine.gradient_scale
        unscale(engine.settings.parameters, float(scale) if own_scale is None else own_scale)
    return True


def forget_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Remove a scaler's findings where ``step()`` fails: the next one would multiply by them."""
    attributes: dict[str, Any] = optimizer.__dict__
    attributes.pop("grad_scale", None)
    attributes.pop("found_inf", None)
