"""Gradients of a scaled loss: what ``torch.amp.GradScaler`` leaves to the optimizer.

Each rank alone would find another overflow, and so another scale. So the ranks' gradients are
averaged before the scaler looks at them, and the optimizer leaves the update out where the average
has overflowed.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.torch.agree import largest
from hvd_pipe.torch.parameters import are_finite, unscale
from hvd_pipe.torch.strategies.base import Engine

__all__ = [
    "LossScale",
    "check_loss_scale",
    "forget_scaler",
    "is_scaled",
    "read_by_grad_scaler",
    "refuse_other",
]


def check_loss_scale(loss_scale: float | None) -> None:
    """Raise unless ``synchronize(loss_scale=...)`` was given a scale, or none."""
    if loss_scale is not None and not 0.0 < float(loss_scale) < math.inf:
        raise ValueError(
            f"loss_scale must be a number above 0, got {loss_scale!r}: pass scaler.get_scale()."
        )


def is_scaled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a gradient scaler is calling ``step()``: it has left its findings here."""
    return "found_inf" in optimizer.__dict__


def refuse_other() -> None:
    """Refuse a scaler that has looked at gradients before they were averaged."""
    raise HvdPipeError(
        "a gradient scaler that is not torch.amp.GradScaler has looked at gradients that "
        "were not averaged: call optimizer.synchronize(loss_scale=scaler.get_scale()) "
        "after backward(), and scaler.step(optimizer) inside "
        "`with optimizer.skip_synchronize():`."
    )


@dataclass
class LossScale:
    """What is known of the loss scale in the coming step.

    Args:
        given: What the user has passed to ``synchronize()``.
        averaged_for_scaler: Whether gradients were averaged because the scaler was about to look.
    """

    given: float | None = None
    averaged_for_scaler: bool = False

    def clear(self) -> None:
        """Begin another step."""
        self.given, self.averaged_for_scaler = None, False

    def take(self, scale: float, engine: Engine) -> None:
        """Take the scale of gradients that `synchronize` has prepared, before they are unscaled.

        The user divides by this scale. Pipe-SGD's gradients may have been computed under another.
        """
        self.given = scale
        _agree_on_overflow(engine)
        engine.note_scale(scale)
        due = engine.gradient_scale
        if due is not None and due != scale:
            unscale(engine.settings.parameters, due / scale)

    def average_for_scaler(self, engine: Engine) -> None:
        """Average the gradients now, as the scaler looks at them next."""
        if not engine.synchronized:
            self.averaged_for_scaler = True
            engine.prepare_now()
            _agree_on_overflow(engine)

    def unscale(self, optimizer: torch.optim.Optimizer, engine: Engine) -> bool:
        """Divide the gradients by their scale in the scaler's place; False on an overflow."""
        scale: torch.Tensor | None = optimizer.__dict__["grad_scale"]
        found_inf: torch.Tensor = optimizer.__dict__["found_inf"]
        if scale is None:
            self._check_given(engine)
        # An optimizer that knows of scales (fused=True) must not divide once more.
        optimizer.__dict__.update(grad_scale=None, found_inf=None)
        if scale is not None:
            engine.note_scale(float(scale))
        if float(found_inf) != 0.0:
            return False
        if scale is not None:
            due = engine.gradient_scale
            unscale(engine.settings.parameters, float(scale) if due is None else due)
        return True

    def _check_given(self, engine: Engine) -> None:
        """Raise where the user's ``scaler.unscale_`` has divided gradients of an unknown scale."""
        if self.averaged_for_scaler:
            raise HvdPipeError(
                "scaler.unscale_(optimizer) came before the gradients were averaged: call "
                "optimizer.synchronize(loss_scale=scaler.get_scale()) after backward() and "
                "before unscale_, and scaler.step(optimizer) inside "
                "`with optimizer.skip_synchronize():`."
            )
        if engine.needs_loss_scale and self.given is None:
            raise HvdPipeError(
                "with scaler.unscale_() this strategy must know the loss scale: call "
                "optimizer.synchronize(loss_scale=scaler.get_scale()) before unscale_."
            )


def _agree_on_overflow(engine: Engine) -> None:
    """Let all ranks find a gradient that is not finite where one of them has.

    An average is as finite on one rank as on all. Gradients that stay local are not, and
    GradScaler, which looks at them, must come to the same scale and the same steps everywhere.
    """
    if engine.is_averaged or engine.reduction.alone:
        return
    gradients = [p.grad for p in engine.settings.parameters if p.grad is not None]
    tag, process_set = f"{engine.settings.tag}.overflow", engine.reduction.process_set
    if largest([float(not are_finite(gradients))], tag, process_set) == [1.0]:
        for gradient in gradients:
            gradient.mul_(torch.inf)


def forget_scaler(optimizer: torch.optim.Optimizer) -> None:
    """Remove a scaler's findings where ``step()`` fails: the scaler does so where it returns.

    Else the next step would multiply by them.
    """
    attributes: dict[str, Any] = optimizer.__dict__
    attributes.pop("grad_scale", None)
    attributes.pop("found_inf", None)


def read_by_grad_scaler() -> bool:
    """Return whether torch's GradScaler is reading the property that calls this.

    ``GradScaler.step`` reads ``_step_supports_amp_scaling`` just before it looks for an overflow,
    keeps what it has found to itself, and calls ``step()``. So gradients must be averaged at that
    read, or each rank would find another overflow and another scale. A debugger reads the same
    property, on one rank, and must not make it communicate.
    """
    reader = sys._getframe(2)
    return reader.f_globals.get("__name__") == torch.amp.GradScaler.__module__
