"""Times of a model's layers on the running job, from hooks that only note moments.

A step is a row of moments, and each interval between two of them belongs to one layer::

    forward    enter conv | enter relu | enter fc | leave model
                ... conv ... ... relu ... ... fc ... ... (loss) ...
    backward   gradient of fc's output | fc's parameters | of relu's output | of conv's output ...
                ........ fc ............ ...... fc ..... ..... relu ....... ..... conv ......

so the layers' times add up to the whole passes, what a container computes between two layers
included. Nothing waits for the device: on CUDA the moments are events, read when they have passed.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Self

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from hvd_pipe.measuring.clock import Moment, Stopwatch
from hvd_pipe.planning.profile import LayerProfile, ModelProfile

__all__ = ["LayerTimes", "measure_profile"]

LOSS = "(loss)"
"""What lies between the model's forward pass and the gradient of its output."""
UNUSED = "(unused)"
"""Parameters that got no gradient: `DistributedOptimizer` sends zeros for them, at the end."""
_DESCRIPTIONS = {
    LOSS: "from the model's output to its gradient",
    UNUSED: "parameters without a gradient, sent as zeros at the end",
}


def measure_profile(
    model: nn.Module,
    step: Callable[[], object],
    batch: int | None = None,
    steps: int = 10,
    skip: int = 3,
    name: str = "",
) -> ModelProfile:
    """Make some training steps and return what each layer of the model costs.

    Args:
        model: What ``step`` trains.
        step: Makes one training step: forward, backward and, if it is to be measured, the update.
        batch: Samples of a minibatch of one worker.
        steps: Steps that count.
        skip: Steps before them.
        name: The model's, for people; its class's if left out.

    Returns:
        The layers that ran, in forward order, medians over the steps; see `LayerTimes.profile`.

    Raises:
        ValueError: ``steps`` or ``skip`` are too small, or no step trained the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(inplace=True), nn.Linear(3, 1))
        >>> images = torch.ones(5, 2)
        >>> profile = measure_profile(model, lambda: model(images).sum().backward(), batch=5)
        >>> [layer.name for layer in profile.layers], profile.gradient_bytes().tolist()
        (['0', '1', '2', '(loss)'], [16, 36])
    """
    if steps < 1 or skip < 0:
        raise ValueError(f"steps must be at least 1 and skip at least 0, got {steps} and {skip}.")
    with LayerTimes(model, skip) as times:
        for _ in range(skip + steps):
            step()
            times.step()
    return times.profile(batch, name)


@dataclass(slots=True)
class _Mark:
    """A moment, and the layer of the time after it (``kind`` "ready": of the time before it)."""

    moment: Moment
    kind: str
    who: str = ""
    parameter: int = 0


@dataclass(slots=True)
class _Call:
    """A forward pass of a module that is under way."""

    mark: _Mark
    muted: bool
    inputs: list[tuple[torch.Tensor, Any]]
    leaf: bool = True


