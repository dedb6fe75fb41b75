"""The backward passes of one round: how often each gradient was computed, and what is on its way.

Autograd numbers its passes (graph tasks) and calls back at the end of one that succeeds. A pass
that has begun, has not called back, and is over all the same, has raised.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch

from hvd_pipe.torch import pending_tensors
from hvd_pipe.torch.messages.control_flags import Changes
from hvd_pipe.torch.pending_tensors import Settle

__all__ = ["BackwardPasses", "is_running"]


def is_running() -> bool:
    """Return whether this is called from within a backward pass of this thread."""
    return torch._C._current_graph_task_id() != -1


class BackwardPasses:
    """Counts one round's gradients, by index, and holds them."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._held: dict[int, torch.Tensor] = {}
        self._running: set[int] = set()

    def add(self, count: int) -> None:
        """Count more gradients: parameters have joined."""
        self._done += [0] * count

    def begins(self) -> bool:
        """Return whether the gradient that was just computed is the first one of its pass."""
        task = torch._C._current_graph_task_id()
        if task in self._running or task == -1:
            return False
        self._running.add(task)
        end = partial(self._running.discard, task)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        return True

    def count(self, index: int) -> int:
        """Count a gradient; return how often it was computed in this round."""
        self._done[index] += 1
        return self._done[index]

    def hold(self, index: int, gradient: torch.Tensor, settle: Settle) -> None:
        """Make a gradient pending, and not what stood in its place."""
        before = self._held.get(index)
        if before is not None:
            pending_tensors.release(before)
        self._held[index] = gradient
        pending_tensors.hold(gradient, settle)

    def __len__(self) -> int:
        return len(self._held)

    def place_of(self, gradient: torch.Tensor) -> int:
        """Return the index of a gradient that is held."""
        return next(index for index, held in self._held.items() if held is gradient)

    def are_dropped(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether all gradients that are held are in no ``p.grad`` any more."""
        held = self._held.items()
        return bool(held) and all(parameters[i].grad is not gradient for i, gradient in held)

    def changes(
        self, parameters: Sequence[torch.Tensor], complete: Collection[int]
    ) -> Changes | None:
        """Return what became of the gradients that are complete; None where nothing did."""
        raised = bool(self._running) and not is_running()
        left = {
            index: parameters[index].grad
            for index, gradient in self._held.items()
            if parameters[index].grad is not gradient and index in complete
        }
        return Changes(raised, left) if raised or left else None

    def end(self) -> dict[int, torch.Tensor]:
        """Begin the next round; return what was held, by index."""
        held, self._held = self._held, {}
        for gradient in held.values():
            pending_tensors.release(gradient)
        self._done = [0] * len(self._done)
        self._running.clear()
        return held
