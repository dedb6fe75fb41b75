"""Find the buffers (BatchNorm statistics) of the model whose parameters an optimizer holds.

An optimizer sees parameters only. The first forward pass shows which module they belong to: until
the first step, a hook on all modules looks at the outermost one. Under
``torch.func.functional_call`` the module has other tensors in their place; where these were
computed from the parameters, autograd's graph leads back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from horovod.torch.mpi_ops import broadcast_
from torch.utils.hooks import RemovableHandle

from hvd_pipe.torch.agree import check_alike, members
from hvd_pipe.torch.messages.reduction import Reduction

__all__ = ["ModelBuffers"]


class ModelBuffers:
    """The buffers of every model that has run forward with some of the `wanted` parameters."""

    def __init__(self) -> None:
        self._wanted: set[int] = set()
        self._models: list[weakref.ref[torch.nn.Module]] = []
        self._known: set[int] = set()
        self._look: RemovableHandle | None = None
        self._steps = 0

    def want(self, parameters: Sequence[torch.Tensor]) -> None:
        """Look for the models of these parameters as well."""
        self._wanted |= {id(parameter) for parameter in parameters} - self._known
        if self._look is not None or not self._wanted:
            return
        finder = weakref.ref(self)
        self._steps = 0

        def look(module: torch.nn.Module, _: Any) -> None:
            owner = finder()
            if owner is None:
                handle.remove()
            else:
                owner._claim(module)

        handle = torch.nn.modules.module.register_module_forward_pre_hook(look)
        self._look = handle

    def _claim(self, module: torch.nn.Module) -> None:
        """Take the model if it has parameters that are still wanted."""
        found = self._wanted.intersection(map(id, module.parameters()))
        if not found:
            found = self._wanted.intersection(map(id, _computed_from(module.parameters())))
        if found:
            if all(reference() is not module for reference in self._models):
                self._models.append(weakref.ref(module))
            self._wanted -= found
            self._known |= found
        if not self._wanted:
            self._stop()

    def step(self) -> None:
        """Look no further at the second step, which follows a whole forward pass."""
        self._steps += 1
        if self._steps > 1:
            self._stop()

    def _stop(self) -> None:
        if self._look is not None:
            self._look.remove()
            self._look = None

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


_MOST_NODES = 100_000  # of autograd's graph: fast weights lead through whole inner steps


def _computed_from(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the leaves of autograd's graph that these tensors were computed from."""
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes and len(seen) < _MOST_NODES:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        nodes += following