@dataclass
class _LayerSeconds:
    """What a step took, by layer."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)
    update: float = 0.0
    ran_backward: bool = False


class LayerTimes:
    """Measures a model while a job trains it.

    Example::

        with LayerTimes(model) as times:
            for images, labels in batches:      # an ordinary training loop
                ...
                times.step()
        times.profile(batch=64).save("profile.json")

    Forward passes without gradients (evaluation) do not count. A layer that is called several
    times a step counts with all calls; recomputation (``torch.utils.checkpoint``) is part of
    backward. A module that runs no other one is a layer, a compiled model thus a single one.

    Args:
        model: The model, on one device.
        skip: Steps at the beginning that do not count.
    """

    def __init__(self, model: nn.Module, skip: int = 3) -> None:
        self._model, self._skip = model, skip
        first = next(model.parameters(), torch.empty(0))
        self._stopwatch = Stopwatch(first.device)
        self._parameters = {id(p): p for p in model.parameters() if p.requires_grad}
        self._names = dict(_modules(model))
        self._names[model] = type(model).__name__
        self._descriptions: dict[str, str] = {}
        """What each layer is; by name, in forward order."""
        self._activations: dict[str, dict[int, int]] = {}
        """Bytes of each layer's outputs, by the number of the step."""
        self._owners: dict[int, str] = {}
        self._had_gradient: set[int] = set()
        self._calls: list[_Call] = []
        self._marks: list[_Mark] = []
        self._pending: list[list[_Mark]] = []
        self._seconds: list[_LayerSeconds] = []
        self._handles: list[RemovableHandle] = []
        self._outputs: list[RemovableHandle] = []
        """Hooks on outputs of this step."""
        self.steps = 0
        """Steps ended so far, the skipped ones too."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Put hooks into the model; from here on steps are measured.

        Raises:
            ValueError: The model is scripted or traced (`torch.jit`), or a part of it is.
        """
        self.stop()
        for module, name in self._names.items():
            if isinstance(module, torch.jit.ScriptModule):
                raise ValueError(
                    f"{name!r} is a {type(module).__name__}, which takes no hooks: measure the "
                    "model before torch.jit.script or torch.jit.trace."
                )
        enter, leave = _Hook(self._enter), _Hook(self._leave)
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))
        for parameter in self._parameters.values():
            self._follow(parameter)

        def mark(kind: str, optimizer: Optimizer) -> None:
            owned = (p for group in optimizer.param_groups for p in group["params"])
            if any(id(p) in self._parameters for p in owned):
                self._mark(kind)

        before = register_optimizer_step_pre_hook(lambda optimizer, *_: mark("update", optimizer))
        after = register_optimizer_step_post_hook(lambda optimizer, *_: mark("updated", optimizer))
        self._handles += [before, after]

    def stop(self) -> None:
        """Take the hooks out; what was measured stays."""
        for handle in (*self._handles, *self._outputs):
            handle.remove()
        self._handles.clear()
        self._outputs.clear()
        self._calls.clear()
        self._marks.clear()

    def step(self) -> None:
        """Note that a training step has ended."""
        self.steps += 1
        self._calls.clear()  # of a forward pass that raised
        self._outputs.clear()
        if self._handles:
            for parameter in self._model.parameters():
                if parameter.requires_grad and id(parameter) not in self._parameters:
                    self._parameters[id(parameter)] = parameter  # it was frozen
                    self._follow(parameter)
        if self.steps > self._skip and self._marks:
            self._mark("end")
            self._pending.append(self._marks)
        self._marks = []
        while self._pending and Stopwatch.passed(self._pending[0][-1].moment):
            self._read(self._pending.pop(0))

    def profile(self, batch: int | None = None, name: str = "") -> ModelProfile:
        """Return medians over the steps.

        Times are scaled (by little) so that they add up to the median of the whole passes.
        ``(loss)``, behind the last layer, has the time from the model's forward pass to the
        gradient of its output; ``(unused)``, before the first, the parameters without gradients. A
        parameter that several layers use counts where its gradient is complete: at the first.

        Args:
            batch: Samples of a minibatch of one worker.
            name: The model's; its class's if left out.

        Raises:
            ValueError: No step had a forward and a backward pass.
        """
        while self._pending:
            marks = self._pending.pop(0)
            Stopwatch.wait(marks[-1].moment)
            self._read(marks)
        if not self._seconds:
            raise ValueError(
                f"no step of {self.steps} ({self._skip} of them skipped) had a forward and a "
                f"backward pass of this {type(self._model).__name__}: call the model itself, with "
                "gradients enabled, then backward(), and step() after each training step."
            )
        forward = _medians([seconds.forward for seconds in self._seconds])
        backward = _medians([seconds.backward for seconds in self._seconds])
        sizes: dict[str, int] = {}
        for number, parameter in self._parameters.items():
            owner = self._owners.get(number, LOSS) if number in self._had_gradient else UNUSED
            sizes[owner] = sizes.get(owner, 0) + parameter.numel() * parameter.element_size()
        layers = []
        for layer in (UNUSED, *self._descriptions, LOSS):
            if layer in sizes or layer in forward:
                layers.append(
                    LayerProfile(
                        layer,
                        sizes.get(layer, 0),
                        backward.get(layer, 0.0),
                        forward.get(layer, 0.0),
                        round(median(self._activations.get(layer, {}).values() or [0])),
                        {**self._descriptions, **_DESCRIPTIONS}[layer],
                    )
                )
        return ModelProfile(
            tuple(layers),
            batch=batch,
            update_s=median(seconds.update for seconds in self._seconds),
            name=name or type(self._model).__name__,
        )

    # Hooks.

    def _follow(self, parameter: nn.Parameter) -> None:
        def ready(parameter: torch.Tensor) -> None:
            self._mark("ready", parameter=id(parameter))

        hook = parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]
        self._handles.append(hook)

    def _mark(self, kind: str, who: str = "", parameter: int = 0) -> _Mark:
        mark = _Mark(self._stopwatch.now(), kind, who, parameter)
        self._marks.append(mark)
        return mark

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._calls:
            muted, self._calls[-1].leaf = self._calls[0].muted, False
        else:
            # Evaluation, or a checkpoint that recomputes within backward.
            muted = not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
        mark = _Mark(0.0, "inside") if muted else self._mark("inside", self._names[module])
        tensors = [(t, t.grad_fn) for t in inputs if isinstance(t, torch.Tensor)]
        self._calls.append(_Call(mark, muted, tensors))

    def _leave(self, module: nn.Module, _: object, output: Any) -> None:
        if not self._calls:
            return
        call = self._calls.pop()
        if call.leaf:
            call.mark.kind = "forward"
            self._record_outputs(module, call, output)
        elif not self._calls:
            call.mark.kind = "start"
        if not self._calls and not call.muted:
            self._mark("leave", LOSS)

    def _record_outputs(self, module: nn.Module, call: _Call, output: Any) -> None:
        name = self._names[module]
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if not call.muted:
            if name not in self._descriptions:
                self._descriptions[name] = " ".join(repr(module).split())
                for parameter in module.parameters():
                    self._owners.setdefault(id(parameter), name)
            if self.steps >= self._skip:
                sizes = self._activations.setdefault(name, {})
                size = sum(tensor.nbytes for tensor in tensors)
                sizes[self.steps] = sizes.get(self.steps, 0) + size

        def hook(_: torch.Tensor) -> None:
            if self._handles:
                self._mark("backward", name)

        for tensor in tensors:
            # A tensor that a layer passes on unchanged belongs to the layer that computed it.
            passed = any(tensor is t and tensor.grad_fn is made_by for t, made_by in call.inputs)
            # A leaf (a parameter that is returned) outlives the step; its gradient marks itself.
            if tensor.grad_fn is not None and not passed:
                self._outputs.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]

    # The layers of the intervals between the moments of a step.

    def _read(self, marks: list[_Mark]) -> None:
        """Record the times of a step; all of its moments have passed."""
        seconds, owners = _LayerSeconds(), self._owners
        idle = interval = _Mark(0.0, "idle")
        for before, mark in itertools.pairwise(marks):
            if before.kind == "ready":
                interval = _Mark(0.0, "backward", owners.get(before.parameter, interval.who))
            elif before.kind == "start":  # what comes before the first layer is the first layer's
                interval = _Mark(0.0, "forward", mark.who)
            elif before.kind in ("updated", "end"):
                interval = idle
            elif before.kind != "inside":
                interval = before
            elif interval.kind == "leave":
                interval = idle
            # Backward ends where something else begins: the time in between belongs to no layer.
            ended = interval.kind in ("backward", "leave") and mark.kind not in (
                "ready",
                "backward",
            )
            after, spent = (
                idle if ended else interval,
                Stopwatch.seconds(before.moment, mark.moment),
            )
            if mark.kind == "ready":
                self._had_gradient.add(mark.parameter)
                owner = owners.setdefault(mark.parameter, after.who or LOSS)
                seconds.backward[owner] = seconds.backward.get(owner, 0.0) + spent
            elif after.kind in ("forward", "leave"):
                seconds.forward[after.who] = seconds.forward.get(after.who, 0.0) + spent
            elif after.kind == "backward":
                seconds.backward[after.who] = seconds.backward.get(after.who, 0.0) + spent
            elif after.kind == "update":
                seconds.update += spent
            seconds.ran_backward |= mark.kind in ("ready", "backward")
        if seconds.forward and seconds.ran_backward:
            self._seconds.append(seconds)


class _Hook:
    """A hook that a model can be copied and pickled with: the copy's does nothing."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = weakref.WeakMethod(method) if method is not None else lambda: None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()

    @_disable_dynamo  # it is traced where m.compile() includes the hooks of m
    def __call__(self, *arguments: Any) -> None:
        method = self._method()
        if method is not None:
            method(*arguments)


def _modules(module: nn.Module, name: str = "") -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules that may have hooks: not what is inside a compiled or scripted one."""
    yield module, name
    # By its name: to import torch._dynamo takes seconds.
    compiled = type(module).__name__ == "OptimizedModule"
    if compiled or isinstance(module, torch.jit.ScriptModule):
        return
    for key, child in module.named_children():
        yield from _modules(child, f"{name}.{key}" if name else key)


def _medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return each layer's median, scaled to add up to the median of the sums."""
    names = dict.fromkeys(name for step in steps for name in step)
    middle = {name: median(step.get(name, 0.0) for step in steps) for name in names}
    total, added = median(sum(step.values()) for step in steps), sum(middle.values())
    scale = total / added if added > 0.0 else 1.0
    return {name: max(0.0, seconds * scale) for name, seconds in middle.items()}
