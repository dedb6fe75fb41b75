"""From a stage's gradient to its update: the average over replicas, clipping, the optimizer.

Clipping by the norm over all stages. Where all stages end a minibatch together, they add up their
squared norms. Elsewhere a stage updates when the others have not got so far, or are further; it
then takes the newest squared norms that it has heard of: each message carries what its sender
knows, downstream those of the stages before it, upstream those of the stages behind it. A
gradient travels on before its stage has updated, so what is known of the stages behind is one
minibatch old for each stage between, and that of the stages before some minibatches more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, Sum, allreduce_, global_process_set
from torch.utils._pytree import tree_leaves

__all__ = ["Clipping", "Updates"]


@dataclass(frozen=True)
class Clipping:
    """Clip a gradient by its norm over all stages.

    Args:
        most: The largest norm.
        together: Whether all stages update together.
    """

    most: float
    together: bool


class Updates:
    """Applies what the backward passes of a stage have left in ``p.grad``.

    Args:
        optimizer: The stage's; where it has replicas, a `DistributedOptimizer` over them. None for
            a stage without parameters.
        scheduler: Its learning rates, where they change with each minibatch.
        stage, stages: Which stage this is, of how many.
        replicas: The ranks that hold it.
        clipping: None for none.
        mean: Whether replicas average their gradients, each of a minibatch of its own; else they
            sum those of one minibatch.
    """

    def __init__(
        self,
        optimizer: Any | None,
        scheduler: Any | None,
        stage: int,
        stages: int,
        replicas: ProcessSet | None,
        clipping: Clipping | None,
        mean: bool,
    ) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self._stage, self._replicas = stage, replicas
        self._clipping, self._mean = clipping, mean
        self._minibatches = 1  # of the next update: an epoch's last round may have fewer
        self._norms = [math.nan] * stages

    @property
    def squared_norms(self) -> tuple[float, ...]:
        """By stage, the newest that are known; nan for none."""
        return tuple(self._norms)

    @property
    def nbytes(self) -> int:
        """Bytes of the optimizer's state."""
        state = {} if self.optimizer is None else dict(self.optimizer.state)
        return sum(
            x.nbytes for x in tree_leaves(list(state.values())) if isinstance(x, torch.Tensor)
        )

    def heard(self, squared_norms: Sequence[float], from_before: bool) -> None:
        """Take what a neighbour knows of the stages on its side."""
        if self._clipping is not None:
            side = slice(0, self._stage) if from_before else slice(self._stage + 1, None)
            self._norms[side] = squared_norms[side]

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
        optimizer = self.optimizer
        if optimizer is None:
            self._clip()  # other stages wait for its squared norm
            return
        with nullcontext() if self._replicas is None else optimizer.skip_synchronize():
            self._scale(self._clip())
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

    def _clip(self) -> float:
        """Return what clipping multiplies the gradient with."""
        if self._clipping is None:
            return 1.0
        gradients = self._gradients()
        own = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        self._norms[self._stage] = own * own
        total = math.sqrt(self._total())
        # As torch.nn.utils.clip_grad_norm_ has it.
        return min(1.0, self._clipping.most / (total + 1e-6))

    def _total(self) -> float:
        """Return the squared norm over all stages, the same on all replicas of this one."""
        assert self._clipping is not None
        own = self._norms[self._stage]
        if self._clipping.together:
            width = 1 if self._replicas is None else self._replicas.size()
            return _sum(own / width, "hvd_pipe.pipeline.norms", global_process_set)
        others = math.fsum(
            norm
            for stage, norm in enumerate(self._norms)
            if stage != self._stage and not math.isnan(norm)
        )
        if self._replicas is not None:
            # Neighbours may have told each of them something else.
            name = f"hvd_pipe.pipeline.norms.{self._stage}"
            others = _sum(others, name, self._replicas) / self._replicas.size()
        return own + others


def _sum(value: float, name: str, ranks: ProcessSet) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    return float(allreduce_(tensor, op=Sum, name=name, process_set=ranks))
