"""Sparse gradients travel as they are: every rank gathers all ranks' indices and values.

A parameter shows only by its first gradient that it is sparse, and a rank that computed none in
that step cannot know. So the first time takes an agreement: a control flag says that some rank has
found one, and all ranks gather after that round. Later buckets have no room for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from horovod.torch.mpi_ops import Average, allgather_async

from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.timeline import NOT_SHOWN, PendingOperation
from hvd_pipe.torch.agree import gather
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.allreduce import Reduction, sendable


class SparseGradients:
    """The sparse gradients of one round; ``known`` on all ranks, None to send them as dense."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        reduction: Reduction,
        tag: str,
        known: set[int] | None,
    ) -> None:
        self._parameters, self._reduction, self._tag = parameters, reduction, tag
        self.known = known
        self._gathers: dict[int, _Gather] = {}
        self.found: dict[int, torch.Tensor] = {}
        """This rank's gradients of which the others do not know, by index."""
        self.gathered: dict[int, torch.Tensor] = {}
        """The reduced gradients, by index."""

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Take a gradient of this rank; send it if the others know of it."""
        if index in (self.known or ()):
            self._send(index, gradient)
        else:
            self.found[index] = gradient.detach()  # whoever holds it is shown something else

    def flush(self) -> None:
        """Take part in all gathers that are known of."""
        for index in sorted(self.known or ()):
            if index not in self._gathers:
                self._send(index, None)

    def agree(self) -> None:
        """Gather what some rank has found; all ranks call this in the same round."""
        if self.known is None:
            return
        found = sorted(index for index in self.found if index not in self._gathers)
        lists = gather(found, f"{self._tag}.sparse", self._reduction.process_set)
        indices = sorted({index for one in lists for index in one})
        for index in indices:
            self._send(index, self.found.get(index))
        self.known.update(indices)
        self.found.clear()

    def end_round(self) -> None:
        """Forget what was sent, and be ready for the next round."""
        self._gathers.clear()

    def clear(self) -> None:
        """Forget the round; all has arrived."""
        for kept in (self._gathers, self.gathered, self.found):
            kept.clear()

    def _send(self, index: int, gradient: torch.Tensor | None) -> None:
        """Start to gather a gradient; a rank that has none takes part with no entries."""
        own = _sparse(self._parameters[index], gradient).coalesce()
        parts = [own.indices().t().contiguous(), own.values().contiguous()]
        self._gathers[index] = gathering = _Gather(own.size(), own.dtype, parts)
        reduction, name = self._reduction, f"{self._tag}.sparse.{index}"
        if reduction.alone:
            return
        check_mode.active.delay()
        begun = timeline.active.moment()
        for part, what in zip(parts, ("indices", "values"), strict=True):
            with pending.explaining():
                handle = allgather_async(
                    sendable(part), f"{name}.{what}", process_set=reduction.process_set
                )
            gathering.handles.append(pending.sent(handle))
            # An all-gather moves half of what an all-reduce of the gathered bytes would.
            reduction.traffic.add(part.nbytes * reduction.workers // 2, reduction.workers)
        nbytes = sum(part.nbytes for part in parts)
        gathering.operation = timeline.active.launched(name, nbytes, handle, begun=begun)

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


def _sparse(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        # As nn.Embedding makes them: rows are listed, and dense in themselves.
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[1:])
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
    return gradient.detach()
