"""Every rank decides alike: `hvd_pipe.runtime.consensus` by way of torch's Horovod."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from horovod.torch.mpi_ops import Max as _Max
from horovod.torch.mpi_ops import ProcessSet, allgather, allreduce_

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.planning.tuner import TRIAL_STEPS, Tuner
from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.consensus import Agreement, members, shutdown_is_told


def _gather_bytes(data: bytes, name: str, process_set: ProcessSet) -> list[bytes]:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    counts = allgather(torch.tensor([len(data)]), f"{name}.bytes", process_set).tolist()
    parts = allgather(tensor, name=f"{name}.data", process_set=process_set).split(counts)
    return [part.numpy().tobytes() for part in parts]


agreement = Agreement(_gather_bytes)
check_alike = agreement.check_alike
found_by_first = agreement.found_by_first
from_first = agreement.from_first
gather = agreement.gather


@shutdown_is_told()
def largest(values: Sequence[float], name: str, process_set: ProcessSet) -> list[float]:
    """Return, element by element, the largest of all ranks' ``values``."""
    tensor = torch.tensor(values, dtype=torch.float64)
    if len(members(process_set)) > 1:
        allreduce_(tensor, name=name, op=_Max, process_set=process_set)
    return list(tensor.tolist())


def make_tuner(
    tag: str, process_set: ProcessSet, begin: int = 0, timed: int = TRIAL_STEPS
) -> Tuner:
    """Return a tuner over these ranks, which tries plans."""
    slowest = partial(largest, name=f"{tag}.seen", process_set=process_set)
    plan = partial(found_by_first, name=f"{tag}.plan", process_set=process_set)
    return Tuner(slowest, plan, begin, timed)


# `runtime.check_mode` for torch: NaN in free buffers, and equal replicas.


def poison(*tensors: torch.Tensor | None) -> None:
    """Fill buffers that hold nothing of use with NaN (bytes with 255), if checks are on."""
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
    labelled: list[tuple[str, torch.Tensor | None]] = []
    for kind, tensors in (("weight", weights), ("gradient", gradients)):
        pairs = zip(names, tensors, strict=False)
        labelled += [(f"the {kind} of {name!r}", tensor) for name, tensor in pairs]

    def detail(index: int) -> str:
        tensor = labelled[index][1]
        if tensor is None:
            return "none"
        return f"checksum {_checksum(tensor)}, norm {float(tensor.detach().double().norm()):.9g}"

    lines = [(label, _checksum(tensor)) for label, tensor in labelled]
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
