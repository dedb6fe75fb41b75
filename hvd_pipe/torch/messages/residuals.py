"""Residuals of error feedback where buckets change, and with them who encodes which sums.

Each rank encodes the sums of its own slice of a bucket, and keeps the residual of that slice only
(see `compressed_allreduce`). With other buckets, a gradient's sum may be encoded by another rank::

    rank 0   [ r0 |    ]                       [ r0 r1 ]
    rank 1   [    | r1 ]   --sum over ranks--> [ r0 r1 ]   each then keeps its new slice
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Sum

from hvd_pipe.torch.messages.allreduce import REDUCED, Reduction

__all__ = ["Residuals", "of_all_ranks"]

Residuals = dict[str, list[torch.Tensor | None]]
"""By label, one tensor a parameter, or None."""


def of_all_ranks(residuals: Residuals, reduction: Reduction, name: str) -> Residuals:
    """Return the residuals, with those of sums from all ranks; every rank calls this.

    Args:
        residuals: What `BucketSet.residuals` has returned on this rank.
        reduction: Of the gradients.
        name: Begins the messages' names.
    """
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
