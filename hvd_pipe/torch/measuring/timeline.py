"""What a running job does and when: ``HVD_PIPE_TIMELINE=dir`` writes ``dir/rank{N}.json``.

    forward     the outermost module that holds the optimizer's parameters, from call to return
    backward    from the gradient of that module's output to the last gradient of a parameter
    ready       a bucket's last gradient (of CoCoD, a model) is complete
    allreduce   a message, from its launch to its completion; it may queue for others before it
    codec       bf16 and int8: a message is encoded, summed or decoded in the communication thread
    wait        the host is blocked until messages have arrived (``overlap="forward"``: within
                forward, as the update is; each wait is for one bucket)
    update      the user's optimizer

A pipeline records its passes, waits and updates itself: see `hvd_pipe.pipeline.executor`. These
are the host's moments: what a CUDA device does meanwhile, `torch.profiler` shows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, poll, rank, size
from torch.utils._pytree import tree_leaves

from hvd_pipe.runtime.consensus import Description
from hvd_pipe.runtime.timeline import OFF, Recorder, open_recorder, own_clock
from hvd_pipe.torch.agree import agree_on_clock
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.parameters import ModelFinder

_LOOK_STEPS = 20


class TorchRecorder(Recorder):
    """Notes the passes of models, too, by hooks."""

    def __init__(self, path: Path, max_bytes: int, worker: int) -> None:
        super().__init__(path, max_bytes, worker)
        self.finder = ModelFinder(self._hook, _LOOK_STEPS, through_graph=False)
        self._depth = 0
        self._caller = 0
        self._forward = 0.0
        self._backward: float | None = None
        self._last_gradient: float | None = None
        pending.before_shutdown(self.halt)

    def _poll(self, handle: int) -> bool:
        return bool(poll(handle))

    def join(self, parameters: Sequence[torch.Tensor], process_set: ProcessSet) -> None:
        """Take an optimizer in; all ranks do this, those of its process set together."""
        # A rank outside of the set may come first: it shows its own steps, by its own clock.
        member = process_set.included()
        self.set_clock(agree_on_clock(process_set) if member else own_clock())
        if member:
            self.finder.look_for(parameters)

    def begin_backward(self) -> None:
        if self._last_gradient is None and not self.is_told:
            self._backward = self.now()

    def gradient(self) -> None:
        if not self.is_told:
            self._last_gradient = self.now()
            if self._backward is None:
                self._backward = self._last_gradient

    def end_backward(self) -> None:
        if self._backward is not None and self._last_gradient is not None:
            self.span("backward", "backward", self._backward, self._last_gradient)
            self._backward = self._last_gradient = None

    def next_step(self) -> None:
        self.finder.end_step()
        super().next_step()

    # Forward passes of the models of the optimizers' parameters.

    def _hook(self, module: torch.nn.Module, _: set[int]) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return  # it takes no hooks: there are no forward events of it
        if _enter not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave, always_call=True)
            self.enter()  # torch has listed the hooks of this call already

    def enter(self) -> None:
        """Note that a model is called, maybe by another one."""
        thread = threading.get_ident()
        if self._depth and thread != self._caller:
            return
        self._depth += 1
        if self._depth == 1:
            self._caller = thread
            self.end_backward()
            self._forward = self.now()

    def leave(self, output: object) -> None:
        """Note that a model returns."""
        if not self._depth or threading.get_ident() != self._caller:
            return
        self._depth -= 1
        if self._depth:
            return
        if not self.is_told:
            name = "forward" if torch.is_grad_enabled() else "forward, no gradients"
            self.span("forward", name, self._forward, self.now())
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(_begin_backward)
                break


# Functions of the module, so that a model with these hooks can be copied and pickled.


def _enter(_module: torch.nn.Module, _inputs: Any) -> None:
    if isinstance(active, TorchRecorder):
        active.enter()


def _leave(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
    if isinstance(active, TorchRecorder):
        active.leave(output)


def _begin_backward(_gradients: Any) -> None:
    active.begin_backward()


active: Recorder = OFF
"""The process's recorder; `OFF` where ``HVD_PIPE_TIMELINE`` is not set."""


def describe() -> Description:
    """Open this rank's file if that is asked for, and return what all ranks must have alike."""
    global active
    active, alike = open_recorder(active, TorchRecorder, rank(), size())
    return alike


def start(parameters: Sequence[torch.Tensor], process_set: ProcessSet) -> None:
    """Take an optimizer in, where a timeline is asked for; all its ranks do this together."""
    if isinstance(active, TorchRecorder):
        active.join(parameters, process_set)


@contextmanager
def updating() -> Iterator[None]:
    """Show what is done within this as an update of the user's optimizer, unless it fails."""
    begun = active.now()
    yield
    active.update(begun)
