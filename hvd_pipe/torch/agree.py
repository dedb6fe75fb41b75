"""Every rank decides alike: `hvd_pipe.runtime.consensus` by way of torch's Horovod."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from horovod.torch.mpi_ops import Max as _Max
from horovod.torch.mpi_ops import ProcessSet, Sum, allgather, allreduce_

from hvd_pipe.planning.tuner import TRIAL_STEPS, Tuner
from hvd_pipe.runtime import timeline
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
    """Return what tries plans on these ranks."""
    seen = partial(largest, name=f"{tag}.seen", process_set=process_set)
    plan = partial(found_by_first, name=f"{tag}.plan", process_set=process_set)
    return Tuner(seen, plan, begin, timed)


@shutdown_is_told()
def agree_on_clock(process_set: ProcessSet) -> timeline.Clock:
    """Return the zero of the process set's first rank."""
    name = f"hvd_pipe.{process_set.process_set_id}.clock"

    def meet() -> None:
        allreduce_(torch.zeros(1), name=name, op=Sum, process_set=process_set)

    return timeline.agree_on_clock(meet, gather, name, process_set)
