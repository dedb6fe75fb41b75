"""Sparse gradients travel as they are: every rank gathers all ranks' indices and values.

A parameter shows only by its first gradient that it is sparse, and a rank that computed none in
that step cannot know. So the first time takes an agreement: a control flag says that some rank has
found one, and all ranks gather after that round. Later buckets have no room for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from horovod.torch.mpi_ops import Average, allgather_async

from hvd_pipe.runtime import check_mode
from hvd_pipe.runtime.timeline import NOT_SHOWN
from hvd_pipe.torch.agree import gather
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.messages.allreduce import Reduction, sendable


class SparseGradients:
    """The sparse gradients of one round.

    Args:
        parameters: All parameters, in an order that all ranks share.
        reduction: How gradients are reduced.
        tag: Begins the messages' names.
        known: Indices of the parameters that all ranks know to be sparse; this adds to them. None
            sends all gradients as dense ones.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        reduction: Reduction,
        tag: str,
        known: set[int] | None,
    ) -> None:
        self._parameters, self._reduction, self._tag = parameters, reduction, tag
        self.known = known
        self._gathers: dict[int, SparseGather] = {}
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

    def complete(self) -> None:
        """Block until all that was sent is in `gathered`."""
        for index, gathering in self._gathers.items():
            self.gathered[index] = gathering.wait()

    def end_round(self) -> None:
        """Forget what was sent, and be ready for the next round."""
        self._gathers.clear()

    def clear(self) -> None:
        """Forget the round; all has arrived."""
        for kept in (self._gathers, self.gathered, self.found):
            kept.clear()

    def _send(self, index: int, gradient: torch.Tensor | None) -> None:
        name = f"{self._tag}.sparse.{index}"
        self._gathers[index] = SparseGather(
            self._parameters[index], gradient, self._reduction, name
        )


class SparseGather:
    """One sparse gradient on its way; a rank that has none takes part with no entries.

    Args:
        parameter: Whose gradient it is.
        gradient: This rank's, or None.
        reduction: Average or Sum, over which ranks. Compressors do not apply.
        name: The same on all ranks, unique among what is in flight.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor | None,
        reduction: Reduction,
        name: str,
    ) -> None:
        own = _sparse(parameter, gradient).coalesce()
        self._size, self._dtype = own.size(), own.dtype
        self._reduction = reduction
        self._parts = [own.indices().t().contiguous(), own.values().contiguous()]
        self._handles: list[int] = []
        self._operation = NOT_SHOWN
        if reduction.alone:
            return
        check_mode.active.delay()
        begun = timeline.active.moment()
        for part, what in zip(self._parts, ("indices", "values"), strict=True):
            with pending.explaining():
                handle = allgather_async(
                    sendable(part), f"{name}.{what}", process_set=reduction.process_set
                )
            self._handles.append(pending.sent(handle))
            # An all-gather moves half of what an all-reduce of the gathered bytes would.
            reduction.traffic.add(part.nbytes * reduction.workers // 2, reduction.workers)
        nbytes = sum(part.nbytes for part in self._parts)
        self._operation = timeline.active.launched(name, nbytes, self._handles[-1], begun=begun)

    def wait(self) -> torch.Tensor:
        """Block until all entries are here; return the reduced gradient."""
        if self._handles:
            check_mode.active.delay()
            self._parts = [pending.wait(handle) for handle in self._handles]
            self._handles.clear()
            self._operation.complete()
        indices, values = self._parts
        if values.dtype != self._dtype:
            values = values.view(self._dtype)
        if self._reduction.op == Average:
            values = values / self._reduction.workers
        whole = torch.sparse_coo_tensor(indices.t(), values, self._size, check_invariants=False)
        return whole.coalesce()


def _sparse(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        # As nn.Embedding makes them: rows are listed, and dense in themselves.
        indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty(0, *parameter.shape[1:])
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
    return gradient.detach()
