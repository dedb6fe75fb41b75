"""Counts the backward passes of a round, and holds the gradients that they have computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from hvd_pipe.torch.messages.control_flags import RAISED, Changes
from hvd_pipe.torch.pending_tensors import Settle, hold, release


class BackwardPasses:
    """Counts one round's gradients, by index, and holds them.

    A pass (autograd's graph task) that is over without its callback has raised.
    """

    def __init__(self) -> None:
        self._done: list[int] = []
        self.held: dict[int, torch.Tensor] = {}
        self._running: set[int] = set()

    def add(self, count: int) -> None:
        """Count more gradients: parameters have joined."""
        self._done += [0] * count

    @property
    def is_running(self) -> bool:
        """Whether this is asked within a backward pass of this thread that is not yet complete."""
        return torch._C._current_graph_task_id() in self._running

    def begins(self, at_end: Callable[[bool], object]) -> bool:
        """Return whether the gradient that was just computed is the first one of its pass.

        ``at_end`` is called at the end of the pass, with whether no other one is running.
        """
        task = torch._C._current_graph_task_id()
        if task in self._running or task == -1:
            return False
        self._running.add(task)
        end = partial(self._end_pass, task, at_end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        return True

    def resume(self) -> None:
        """Take the pass that is running into the next round, after `end` within it."""
        self._running.add(torch._C._current_graph_task_id())

    def _end_pass(self, task: int, at_end: Callable[[bool], object]) -> None:
        self._running.discard(task)
        try:
            at_end(not self._running)
        except BaseException:
            self._running.add(task)
            raise

    def count(self, index: int, counts: bool) -> int:
        """Count a gradient, if its pass counts; return how often it was computed in this round."""
        before = self.held.pop(index, None)
        if before is not None:
            release(before)
        self._done[index] = done = self._done[index] + counts
        return done if counts else 0

    def hold(self, index: int, gradient: torch.Tensor, settle: Settle) -> None:
        """Make a gradient pending, until it is computed once more."""
        self.held[index] = gradient
        hold(gradient, settle)

    def changes(
        self, parameters: Sequence[torch.Tensor], complete: Collection[int]
    ) -> Changes | None:
        """Return what became of the gradients that are complete; None where nothing did."""
        raised = bool(self._running) and not self.is_running
        left = {
            index: parameters[index].grad
            for index, gradient in self.held.items()
            if parameters[index].grad is not gradient and index in complete
        }
        return Changes(RAISED if raised else "", left) if raised or left else None

    def end(self, stay_pending: bool = False) -> dict[int, torch.Tensor]:
        """Begin the next round; return what was held, by index."""
        held, self.held = self.held, {}
        if not stay_pending:
            for gradient in held.values():
                release(gradient)
        self._done = [0] * len(self._done)
        self._running.clear()
        return held
