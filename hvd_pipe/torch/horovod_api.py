"""Horovod's functions that need another body here: start and end, join, and broadcasts.

Broadcasts take tensors of every dtype and memory format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from horovod.torch import functions as _horovod
from horovod.torch import mpi_ops
from torch.utils._pytree import tree_leaves, tree_map

from hvd_pipe.runtime.consensus import Description
from hvd_pipe.torch import torchrun, workers
from hvd_pipe.torch.agree import agreement
from hvd_pipe.torch.messages.allreduce import sendable
from hvd_pipe.torch.parameters import check_has_shape


def init(*args: Any, **kwargs: Any) -> Any:
    """Initialise Horovod, with its own fusion of messages off unless the user has set it.

    Our buckets are merged already; fusing them again would copy every byte twice more. Set
    ``HOROVOD_FUSION_THRESHOLD`` (bytes) to have it back. Without a GPU, Open MPI lets others have
    the processor while it waits: computing needs it (``OMPI_MCA_mpi_yield_when_idle=0`` has it
    poll). A job of `torchrun` runs over Gloo. Arguments as Horovod's ``init``.

    Raises:
        HvdPipeError: Horovod was shut down in this process and cannot start again here; or
            `torchrun` started this process, and its ranks cannot form a job of Horovod's.
    """
    was_running = mpi_ops.is_initialized()
    torchrun.begin()
    workers.begin()
    result = mpi_ops.init(*args, **kwargs)
    if not was_running:
        workers.watch()
    return result


def shutdown(*args: Any, **kwargs: Any) -> Any:
    """Shut Horovod down when the other ranks no longer need what this one has sent.

    Optimizers keep what was in flight, and go on with it after another `init`, on other workers
    if need be.
    """
    workers.begin()
    return mpi_ops.shutdown(*args, **kwargs)


def join(device: int = -1) -> int:
    """Horovod's ``join``, when all that this rank has sent has been reduced.

    A rank that has joined takes part with zeros, even where it had sent something, and would then
    wait for that for ever.

    Raises:
        HvdPipeError: An optimizer sends encoded or sparse gradients.
    """
    workers.begin()
    # Here, too: Horovod makes an error of its own kind of one that is raised inside.
    workers.refuse_join()
    last: int = mpi_ops.join(device)
    return last


def root_of_horovods(caller: FrameType | None) -> int | None:
    """Return the root of Horovod's own `broadcast_optimizer_state`, where that is the caller."""
    if caller is None or caller.f_code is not _horovod.broadcast_optimizer_state.__code__:
        return None
    # It hands the root to nobody, and sends nothing before its first call of the optimizer. So its
    # parameter is read where it stands.
    return int(caller.f_locals["root_rank"])


def broadcast_tensors(named: Iterable[tuple[str | None, torch.Tensor]], root_rank: int) -> None:
    """Give every rank ``root_rank``'s tensors, in place, of any dtype and memory format."""
    sent = []
    for name, tensor in named:
        wire = sendable(tensor).contiguous()
        sent.append((tensor, wire, mpi_ops.broadcast_async_(wire, root_rank, name)))
    for tensor, wire, handle in sent:
        mpi_ops.synchronize(handle)
        target = sendable(tensor)
        if target.data_ptr() != wire.data_ptr():
            target.copy_(wire)


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Give every rank the tensors of ``root_rank``, as Horovod's; of every memory format, too.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: The rank whose values all ranks get.

    Raises:
        RanksDisagreeError: Ranks have unlike tensors; on every rank, before anything is sent.
    """
    workers.finish_all()

    def check() -> tuple[list[tuple[str | None, torch.Tensor]], Description]:
        pairs = params.items() if isinstance(params, dict) else params
        named = [pair if isinstance(pair, tuple) else (None, pair) for pair in pairs]
        named.sort(key=lambda pair: str(pair[0]))
        for name, tensor in named:
            check_has_shape(name, tensor)
        return named, [("tensors", f"{n or 'one'}: {t.dtype} {[*t.shape]}") for n, t in named]

    name = "hvd_pipe.broadcast_parameters"
    broadcast_tensors(agreement.checked(check, name, mpi_ops.global_process_set), root_rank)


def _travels(leaf: Any) -> bool:
    """Whether a leaf is a tensor that Horovod can broadcast; sparse ones go with the skeleton."""
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in a state dict that travels without its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, leaf: Any) -> Any:
        if not _travels(leaf):
            return leaf
        return cls(tuple(leaf.shape), leaf.dtype, leaf.device.type)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the state of ``root_rank``'s optimizer: momenta, counters and options.

    Works for every optimizer, whatever the state of the other ranks' ones; touches no gradient.
    Call `broadcast_parameters` beside it: what is in flight belongs to the root's weights.

    Args:
        optimizer: A plain or distributed optimizer, with the same parameters on all ranks.
        root_rank: The rank whose state all ranks get.
        model: Accepted for Horovod's sake; not needed.
    """
    is_root, name = mpi_ops.rank() == root_rank, "hvd_pipe.optimizer_state"
    state: Any = optimizer.state_dict() if is_root else None
    skeleton = _horovod.broadcast_object(tree_map(_Slot.of, state), root_rank, name)
    slots = [leaf for leaf in tree_leaves(skeleton) if isinstance(leaf, _Slot)]
    if is_root:
        tensors = [leaf for leaf in tree_leaves(state) if _travels(leaf)]
        tensors = [tensor.detach().contiguous() for tensor in tensors]
    else:
        tensors = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in slots]
    broadcast_tensors(((f"{name}.{i}", t) for i, t in enumerate(tensors)), root_rank)
    if not is_root:
        arrived = iter(tensors)
        state = tree_map(lambda leaf: next(arrived) if isinstance(leaf, _Slot) else leaf, skeleton)
    # On the root, too: what is in flight must lie in the same buffers on all ranks.
    optimizer.load_state_dict(state)
