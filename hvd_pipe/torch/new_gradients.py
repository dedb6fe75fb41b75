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

Nothing tells zeros that a user writes into all of them, as gradients, from those of
``model.zero_grad(set_to_none=False)``. Where one rank's may all be zero, it takes ``p.grad = g``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

__all__ = ["NewGradients", "is_zero"]


class NewGradients:
    """Tells gradients that wait to be applied from those that were applied, or dropped."""

    def __init__(self) -> None:
        self._parameters: Sequence[torch.Tensor] = ()
        self._gradients: list[weakref.ref[torch.Tensor] | None] = []
        self._versions: list[int] = []

    def note_old(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take what is in ``p.grad`` now for old.

        Every step does this, and few steps are asked about: it takes about 0.2 us a parameter.
        """
        gradients = [parameter.grad for parameter in parameters]
        self._parameters = parameters
        self._gradients = [None if g is None else weakref.ref(g) for g in gradients]
        self._versions = [0 if g is None else g._version for g in gradients]

    def any_new(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether any gradient is new."""
        noted = zip(self._gradients, self._versions, strict=True)
        old = dict(zip(map(id, self._parameters), noted, strict=True))
        return any(_is_new(p.grad, *old.get(id(p), (None, 0))) for p in parameters)


def _is_new(
    gradient: torch.Tensor | None, old: weakref.ref[torch.Tensor] | None, version: int
) -> bool:
    if gradient is None:
        return False
    if old is None or old() is not gradient:
        return True
    return gradient._version != version and not is_zero(gradient)


def is_zero(gradient: torch.Tensor) -> bool:
    """Return whether all elements are zero."""
    values = gradient._values() if gradient.is_sparse else gradient
    return not bool(values.any())
