"""Sparse gradients, which travel as they are: every rank gathers all ranks' rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from horovod.torch.mpi_ops import Average, allgather_async, poll

from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.timeline import NOT_SHOWN, PendingOperation
from hvd_pipe.torch.agree import gather
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.allreduce import sendable

if TYPE_CHECKING:
    from hvd_pipe.torch.strategies.settings import Settings


class SparseGradients:
    """The sparse gradients of one round, ``known`` on all ranks.

    They travel as they are: every rank gathers all ranks' indices and values. A parameter shows
    only by its first gradient that it is sparse, and a rank that computed none cannot know: a
    control flag says that some rank has found one, and all ranks agree and gather after that
    round. Later buckets have no room for it.

    Those that travel ``as_dense`` stay in their buckets. Once known, they are sparse on all ranks
    before the update, which else differed in its last bits.
    """

    def __init__(self, settings: Settings, tag: str) -> None:
        self._parameters, self._reduction, self._tag = settings.parameters, settings.reduction, tag
        self.as_dense = settings.sparse_as_dense
        self.known = settings.known_as_dense if self.as_dense else settings.sparse
        self.alone: set[int] = set() if self.as_dense else self.known
        """Of these, the indices of the gradients that are in no bucket."""
        self.in_buckets: set[int] = self.known if self.as_dense else set()
        """Of these, the indices of the gradients that travel as dense ones."""
        self._gathers: dict[int, _Gather] = {}
        self.unannounced: dict[int, torch.Tensor] = {}
        """This rank's gradients that other ranks do not know to be sparse, by index."""
        self.gathered: dict[int, torch.Tensor] = {}
        """The reduced gradients, by index."""

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Register a gradient of this rank; send it if all ranks know it to be sparse."""
        if index in self.known:
            self._send(index, gradient)
        else:
            self.unannounced[index] = gradient.detach()  # p.grad becomes another tensor

    def flush(self) -> None:
        """Take part in the gathers of all gradients that are known to be sparse."""
        for index in sorted(self.alone):
            if index not in self._gathers:
                self._send(index, None)

    def agree(self) -> None:
        """Gather gradients that some rank has found sparse; all ranks call this together."""
        lists = [unannounced := sorted(self.unannounced.keys() - self._gathers.keys())]
        if not self._reduction.alone:
            lists = gather(unannounced, f"{self._tag}.sparse", self._reduction.process_set)
        indices = sorted(set[int]().union(*lists))
        for index in () if self.as_dense else indices:
            self._send(index, self.unannounced.get(index))
        self.known.update(indices)
        self.unannounced.clear()

    def end_round(self) -> None:
        """Forget what was sent, and be ready for the next round."""
        self._gathers.clear()

    def clear(self) -> None:
        """Drop the round; all has arrived."""
        for gradients in (self._gathers, self.gathered, self.unannounced):
            gradients.clear()

    def _send(self, index: int, gradient: torch.Tensor | None) -> None:
        """Start to gather a gradient; a rank that has none takes part with no entries."""
        parameter = self._parameters[index]
        local = empty_sparse(parameter) if gradient is None else gradient.detach()
        local = local.coalesce()
        parts = [local.indices().t().contiguous(), local.values().contiguous()]
        self._gathers[index] = gathering = _Gather(local.size(), local.dtype, parts)
        reduction, name = self._reduction, f"{self._tag}.sparse.{index}"
        if reduction.alone:
            return
        check_mode.active.delay()
        begun = timeline.active.now()
        for part, label in zip(parts, ("indices", "values"), strict=True):
            with pending.explaining():
                handle = allgather_async(
                    sendable(part), f"{name}.{label}", process_set=reduction.process_set
                )
            gathering.handles.append(pending.sent(handle))
            # An all-gather moves half of what an all-reduce of the gathered bytes would.
            reduction.traffic.add(part.nbytes * reduction.workers // 2, reduction.workers)
        nbytes = sum(part.nbytes for part in parts)
        gathering.operation = timeline.active.launched(
            name, nbytes, partial(poll, handle), begun=begun
        )

    def complete(self) -> None:
        """Block until all that was sent is in `gathered`."""
        for index, gathering in self._gathers.items():
            if gathering.handles:
                check_mode.active.delay()
                gathering.parts = [pending.wait(handle) for handle in gathering.handles]
                gathering.handles.clear()
                gathering.operation.complete()
            indices, values = gathering.parts
            if values.dtype != gathering.dtype:
                values = values.view(gathering.dtype)
            if self._reduction.op == Average:
                values = values / self._reduction.workers
            self.gathered[index] = torch.sparse_coo_tensor(
                indices.t(), values, gathering.size, check_invariants=False
            ).coalesce()


@dataclass
class _Gather:
    """One sparse gradient on its way: this rank's indices and values, then those of all ranks."""

    size: torch.Size
    dtype: torch.dtype
    parts: list[torch.Tensor]
    handles: list[int] = field(default_factory=list)
    operation: PendingOperation = NOT_SHOWN


def empty_sparse(parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient without entries, of the kind that nn.Embedding has: it lists rows."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
