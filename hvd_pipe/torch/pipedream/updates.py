"""From a stage's gradient to its update: the average over replicas, clipping, the optimizer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, Sum, allreduce_
from torch.utils._pytree import tree_leaves

from hvd_pipe.pipeline.norms import Clipping

__all__ = ["Updates", "add"]


class Updates:
    """Applies what the backward passes of a stage have left in ``p.grad``.

    Args:
        optimizer: The stage's; where it has replicas, a `DistributedOptimizer` over them. None for
            a stage without parameters.
        scheduler: Its learning rates, where they change with each minibatch.
        replicas: The ranks that hold it.
        clipping: By the norm over all stages.
        mean: Whether replicas average their gradients, each of a minibatch of its own; else they
            sum those of one minibatch.
    """

    def __init__(
        self,
        optimizer: Any | None,
        scheduler: Any | None,
        replicas: ProcessSet | None,
        clipping: Clipping,
        mean: bool,
    ) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self._replicas, self._clipping, self._mean = replicas, clipping, mean
        self.norms = clipping.norms
        self._minibatches = 1  # of the next update: an epoch's last round may have fewer

    @property
    def nbytes(self) -> int:
        """Bytes of the optimizer's state."""
        state = {} if self.optimizer is None else dict(self.optimizer.state)
        return sum(
            x.nbytes for x in tree_leaves(list(state.values())) if isinstance(x, torch.Tensor)
        )

    def average(self, contributors: int) -> None:
        """Wait for the average over the replicas, which bring zeros where they have no gradient.

        Args:
            contributors: Replicas that have one.
        """
        if self._replicas is not None and self.optimizer is not None:
            self.optimizer.synchronize()
            if self._mean:
                self._minibatches = contributors
                self._scale(self._replicas.size() / contributors)

    def apply(self) -> None:
        """Clip the gradient, make the update, and clear the gradient."""
        factor = self._clipping.factor(self._squared_norm)
        optimizer = self.optimizer
        if optimizer is None:
            return
        with nullcontext() if self._replicas is None else optimizer.skip_synchronize():
            self._scale(factor)
            optimizer.step()
        optimizer.zero_grad()
        if self.scheduler is not None:
            for _ in range(self._minibatches):
                self.scheduler.step()

    def _gradients(self) -> list[torch.Tensor]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [p.grad for group in groups for p in group["params"] if p.grad is not None]

    def _scale(self, factor: float) -> None:
        if factor != 1.0:
            torch._foreach_mul_(self._gradients(), factor)

    def _squared_norm(self) -> float:
        gradients = self._gradients()
        return float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0


def add(value: float, name: str, ranks: ProcessSet) -> float:
    """Return the sum of all ranks' numbers."""
    tensor = torch.tensor([value], dtype=torch.float64)
    return float(allreduce_(tensor, op=Sum, name=name, process_set=ranks))
