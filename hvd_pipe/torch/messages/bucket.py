"""One bucket: a flat buffer with a view for each gradient, and the message that carries it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from hvd_pipe.runtime import check_mode
from hvd_pipe.torch.checking import spoil
from hvd_pipe.torch.messages.allreduce import CheckedMessage, Message

__all__ = ["Bucket", "copy_in"]


class Bucket:
    """Gradients of one dtype and device that travel in one message.

    Args:
        name: The message's name.
        parameters: Whose gradients; of one dtype and device.
        make_message: Returns the message that carries a buffer of the bucket's size.
        extra: How many control flags follow the gradients.
        keep_local: Whether `local` keeps this rank's own gradients.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[torch.Tensor],
        make_message: Callable[[torch.Tensor], Message],
        extra: int = 0,
        keep_local: bool = False,
    ) -> None:
        numel = sum(parameter.numel() for parameter in parameters)
        first = parameters[0] if parameters else torch.empty(0)  # control flags alone
        self.name = name
        self._parameters = parameters
        self.flat = torch.zeros(numel + extra, dtype=first.dtype, device=first.device)
        self.control = self.flat[numel:]
        self.views = _views(self.flat, parameters)
        self._local = torch.zeros_like(self.flat) if keep_local else None
        self.local = [] if self._local is None else _views(self._local, parameters)
        """This rank's own gradients of the round in flight, if they are kept."""
        self.waiting = len(self.views)
        self.launched = False
        self._filled_version: int | None = None
        self._checked: CheckedMessage | None = None
        if check_mode.active.on:
            self._checked = CheckedMessage(self.flat, extra, make_message)
        # The network writes through an alias, so that the version tells who else has written.
        self.message: Message = self._checked or make_message(self.flat.data)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parts of a buffer of the bucket's size that belong to its parameters."""
        return _views(flat, self._parameters)

    def fill(self) -> bool:
        """Count one gradient that is complete; return whether that was the last one."""
        self.waiting -= 1
        if self.waiting == 0:
            self._filled_version = self.flat._version
            if self._checked is not None:
                self._checked.keep()
        return self.waiting == 0

    @property
    def touched(self) -> bool:
        """Whether somebody has changed gradients in place since the bucket was full."""
        return self._filled_version not in (None, self.flat._version)

    def take_changed(self) -> int | None:
        """Return which gradient was changed after the bucket was full, where checks have seen one.

        Forgets it, too.
        """
        element = None if self._checked is None else self._checked.take_changed()
        if element is None:
            return None
        ends = itertools.accumulate(parameter.numel() for parameter in self._parameters)
        return next(i for i, end in enumerate(ends) if element < end)

    def launch(self) -> None:
        """Send the bucket; its buffer belongs to the network until `wait`."""
        self.launched = True
        if self._local is not None:
            self._local.copy_(self.flat)
        self.message.launch()

    def wait(self) -> None:
        """Block until the averaged gradients are in the views; be ready for the next round."""
        self.message.wait()
        spoil(self._local)
        self.launched = False
        self.waiting = len(self.views)
        self._filled_version = None


def copy_in(parameter: torch.Tensor, view: torch.Tensor) -> None:
    """Put the parameter's gradient into ``view`` and make it the view, copying only if it is not.

    After ``zero_grad(set_to_none=True)`` autograd leaves a new tensor; writing it here takes the
    place of adding it to zeros, so a step moves no more bytes than with gradients kept in place.
    """
    gradient = parameter.grad
    if gradient is None:
        view.zero_()
    elif gradient.is_sparse:
        view.copy_(gradient.detach().to_dense())
    elif gradient.data_ptr() == view.data_ptr():
        return
    else:
        view.copy_(gradient.detach())
    parameter.grad = view


def _views(flat: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    views, offset = [], 0
    for parameter in parameters:
        views.append(_view_like(flat, offset, parameter))
        offset += parameter.numel()
    return views


def _view_like(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of ``flat`` at ``offset`` in the parameter's shape and memory format."""
    if not parameter.is_contiguous() and parameter.is_contiguous(
        memory_format=torch.channels_last
    ):
        return flat.as_strided(parameter.size(), parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.size())
