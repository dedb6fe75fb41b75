"""What a checkpoint holds of buckets, by index: gradients, and residuals of error feedback.

Each rank encodes the sums of its own slice of a bucket, and keeps the residual of that slice only
(see `compressed_allreduce`). With other buckets, a gradient's sum may be encoded by another rank::

    rank 0   [ r0 |    ]                       [ r0 r1 ]
    rank 1   [    | r1 ]   --sum over ranks--> [ r0 r1 ]   each then keeps its new slice
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Sum

from hvd_pipe.torch.messages.allreduce import REDUCED, Reduction

if TYPE_CHECKING:
    from hvd_pipe.torch.messages.buckets import BucketSet

Residuals = dict[str, list[torch.Tensor | None]]
"""By label, one tensor a parameter, or None."""


def gradients_of(buckets: BucketSet) -> list[torch.Tensor | None]:
    """Return a copy of each gradient as the last `BucketSet.wait` has left it."""
    found: list[torch.Tensor | None] = [None] * len(buckets.parameters)
    for index, (_, view) in buckets.slots.items():
        found[index] = None if index in buckets.frozen else view.clone()
    for index, gathered in buckets.sparse.gathered.items():
        found[index] = gathered.clone()
    return found


def own_gradients_of(buckets: BucketSet) -> list[torch.Tensor | None]:
    """Return this rank's own gradients of the round in flight, where they are kept."""
    found: list[torch.Tensor | None] = [None] * len(buckets.parameters)
    for group, bucket in zip(buckets.groups, buckets.buckets, strict=True):
        for index, own in zip(group, bucket.local, strict=False):
            found[index] = own
    return found


def restore_gradients(buckets: BucketSet, gradients: Sequence[torch.Tensor | None]) -> None:
    """Make these the result of the last round, as `gradients_of` returned them."""
    buckets.forget_flags()
    for index, gradient in enumerate(gradients):
        if gradient is not None and gradient.is_sparse and buckets.sparse.known is not None:
            buckets.sparse.gathered[index] = gradient
        elif index in buckets.slots:
            view = buckets.slots[index][1]
            if gradient is None:
                view.zero_()
                buckets.frozen.add(index)
            else:
                view.copy_(gradient)


def residuals_of(buckets: BucketSet) -> Residuals:
    """Return the residuals of lossy codecs."""
    found: Residuals = {}
    for group, bucket in zip(buckets.groups, buckets.buckets, strict=True):
        for label, flat in bucket.message.residuals.items():
            whole = found.setdefault(label, [None] * len(buckets.parameters))
            for index, view in zip(group, bucket.views_of(flat), strict=True):
                whole[index] = view.clone()
    return found


def restore_residuals(
    buckets: BucketSet, residuals: Mapping[str, Sequence[torch.Tensor | None]]
) -> None:
    """Take up what `residuals_of` returned, in these buckets or in others of the same ranks."""
    for group, bucket in zip(buckets.groups, buckets.buckets, strict=True):
        for label, flat in bucket.message.residuals.items():
            for index, view in zip(group, bucket.views_of(flat), strict=True):
                saved = residuals[label][index] if label in residuals else None
                if saved is not None:
                    view.copy_(saved)
        bucket.message.drop_foreign_residuals()


def of_all_ranks(residuals: Residuals, reduction: Reduction, name: str) -> Residuals:
    """Return the residuals, with those of sums from all ranks; every rank calls this."""
    reduced = residuals.get(REDUCED)
    if reduced is None or reduction.alone:
        return residuals
    plain = dataclasses.replace(reduction, op=Sum, compression=Compression.none)
    whole = list(reduced)
    devices = {tensor.device for tensor in reduced if tensor is not None}
    for i, device in enumerate(sorted(devices, key=str)):
        indices = [p for p, tensor in enumerate(reduced) if _is_on(tensor, device)]
        parts = [tensor for tensor in reduced if tensor is not None and tensor.device == device]
        flat = torch.cat([part.flatten() for part in parts])
        plain.reduce(flat, f"{name}.{i}")
        for index, part, total in zip(indices, parts, _split(flat, parts), strict=True):
            whole[index] = total.view(part.size())
    return {**residuals, REDUCED: whole}


def _is_on(tensor: torch.Tensor | None, device: torch.device) -> bool:
    return tensor is not None and tensor.device == device


def _split(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return torch.split(flat, [part.numel() for part in parts])
