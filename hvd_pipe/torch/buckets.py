"""Flat gradient buckets: one buffer and one all-reduce a bucket, gradients are views into it.

    parameters      w0        w1    w2              (ready order: w2, w1, w0)
                     |         |     |
    views          [ ---g0--- ] [-g1-][--g2--]      p.grad after backward
                        |          |
    flat buffers   [ bucket 1 |c]  [ bucket 0 ]     each leaves when its last gradient is ready
                        |               |
                    allreduce_async_ in place       c: the control word

The bucket that is sent last ends in two more elements, the control words. A rank that has
something to say (its gradients come in another order) sets the first before the bucket leaves, so
all ranks learn of it at the same step and no extra message is sent. The second is 1 from every
rank that takes part: one that has left by ``hvd.join()`` sends zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from horovod.torch.mpi_ops import Average

from hvd_pipe.torch.reduction import Reduction

__all__ = ["Bucket", "BucketSet"]


class Bucket:
    """Gradients of one dtype and device that travel in one message."""

    def __init__(
        self, name: str, parameters: Sequence[torch.Tensor], reduction: Reduction, extra: int = 0
    ) -> None:
        first = parameters[0]
        numel = sum(parameter.numel() for parameter in parameters)
        self.flat = torch.zeros(numel + extra, dtype=first.dtype, device=first.device)
        self.control = self.flat[numel:]
        self.views: list[torch.Tensor] = []
        offset = 0
        for parameter in parameters:
            self.views.append(_view_like(self.flat, offset, parameter))
            offset += parameter.numel()
        self.waiting = len(self.views)
        self.launched = False
        self._message = reduction.message(self.flat, name, exact=extra)

    def launch(self) -> None:
        """Send the bucket; its buffer belongs to the network until `wait`."""
        self.launched = True
        self._message.launch()

    def wait(self) -> None:
        """Block until the averaged gradients are in the views; be ready for the next round."""
        self._message.wait()
        self.launched = False
        self.waiting = len(self.views)


class BucketSet:
    """The buckets of one plan, for parameters that are known by their place in a list.

    Args:
        parameters: All parameters that take part, in an order that all ranks share.
        groups: The plan: places in ``parameters``, grouped; each group of one dtype and device.
        reduction: How buffers are reduced.
        tag: Begins the messages' names; the same on all ranks, unique among what is in flight.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        groups: Sequence[Sequence[int]],
        reduction: Reduction,
        tag: str,
    ) -> None:
        self._parameters = parameters
        self._reduction = reduction
        last = len(groups) - 1
        self.buckets = [
            Bucket(
                f"{tag}.{i}",
                [parameters[place] for place in group],
                reduction,
                extra=2 * (i == last),
            )
            for i, group in enumerate(groups)
        ]
        self._place: dict[int, tuple[Bucket, torch.Tensor]] = {
            place: (bucket, view)
            for group, bucket in zip(groups, self.buckets, strict=True)
            for place, view in zip(group, bucket.views, strict=True)
        }
        self._ready = [False] * len(parameters)
        self._sparse: set[int] = set()
        self.completed: list[int] = []
        """Places in the order in which they became ready since the last `wait`."""

    def ready(self, place: int) -> None:
        """Take the gradient of ``parameters[place]``; send its bucket if that was the last one.

        The last bucket stays until `launch_rest`, because it carries the control word.
        """
        bucket, view = self._place[place]
        parameter = self._parameters[place]
        if parameter.grad is not None and parameter.grad.is_sparse:
            self._sparse.add(place)
        _into(parameter, view)
        self._ready[place] = True
        self.completed.append(place)
        bucket.waiting -= 1
        if bucket.waiting == 0 and bucket is not self.buckets[-1]:
            bucket.launch()

    def launch_rest(self, control: float = 0.0) -> None:
        """Send what has not left; a gradient that was not computed counts as zero, as in Horovod.

        Args:
            control: This rank's control word.
        """
        for place, (_, view) in self._place.items():
            if not self._ready[place]:
                _into(self._parameters[place], view)
        self.buckets[-1].control[0] = control
        self.buckets[-1].control[1] = 1.0
        for bucket in self.buckets:
            if not bucket.launched:
                bucket.launch()

    def wait(self) -> None:
        """Block until all is reduced and the buckets can be filled again."""
        for bucket in self.buckets:
            bucket.wait()
        self._ready = [False] * len(self._parameters)
        self.completed = []

    def control(self) -> float | None:
        """Return the mean control word after a `wait`: not zero if any rank set it.

        None if a rank has left by ``hvd.join()``: only all-reduces are possible then.
        """
        control, present = (word / self._weight for word in self.buckets[-1].control.tolist())
        return control if present > 1 - 0.5 / self._reduction.workers else None

    def all_sent(self, control: float) -> bool:
        """Return whether all ranks that took part in the last round sent this control word."""
        reduced = self.control()
        return reduced is None or abs(reduced - control) < 0.5 / self._reduction.workers

    @property
    def _weight(self) -> float:
        """What ones from all ranks are reduced to."""
        return 1.0 if self._reduction.op == Average else float(self._reduction.workers)

    def show(self) -> None:
        """Make every gradient the view into its bucket (sparse again where it came sparse)."""
        for place, (_, view) in self._place.items():
            sparse = place in self._sparse
            self._parameters[place].grad = view.to_sparse() if sparse else view

    def zero(self) -> None:
        """Set every gradient to zero."""
        for bucket in self.buckets:
            bucket.flat.zero_()

    def move_in(self) -> None:
        """Take gradients over from wherever they are, their values unchanged."""
        for place, (_, view) in self._place.items():
            if self._parameters[place].grad is not None:
                _into(self._parameters[place], view)


def _into(parameter: torch.Tensor, view: torch.Tensor) -> None:
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


def _view_like(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of ``flat`` at ``offset`` in the parameter's shape and memory format."""
    if not parameter.is_contiguous() and parameter.is_contiguous(
        memory_format=torch.channels_last
    ):
        return flat.as_strided(parameter.size(), parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.size())
