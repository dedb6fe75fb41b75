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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, rank, size
from torch.utils._pytree import tree_leaves

from hvd_pipe.runtime.consensus import Description
from hvd_pipe.runtime.timeline import OFF, Recorder, open_recorder
from hvd_pipe.torch.agree import gather
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.parameters import ModelFinder

_LOOK_STEPS = 20


class TorchRecorder(Recorder):
    """Notes the forward passes of models, too, by hooks."""

    def __init__(self, path: Path, max_bytes: int, worker: int) -> None:
        super().__init__(path, max_bytes, worker)
        self.finder = ModelFinder(self._hook, _LOOK_STEPS, through_graph=False)
        self.depth = 0
        self.caller = 0
        self.forward = 0.0
        pending.before_shutdown(self.halt)

    def next_step(self) -> None:
        self.finder.end_step()
        super().next_step()

    def _hook(self, module: torch.nn.Module, _: set[int]) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            return  # it takes no hooks: there are no forward events of it
        if _enter not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave, always_call=True)
            _enter(module, None)  # torch has listed the hooks of this call already


# Functions of the module, so that a model with these hooks can be copied and pickled.


def _enter(_module: torch.nn.Module, _inputs: Any) -> None:
    """Note that a model is called, maybe by another one."""
    trace, thread = active, threading.get_ident()
    if not isinstance(trace, TorchRecorder) or (trace.depth and thread != trace.caller):
        return
    trace.depth += 1
    if trace.depth == 1:
        trace.caller = thread
        trace.end_backward()
        trace.forward = trace.now()


def _leave(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
    """Note that a model returns."""
    trace = active
    if not isinstance(trace, TorchRecorder) or not trace.depth:
        return
    if threading.get_ident() != trace.caller:
        return
    trace.depth -= 1
    if trace.depth:
        return
    name = "forward" if torch.is_grad_enabled() else "forward, no gradients"
    trace.span("forward", name, trace.forward, trace.now())
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.grad_fn.register_prehook(lambda _: active.begin_backward())
            break


active: Recorder = OFF
"""The process's recorder; `OFF` where ``HVD_PIPE_TIMELINE`` is not set."""


def describe() -> Description:
    """Open this rank's file if that is asked for, and return what all ranks must have alike."""
    global active
    active, alike = open_recorder(active, TorchRecorder, rank(), size())
    return alike


def start(parameters: Sequence[torch.Tensor], process_set: ProcessSet) -> None:
    """Take an optimizer in, where a timeline is asked for; all its ranks do this together."""
    if not isinstance(active, TorchRecorder):
        return
    active.set_clock(gather, f"hvd_pipe.{process_set.process_set_id}.clock", process_set)
    if process_set.included():
        active.finder.look_for(parameters)
