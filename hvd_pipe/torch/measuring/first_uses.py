"""Where a step first uses each parameter: which module's forward pass is running then, and when.

A parameter need not be used where it is owned. ``nn.MultiheadAttention`` reads
``out_proj.weight`` and never calls ``out_proj``; tied weights are read by another module; a script
may read them itself. So some steps are watched, with a mode that sees the arguments of every
function of torch, and hooks that know which module is running.

::

    end of step()                                                first gradient
    |---- forward_s ---------------------------------------------|
      module a   module b                  loss
      |          |- b.weight, a.bias        a.weight, in no module
      needed_s of a.weight ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.hooks import RemovableHandle

from hvd_pipe.torch.measuring.clock import Moment, Stopwatch
from hvd_pipe.torch.module_hooks import ModuleHook

__all__ = ["FirstUses", "Uses"]

_READS = ("data", "T", "mT", "H", "mH", "real", "imag")
"""The attributes of a tensor that lead to its values; others tell of its form."""

_FORM = frozenset(
    (
        "__hash__",
        "__len__",
        "__set__",
        "data_ptr",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "nelement",
        "numel",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "size",
        "storage_offset",
        "stride",
        "type",
    )
)
"""Functions of a tensor that read no value."""


@dataclass
class Uses:
    """What has been seen of some steps, by the parameters' index.

    Args:
        modules: The modules before whose forward pass a parameter must be up to date: those that
            have it, and those whose forward pass has used it first.
        roots: The outermost modules that were called.
        outside: Parameters that are used where no module is running, in more than half of the
            steps (a checkpoint may be written in one of them), or nobody has seen where.
        needed_s: Seconds after the end of a step at which each is needed.
        ready_s: Seconds after the first gradient at which each gradient is ready.
        forward_s: Seconds from the end of a step to the first gradient.
        backward_s: Seconds from there to the next call of ``step()``.
        compiled: Whether a module was called that is compiled: hooks do not run inside.
    """

    modules: dict[int, list[torch.nn.Module]] = field(default_factory=dict)
    roots: list[torch.nn.Module] = field(default_factory=list)
    outside: set[int] = field(default_factory=set)
    needed_s: list[float] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    forward_s: float = 0.0
    backward_s: float = 0.0
    compiled: bool = False


class FirstUses:
    """Watches steps, from the end of one ``step()`` to the next call.

    Args:
        parameters: Whose uses; by index.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._count = len(parameters)
        self._stopwatch = Stopwatch(parameters[0].device)
        self._mode = _Mode(self._note_arguments)
        self._hooks: list[RemovableHandle] = []
        self._hooks_of_states: list[RemovableHandle] = []
        self._running: list[torch.nn.Module] = []
        self._sites: dict[int, dict[int, torch.nn.Module]] = {}
        self._roots: dict[int, torch.nn.Module] = {}
        self._saving = 0
        self._outside: Counter[int] = Counter()
        self._compiled = False
        self._begun: Moment | None = None
        self._ready: dict[int, Moment] = {}
        self._seen: dict[int, Moment] = {}
        self._steps: list[tuple[list[float], list[float], float, float]] = []

    @property
    def count(self) -> int:
        """How many parameters are watched."""
        return self._count

    @property
    def steps(self) -> int:
        """Steps with a backward pass that were watched."""
        return len(self._steps)

    def begin(self) -> None:
        """Watch from now on: a step has ended."""
        forward = torch.nn.modules.module
        self._hooks = [
            forward.register_module_forward_pre_hook(self._enter),
            forward.register_module_forward_hook(self._leave, always_call=True),
        ]
        self._running.clear()
        self._seen.clear()
        self._ready.clear()
        self._begun = self._stopwatch.now()
        _push_mode(self._mode)  # type: ignore[no-untyped-call]

    def mark(self, index: int) -> None:
        """Note a gradient: after the first one of a step, uses do not matter."""
        self._ready[index] = self._stopwatch.now()

    def end_step(self) -> None:
        """Watch no longer: the next ``step()`` is called."""
        if self._begun is None:
            return
        _take_out(self._mode)
        for hook in self._hooks:
            hook.remove()
        begun, now = self._begun, self._stopwatch.now()
        self._begun = None
        if not self._ready:
            return
        Stopwatch.wait(now)
        first = min(self._ready.values(), key=lambda moment: Stopwatch.seconds(begun, moment))
        forward_s, backward_s = Stopwatch.seconds(begun, first), Stopwatch.seconds(first, now)
        every = range(self._count)
        needed = [self._since(begun, self._seen.get(i), forward_s) for i in every]
        ready = [self._since(first, self._ready.get(i), backward_s) for i in every]
        self._steps.append((needed, ready, forward_s, backward_s))

    @staticmethod
    def _since(begun: Moment, moment: Moment | None, else_s: float) -> float:
        return else_s if moment is None else max(0.0, Stopwatch.seconds(begun, moment))

    def close(self) -> None:
        """Watch no more steps."""
        self.end_step()
        for hook in self._hooks_of_states:
            hook.remove()
        self._hooks_of_states.clear()

    def uses(self) -> Uses:
        """Return what was seen: the earliest need of all steps, medians of the rest."""
        needed, ready, forward_s, backward_s = zip(*self._steps, strict=True)
        sites = {i: dict(each) for i, each in self._sites.items()}
        for root in self._roots.values():
            for module in root.modules():
                for i in self._owned(module):
                    sites.setdefault(i, {})[id(module)] = module
        outside = {i for i, count in self._outside.items() if 2 * count > self.steps}
        unseen = set(self._ready) - set(self._sites)
        return Uses(
            {i: list(each.values()) for i, each in sites.items()},
            list(self._roots.values()),
            outside | unseen | (set(range(self._count)) - set(sites)),
            [min(each) for each in zip(*needed, strict=True)],
            [median(each) for each in zip(*ready, strict=True)],
            median(forward_s),
            median(backward_s),
            self._compiled,
        )

    def _enter(self, module: torch.nn.Module, _: object) -> None:
        if self._ready or torch.compiler.is_compiling():
            return
        self._compiled |= is_compiled(module)
        if not self._running and id(module) not in self._roots:
            self._roots[id(module)] = module
            for each in module.modules():
                if isinstance(each, torch.jit.ScriptModule):
                    self._compiled = True
                    continue
                self._hooks_of_states += [
                    each.register_state_dict_pre_hook(ModuleHook(self._save)),  # type: ignore[no-untyped-call]
                    each.register_state_dict_post_hook(ModuleHook(self._saved)),  # type: ignore[no-untyped-call]
                ]
        self._running.append(module)
        for index in self._owned(module):
            self._note(index, module)

    def _leave(self, module: torch.nn.Module, *_: object) -> None:
        if not torch.compiler.is_compiling() and module in self._running:
            while self._running.pop() is not module:
                pass

    def _save(self) -> None:
        """A module's ``state_dict()`` reads its parameters: it waits for them by itself."""
        self._saving += 1

    def _saved(self) -> None:
        self._saving -= 1

    def _note_arguments(self, arguments: Iterable[Any]) -> None:
        if self._ready or self._saving:
            return
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                index = self._index.get(id(argument))
                if index is not None:
                    self._note(index, self._running[-1] if self._running else None)
            elif isinstance(argument, (list, tuple)):
                self._note_arguments(argument)

    def _note(self, index: int, module: torch.nn.Module | None) -> None:
        """Take down a use; the first one of a step counts."""
        if index in self._seen:
            return
        self._seen[index] = self._stopwatch.now()
        if module is None:
            self._outside[index] += 1
        else:
            self._sites.setdefault(index, {})[id(module)] = module

    def _owned(self, module: torch.nn.Module) -> set[int]:
        found = (id(p) for p in module._parameters.values())
        return {self._index[each] for each in found if each in self._index}


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether ``torch.compile`` has been asked to run a module's forward pass."""
    # By its name: to import torch._dynamo takes seconds.
    whole = type(module).__name__ == "OptimizedModule"
    return whole or module._compiled_call_impl is not None


class _Mode(TorchFunctionMode):
    """Shows the arguments of every function of torch that may read a value."""

    def __init__(self, note: Callable[[Iterable[Any]], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute in _READS if name == "__get__" else name not in _FORM:
            self._note((*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))


def _take_out(mode: TorchFunctionMode) -> None:
    """Take a mode out, wherever it is: a script may have entered others, and not left them yet."""
    others = []
    while mode in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        top = _pop_mode()  # type: ignore[no-untyped-call]
        if top is not mode:
            others.append(top)
    for other in reversed(others):
        _push_mode(other)  # type: ignore[no-untyped-call]
