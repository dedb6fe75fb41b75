"""The backward passes of one round: how often each gradient was computed, and what is on its way.

Autograd numbers its passes (graph tasks) and calls back at the end of one that succeeds. A pass
that has begun, has not called back, and is over all the same, has raised.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvd_pipe.torch import pending_tensors
from hvd_pipe.torch.messages.control_flags import RAISED, Changes
from hvd_pipe.torch.pending_tensors import Settle

Hook = Callable[[torch.Tensor], None]


class BackwardPasses:
    """Counts one round's gradients, by index, and holds them."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._held: dict[int, torch.Tensor] = {}
        self._running: set[int] = set()

    def add(self, count: int) -> None:
        """Count more gradients: parameters have joined."""
        self._done += [0] * count

    @property
    def is_running(self) -> bool:
        """Whether this is asked within a backward pass of this thread that is not yet complete."""
        return torch._C._current_graph_task_id() in self._running

    def begins(self, at_end: Callable[[], object]) -> bool:
        """Return whether the gradient that was just computed is the first one of its pass."""
        task = torch._C._current_graph_task_id()
        if task in self._running or task == -1:
            return False
        self._running.add(task)
        end = partial(self._end_pass, task, at_end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        return True

    def _end_pass(self, task: int, at_end: Callable[[], object]) -> None:
        self._running.discard(task)
        if not self._running:
            at_end()

    def count(self, index: int, counts: bool) -> int:
        """Count a gradient, if its pass counts; return how often it was computed in this round."""
        before = self._held.pop(index, None)
        if before is not None:
            pending_tensors.release(before)
        self._done[index] = done = self._done[index] + counts
        return done if counts else 0

    def hold(self, index: int, gradient: torch.Tensor, settle: Settle) -> None:
        """Make a gradient pending, until it is computed once more."""
        self._held[index] = gradient
        pending_tensors.hold(gradient, settle)

    def __len__(self) -> int:
        return len(self._held)

    def place_of(self, gradient: torch.Tensor) -> int:
        """Return the index of a gradient; -1 where another thread has taken it off."""
        return next((index for index, held in self._held.items() if held is gradient), -1)

    def are_dropped(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether all gradients that are held are in no ``p.grad`` any more."""
        held = self._held.items()
        return bool(held) and all(parameters[i].grad is not gradient for i, gradient in held)

    def changes(
        self, parameters: Sequence[torch.Tensor], complete: Collection[int]
    ) -> Changes | None:
        """Return what became of the gradients that are complete; None where nothing did."""
        raised = bool(self._running) and not self.is_running
        left = {
            index: parameters[index].grad
            for index, gradient in self._held.items()
            if parameters[index].grad is not gradient and index in complete
        }
        return Changes(RAISED if raised else "", left) if raised or left else None

    def end(self, stay_pending: bool = False) -> dict[int, torch.Tensor]:
        """Begin the next round; return what was held, by index."""
        held, self._held = self._held, {}
        if not stay_pending:
            for gradient in held.values():
                pending_tensors.release(gradient)
        self._done = [0] * len(self._done)
        self._running.clear()
        return held


class GradientHooks:
    """The hooks of an optimizer's parameters; engines that follow each other share them."""

    def __init__(self) -> None:
        self.engine: Callable[[], Any] = lambda: None
        """Returns the engine that is told of gradients."""
        self.places: dict[int, int] = {}
        """The index of a parameter, by its identity."""
        self._handles: dict[int, RemovableHandle] = {}

    def tell(self, engine: object, parameters: Sequence[torch.Tensor], hook: Hook) -> None:
        """Tell this engine of the gradients of these parameters, from now on.

        A hook that is there keeps its place among the script's own.
        """
        self.engine = weakref.ref(engine)
        self.places = {id(parameter): index for index, parameter in enumerate(parameters)}
        for gone in self._handles.keys() - self.places.keys():
            self._handles.pop(gone).remove()
        for parameter in parameters:
            if id(parameter) not in self._handles:
                trains = parameter.requires_grad
                parameter.requires_grad_()  # or torch takes no hook: it may be frozen for now
                listen = parameter.register_post_accumulate_grad_hook
                self._handles[id(parameter)] = listen(hook)  # type: ignore[no-untyped-call]
                parameter.requires_grad_(trains)

    def end(self, engine: object = None) -> None:
        """Remove the hooks, unless another engine is told by now; None: one that is gone."""
        if self.engine() in (engine, None):
            for handle in self._handles.values():
                handle.remove()
            self._handles.clear()


def settle_weakly(method: Settle) -> Settle:
    """Return a function that calls an engine's method; it keeps no engine alive."""
    reference = weakref.WeakMethod(method)

    def settle(gradient: torch.Tensor, func: Any, args: tuple[Any, ...]) -> None:
        found = reference()
        if found is None:
            pending_tensors.release(gradient)  # nobody is going to apply it
        else:
            found(gradient, func, args)

    return settle
