"""`runtime.check_mode` for torch: NaN in free buffers, and equal replicas.

`messages.allreduce.CheckedMessage` finds changes of what is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from horovod.torch.mpi_ops import ProcessSet

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.consensus import members
from hvd_pipe.torch.agree import gather


def spoil(*tensors: torch.Tensor | None) -> None:
    """Fill buffers that hold nothing of use with NaN (bytes with ones), if checks are on."""
    if not check_mode.active.on:
        return
    for tensor in tensors:
        if tensor is not None:
            tensor.data.fill_(torch.nan if tensor.is_floating_point() else 255)


def compare_replicas(
    names: Sequence[str],
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    when: str,
    process_set: ProcessSet,
    tag: str,
) -> None:
    """Raise on every rank unless all have the same weights and gradients; all ranks come here."""
    found: list[tuple[str, torch.Tensor | None]] = []
    for what, tensors in (("weight", weights), ("gradient", gradients)):
        pairs = zip(names, tensors, strict=False)
        found += [(f"the {what} of {name!r}", tensor) for name, tensor in pairs]

    def detail(index: int) -> str:
        tensor = found[index][1]
        if tensor is None:
            return "none"
        return f"checksum {_checksum(tensor)}, norm {float(tensor.detach().double().norm()):.9g}"

    lines = [(label, _checksum(tensor)) for label, tensor in found]
    name = f"{tag}.replicas"
    check_mode.compare(lines, detail, when, gather, name, process_set)


def refuse_changed(names: Sequence[str], tag: str, process_set: ProcessSet) -> None:
    """Raise on every rank where one has changed gradients while they were being sent."""
    everyone = [names]
    if process_set.included() and len(members(process_set)) > 1:
        everyone = gather(names, tag, process_set)
    for rank, changed in zip(members(process_set), everyone, strict=False):
        if changed:
            raise HvdPipeError(
                f"the gradient of {changed[0]!r} was changed on rank {rank} after backward() and "
                "before step(), while it was being sent, in a way that torch does not count "
                "(p.grad.data, numpy): call optimizer.synchronize() after backward(), change "
                "gradients then, and step inside `with optimizer.skip_synchronize():`."
            )


def _checksum(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "none"
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return _checksum(tensor.indices()) + _checksum(tensor.values())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return check_mode.checksum(flat.view(torch.uint8).numpy().tobytes())
