"""Sparse gradients travel as they are: every rank gathers all ranks' indices and values.

A parameter shows only by its first gradient that it is sparse, and a rank that computed none in
that step cannot know. So the first time takes an agreement: see `BucketSet`, which also leaves
sparse parameters out of its buckets from then on.
"""

from __future__ import annotations

import torch
from horovod.torch.mpi_ops import Average, allgather_async

from hvd_pipe.runtime import check_mode
from hvd_pipe.torch.measuring import timeline
from hvd_pipe.torch.messages import in_flight
from hvd_pipe.torch.messages.reduction import Reduction, sendable

__all__ = ["SparseGather"]


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
        self._flight: timeline.Flight | None = None
        if reduction.alone:
            return
        check_mode.active.delay()
        trace = timeline.active
        begun = None if trace is None else trace.moment()
        for part, what in zip(self._parts, ("indices", "values"), strict=True):
            handle = allgather_async(
                sendable(part), f"{name}.{what}", process_set=reduction.process_set
            )
            self._handles.append(in_flight.sent(handle))
            # An all-gather moves half of what an all-reduce of the gathered bytes would.
            reduction.traffic.add(part.nbytes * reduction.workers // 2, reduction.workers)
        if trace is not None:
            nbytes = sum(part.nbytes for part in self._parts)
            self._flight = trace.launched(name, nbytes, self._handles[-1], begun=begun)

    def wait(self) -> torch.Tensor:
        """Block until all entries are here; return the reduced gradient."""
        if self._handles:
            check_mode.active.delay()
            self._parts = [in_flight.wait(handle) for handle in self._handles]
            self._handles.clear()
            if self._flight is not None:
                self._flight.land()
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
