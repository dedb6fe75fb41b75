"""What a running job does and when: ``HVD_PIPE_TIMELINE=dir`` writes ``dir/rank{N}.json``.

    forward     the outermost module that holds the optimizer's parameters, from call to return
    backward    from the gradient of that module's output to the last gradient of a parameter
    ready       a bucket's last gradient (of CoCoD, a model) is complete
    allreduce   a message, from its launch to its completion; it may queue for others before it
    codec       bf16 and int8: a message is encoded, summed or decoded in the communication thread
    wait        the host is blocked until messages have arrived (``overlap="forward"``: within
                forward, as the update is; each wait is for one bucket)
    update      the user's optimizer

A pipeline records its passes, waits and updates itself: see `hvd_pipe.pipeline.executor`.

*Moments.* On CUDA, forward, backward and update are timed by events on their stream, read when
they have passed; ``wait`` is the host's, in a lane of its own. The end of a message is found to
2 % of its time, 0.2 ms at best; see `runtime.timeline.pending`.

*One clock.* Zero is the same moment for all ranks that made their first optimizer together:
exactly so on one host, between hosts to ``clock_error_s``, which each file states; see
`runtime.timeline.clock`.

Where the variable is not set, `active` is a recorder that notes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from horovod.torch.mpi_ops import ProcessSet, poll, rank, size
from torch.utils._pytree import tree_leaves

from hvd_pipe.runtime.timeline.clock import own_clock
from hvd_pipe.runtime.timeline.recorder import (
    COMPUTE,
    DIRECTORY,
    HOST,
    MEGABYTES,
    OFF,
    Recorder,
    TraceRecorder,
    open_recorder,
)
from hvd_pipe.torch.agree import Description, agree_on_clock
from hvd_pipe.torch.measuring.clock import DeviceClock, Moment
from hvd_pipe.torch.messages import pending
from hvd_pipe.torch.parameters import ModelFinder

__all__ = [
    "DIRECTORY",
    "MEGABYTES",
    "Moment",
    "TorchRecorder",
    "active",
    "describe",
    "start",
    "updating",
]

_LOOK_STEPS = 20


class TorchRecorder(TraceRecorder):
    """`runtime.timeline.recorder` for torch: the host's moments, and those of a CUDA stream."""

    def __init__(self, path: Path, max_bytes: int, worker: int) -> None:
        super().__init__(path, max_bytes, worker)
        self.forwards = _Forwards(self)
        self._started: Moment | None = None
        self._last: Moment | None = None
        self._device: DeviceClock | None = None
        pending.before_shutdown(self._operations.halt)

    def _poll(self, handle: int) -> bool:
        return bool(poll(handle))

    def join(self, parameters: Sequence[torch.Tensor], process_set: ProcessSet) -> None:
        """Take an optimizer in; all ranks do this, those of its process set together."""
        # A rank outside of the set may come first: it shows its own steps, by its own clock.
        member = process_set.included()
        self.set_clock(agree_on_clock(process_set) if member else own_clock())
        if any(parameter.is_cuda for parameter in parameters) and self._device is None:
            self._device = DeviceClock(self.now)
            self.wait_lane = HOST
        if member:
            self.forwards.finder.look_for(parameters)

    def moment(self) -> Moment:
        """The moment at which the device will have done what it was given so far."""
        return self.now() if self._device is None else self._device.mark()

    # What happens.

    def begin_backward(self) -> None:
        if self._last is None and not self.is_told:
            self._started = self.moment()

    def gradient(self) -> None:
        if self.is_told:
            return
        if self._started is None:
            self._started = self.moment()
        if isinstance(self._last, torch.cuda.Event):
            self._last.record()
        else:
            self._last = self.moment()

    def end_backward(self) -> None:
        if self._started is not None and self._last is not None:
            self.span("backward", "backward", self._started, self._last)
            self._started = self._last = None

    def next_step(self) -> None:
        self._step += 1
        self.forwards.finder.end_step()
        if self._device is not None:
            self._device.settle()
        self.file.flush()

    def forward(self, begun: Moment) -> None:
        """Note that a model has run, from ``begun`` until now."""
        if self.is_told:
            return
        name = "forward" if torch.is_grad_enabled() else "forward, no gradients"
        self.span("forward", name, begun, self.moment())

    def span(
        self,
        category: str,
        name: str,
        start: Moment,
        end: Moment | None,
        tid: int = COMPUTE,
        more: str = "",
    ) -> None:
        if self.file.full:
            return
        write = partial(self._write, category, name, tid, self._args(), more)
        if isinstance(start, float) and not isinstance(end, torch.cuda.Event):
            write(start, end)
        elif self._device is not None:
            self._device.take(start, end, write)


class _Forwards:
    """Times the forward passes of the models of the optimizers' parameters."""

    def __init__(self, recorder: TorchRecorder) -> None:
        self._recorder = recorder
        self.finder = ModelFinder(self._take, _LOOK_STEPS, through_graph=False)
        self._depth = 0
        self._thread = 0
        self._start: Moment = 0.0

    def _take(self, module: torch.nn.Module, _: set[int]) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            pass  # it takes no hooks: there are no forward events of it
        elif _enter not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_enter)
            module.register_forward_hook(_leave, always_call=True)
            self.enter()  # torch has listed the hooks of this call already

    def enter(self) -> None:
        thread = threading.get_ident()
        if self._depth and thread != self._thread:
            return
        self._depth += 1
        if self._depth == 1:
            self._thread = thread
            self._recorder.end_backward()
            self._start = self._recorder.moment()

    def leave(self, output: object) -> None:
        if not self._depth or threading.get_ident() != self._thread:
            return
        self._depth -= 1
        if self._depth:
            return
        self._recorder.forward(self._start)
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(_begin_backward)
                break


# Functions of the module, so that a model with these hooks can be copied and pickled.


def _enter(_module: torch.nn.Module, _inputs: Any) -> None:
    if isinstance(active, TorchRecorder):
        active.forwards.enter()


def _leave(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
    if isinstance(active, TorchRecorder):
        active.forwards.leave(output)


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
    begun = active.moment()
    yield
    active.update(begun)
