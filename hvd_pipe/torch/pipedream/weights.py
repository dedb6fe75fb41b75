"""A stage's weights in several versions, of which the module holds one at a time.

    version   3        4        5 (newest)         use(3), backward, release(3)
    memory   [w3]     [w4]     [w5]                updating(6): [w3] becomes [w6]

A version is copied only where the one before is still needed, and its memory is used again.

Autograd keeps a parameter, not its values, for backward: it looks them up then. So the values of
the forward pass are put back before backward, which is exact for every layer. (Without that it is
still exact for Linear, and wrong without an error for Conv, BatchNorm, LSTM and LayerNorm.) An
update would make autograd refuse all passes in flight, as it changes the parameter in place; they
have other memory, so the update leaves the parameter's version counter as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, Sum, allreduce_
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_leaves

from hvd_pipe.pipeline.stage import Clipping


class WeightVersions:
    """The values of some parameters, by the number of updates that made them.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> versions = WeightVersions([weight])
        >>> with versions.updating(1, keep=True):
        ...     weight.data += 1.0
        >>> versions.use(0)
        >>> weight.item(), versions.count
        (1.0, 2)
        >>> versions.release(0)
        >>> versions.use(1)
        >>> weight.item(), versions.nbytes
        (2.0, 8)
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        self._values = {0: [parameter.data for parameter in self.parameters]}
        self._newest = self._in_use = 0
        self._spare: list[list[torch.Tensor]] = []

    @property
    def count(self) -> int:
        """How many versions there are memory for."""
        return len(self._values) + len(self._spare)

    @property
    def nbytes(self) -> int:
        """Bytes of all versions."""
        return self.count * sum(p.numel() * p.element_size() for p in self.parameters)

    def restart(self) -> None:
        """Count from 0 again, when nothing is in flight."""
        self.use(self._newest)
        values = self._values.pop(self._newest)
        self._spare.extend(self._values.values())  # empty: all others have been released
        self._values, self._newest, self._in_use = {0: values}, 0, 0

    # Architecture: D7
    def use(self, version: int) -> None:
        """Put a version's values into the parameters."""
        if version == self._in_use:
            return
        for parameter, values in zip(self.parameters, self._values[version], strict=True):
            parameter.data = values
        self._in_use = version

    @contextmanager
    def updating(self, version: int, keep: bool) -> Iterator[None]:
        """Let parameters be updated in place to ``version``; ``keep`` the newest one so far."""
        before = self._values[self._newest]
        after = before
        if keep:
            after = self._spare.pop() if self._spare else [torch.empty_like(x) for x in before]
            if after:
                torch._foreach_copy_(after, before)
        else:
            del self._values[self._newest]
        self._values[version] = after
        self._newest = version
        self._in_use = -1  # no version: that of this number may have changed
        self.use(version)
        with ExitStack() as counters:
            for parameter in self.parameters:  # torch 2.4 takes one tensor alone
                counters.enter_context(_unsafe_preserve_version_counter(parameter))
            yield
        # Some optimizers put new tensors into parameters, in place of new values into theirs.
        self._values[version] = [parameter.data for parameter in self.parameters]

    # Architecture: D15
    def release(self, version: int) -> None:
        """Drop a version; its memory is used for the next one."""
        if version != self._newest:
            self._spare.append(self._values.pop(version))


class Updates:
    """Applies what the backward passes of a stage have left in ``p.grad``."""

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

    # Architecture: D13
    def average(self, contributors: int) -> None:
        """Wait for the average over the replicas; those without a gradient bring zeros."""
        if self._replicas is not None and self.optimizer is not None:
            self.optimizer.synchronize()
            if self._mean:
                self._minibatches = contributors
                if contributors != self._replicas.size():
                    factor = self._replicas.size() / contributors
                    torch._foreach_mul_(self._gradients(), factor)

    def apply(self) -> None:
        """Clip the gradient, make the update, and clear the gradient."""
        factor = self._clipping.factor(self._squared_norm)
        optimizer = self.optimizer
        if optimizer is None:
            return
        with nullcontext() if self._replicas is None else optimizer.skip_synchronize():
            if factor != 1.0:
                torch._foreach_mul_(self._gradients(), factor)
            optimizer.step()
        optimizer.zero_grad()
        if self.scheduler is not None:
            for _ in range(self._minibatches):
                self.scheduler.step()

    def _gradients(self) -> list[torch.Tensor]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [p.grad for group in groups for p in group["params"] if p.grad is not None]

    def _squared_norm(self) -> float:
        gradients = self._gradients()
        return float(torch.nn.utils.get_total_norm(gradients)) ** 2 if gradients else 0.0


def add(value: float, name: str, ranks: ProcessSet) -> float:
    """Return the sum of all ranks' numbers."""
    tensor = torch.tensor([value], dtype=torch.float64)
    return float(allreduce_(tensor, op=Sum, name=name, process_set=ranks))
