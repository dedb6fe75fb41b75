"""Weight prediction of Pipe-SGD: gradients are computed where the pending update may lead."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.torch.strategies.settings import Owner

__all__ = ["Prediction"]


class Prediction:
    """Weight prediction: compute the next gradient where the missing update is expected to lead.

        w        the true weights: every rank's, after the updates that have arrived
        w + u    where forward and backward run; u: the optimizer's update with a guess of the
                 gradient that is still in flight

    Before the next true update the weights go back to w, so a wrong guess is never kept. Source:
    Chen et al., "SAPipe" (NeurIPS 2022); papers call the guesses "local" and "previous
    synchronised".
    """

    def __init__(self, parameters: Sequence[torch.Tensor], owner: Owner) -> None:
        self._parameters, self._owner = parameters, owner
        self._true: list[torch.Tensor] | None = None
        self._versions: list[int] | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether the weights are ahead."""
        return self._true is not None

    def predict(self, guess: Sequence[torch.Tensor | None], scale: float) -> None:
        """Move the weights by the update that ``guess / scale`` makes; gradients stay as they are.

        Args:
            guess: One gradient a parameter, or None; the optimizer may write to them.
            scale: The loss scale of the guess.
        """
        self._true = [value.clone() for value in self._values()]
        shown = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, guess, strict=True):
            ahead = gradient if gradient is None or scale == 1.0 else gradient / scale
            parameter.grad = ahead
        self._owner.predict()
        for parameter, gradient in zip(self._parameters, shown, strict=True):
            parameter.grad = gradient
        self._versions = self._now()

    def restore(self) -> None:
        """Put the true weights back.

        Raises:
            HvdPipeError: Somebody has changed the weights, which would be lost.
        """
        if self._true is None:
            return
        if self._versions is not None and self._versions != self._now():
            self._true = None
            raise HvdPipeError(
                "weights were changed between two steps, while they were ahead of the updates "
                "(prediction): call optimizer.synchronize() before changing them."
            )
        torch._foreach_copy_(self._values(), self._true)
        self._true = None

    def forget(self) -> None:
        """Take the weights as they are for the true ones: others were loaded."""
        self._true = None

    def weights(self) -> list[torch.Tensor | None]:
        """Return copies of the true weights."""
        return [value.clone() for value in self._true or []]

    def load(self, weights: Sequence[torch.Tensor | None]) -> None:
        """Take these for the true weights; a parameter without one is where it should be."""
        self._versions = None
        self._true = [
            value.clone() if true is None else true.to(value)
            for true, value in zip(weights, self._values(), strict=True)
        ]

    def _now(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def _values(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self._parameters]
