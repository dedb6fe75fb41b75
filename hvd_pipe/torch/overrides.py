"""Horovod's functions that need another body here."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch import functions as _horovod
from horovod.torch import mpi_ops
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import broadcast_async_, rank
from horovod.torch.mpi_ops import synchronize as wait_for
from torch.utils._pytree import tree_leaves, tree_map

from hvd_pipe import restarts
from hvd_pipe.agreement import answer_with
from hvd_pipe.torch import in_flight
from hvd_pipe.torch.checks import count_anew
from hvd_pipe.torch.distributed import rest_all
from hvd_pipe.torch.engine import all_joined, refuse_join
from hvd_pipe.torch.reduction import sendable
from hvd_pipe.torch.waiting import JOB
from hvd_pipe.watch import watchdog

__all__ = ["broadcast_optimizer_state", "broadcast_parameters", "init", "join", "shutdown"]


def init(*args: Any, **kwargs: Any) -> Any:
    """Initialise Horovod, with its own fusion of messages off unless the user has set it.

    Our buckets are merged already; fusing them again would copy every byte twice more. Set
    ``HOROVOD_FUSION_THRESHOLD`` (bytes) to have it back. Without a GPU, Open MPI lets others have
    the processor while it waits: computing needs it (``OMPI_MCA_mpi_yield_when_idle=0`` has it
    poll). Arguments as Horovod's ``init``.

    Raises:
        HvdPipeError: Horovod was shut down in this process and cannot start again here.
    """
    restarts.prepare(mpi_ops)
    answer_with(mpi_ops)
    if not torch.cuda.is_available():
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    running = mpi_ops.is_initialized()
    result = mpi_ops.init(*args, **kwargs)
    if not running:
        watchdog.start(JOB)
    atexit.register(in_flight.settle)  # after Horovod's own, so it is called before it
    return result


def shutdown(*args: Any, **kwargs: Any) -> Any:
    """Shut Horovod down when the other ranks no longer need what this one has sent.

    Optimizers keep what was in flight, and go on with it after another `init`, on other workers
    if need be.
    """
    rest_all(keep=in_flight.settle())
    count_anew()
    restarts.note_end(mpi_ops)
    watchdog.leave()
    result = mpi_ops.shutdown(*args, **kwargs)
    watchdog.stop()
    return result


def join(device: int = -1) -> int:
    """Horovod's ``join``, when all that this rank has sent has been reduced.

    A rank that has joined takes part with zeros, even where it had sent something, and would then
    wait for that for ever. Give collectives of your own a name: Horovod numbers unnamed ones, and
    ranks count differently after uneven steps.

    Raises:
        HvdPipeError: An optimizer sends encoded or sparse gradients.
    """
    refuse_join()
    in_flight.arrive()
    last: int = mpi_ops.join(device)
    all_joined()
    return last


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Give every rank the tensors of ``root_rank``, as Horovod's; bfloat16 ones as well.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: The rank whose values count.
    """
    pairs = params.items() if isinstance(params, dict) else params
    named = [pair if isinstance(pair, tuple) else (None, pair) for pair in pairs]
    if isinstance(params, dict):
        named.sort(key=lambda pair: str(pair[0]))
    _horovod.broadcast_parameters(
        [(name, sendable(p) if isinstance(p, torch.Tensor) else p) for name, p in named], root_rank
    )


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

    Works for every optimizer, whatever the state of the other ranks' ones (Horovod's waits for
    ever when one rank alone has loaded a checkpoint into a wrapped one); touches no gradient. Call
    `broadcast_parameters` beside it: what is in flight belongs to the root's weights.

    Args:
        optimizer: A plain or distributed optimizer, with the same parameters on all ranks.
        root_rank: The rank whose state counts.
        model: Accepted for Horovod's sake; not needed.
    """
    is_root, name = rank() == root_rank, "hvd_pipe.optimizer_state"
    state: Any = optimizer.state_dict() if is_root else None
    skeleton = broadcast_object(tree_map(_Slot.of, state), root_rank, name)
    slots = [leaf for leaf in tree_leaves(skeleton) if isinstance(leaf, _Slot)]
    if is_root:
        tensors = [leaf for leaf in tree_leaves(state) if _travels(leaf)]
        tensors = [tensor.detach().contiguous() for tensor in tensors]
    else:
        tensors = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in slots]
    handles = [
        broadcast_async_(sendable(t), root_rank, f"{name}.{i}") for i, t in enumerate(tensors)
    ]
    for handle in handles:
        wait_for(handle)
    if not is_root:
        arrived = iter(tensors)
        state = tree_map(lambda leaf: next(arrived) if isinstance(leaf, _Slot) else leaf, skeleton)
    # On the root, too: what is in flight must lie in the same buffers on all ranks.
    optimizer.load_state_dict(state)
