"""The buffers (BatchNorm statistics) of the models whose parameters an optimizer holds."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from horovod.torch.mpi_ops import broadcast_

from hvd_pipe.torch.agree import check_alike, members
from hvd_pipe.torch.messages.allreduce import Reduction
from hvd_pipe.torch.parameters import ModelFinder

__all__ = ["ModelBuffers"]


class ModelBuffers:
    """The buffers of every model that has run forward with some of the optimizer's parameters."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._known: set[int] = set()
        self._finder = ModelFinder(self._take, steps=1, through_graph=True)

    def want(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take the models of these parameters as well."""
        self._finder.look_for(p for p in parameters if id(p) not in self._known)

    def step(self) -> None:
        """Look no further at the second step, which follows a whole forward pass."""
        self._finder.end_step()

    def _take(self, module: torch.nn.Module, found: set[int]) -> None:
        self._known |= found
        if all(reference() is not module for reference in self._models):
            self._models.append(weakref.ref(module))

    def average(self, reduction: Reduction, name: str) -> None:
        """Average floating buffers over the ranks; other buffers take the first rank's values.

        Raises:
            RanksDisagreeError: The ranks' buffers differ in name, shape or dtype.
        """
        if reduction.alone:
            return
        buffers = [
            (f"{i}.{label}", buffer)
            for i, model in enumerate(filter(None, (reference() for reference in self._models)))
            for label, buffer in model.named_buffers()
        ]
        lines = [(f"buffer {n}", f"{b.dtype} {tuple(b.shape)}") for n, b in buffers]
        check_alike(lines, f"{name}.check", reduction.process_set)
        first = members(reduction.process_set)[0]
        for label, buffer in buffers:
            if buffer.is_floating_point():
                wide = buffer.float() if buffer.dtype == torch.bfloat16 else buffer
                reduction.reduce(wide, f"{name}.{label}")
                buffer.copy_(wide)
            else:
                broadcast_(buffer, first, f"{name}.{label}", process_set=reduction.process_set)
