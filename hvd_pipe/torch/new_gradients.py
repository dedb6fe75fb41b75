"""Which gradients are new: hooks tell of those that backward() computes, and of no others.

Users set gradients by hand, too: ``p.grad = g`` or ``p.grad.copy_(g)``, with g from
``torch.autograd.grad``. So what ``p.grad`` is after a step is remembered, as an object and its
version, and compared::

    another tensor                            new
    the same one, written to, not all zero    new
    the same one, written to, all zero        cleared: zero_grad(set_to_none=False)
    the same one, or None                     nothing new

A write by ``p.grad.data`` counts no version, and so cannot be seen. Gradients of one bucket share
their version: a write to one of them is one to all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

__all__ = ["NewGradients", "is_zero"]


class NewGradients:
    """Tells gradients that wait to be applied from those that were applied, or dropped."""

    def __init__(self) -> None:
        self._old: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def note_old(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take what is in ``p.grad`` now for old."""
        self._old = {
            id(p): (weakref.ref(p.grad), p.grad._version) for p in parameters if p.grad is not None
        }

    def any_new(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Return whether any gradient is new."""
        return any(self._is_new(parameter) for parameter in parameters)

    def _is_new(self, parameter: torch.Tensor) -> bool:
        gradient, old = parameter.grad, self._old.get(id(parameter))
        if gradient is None:
            return False
        if old is None or old[0]() is not gradient:
            return True
        return gradient._version != old[1] and not is_zero(gradient)


def is_zero(gradient: torch.Tensor) -> bool:
    """Return whether all elements are zero."""
    values = gradient._values() if gradient.is_sparse else gradient
    return not bool(values.any())
