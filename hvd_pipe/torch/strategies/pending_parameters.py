"""Parameters whose update is due: no code reads an old weight.

While its update waits for a message, a parameter is pending (`hvd_pipe.torch.pending_tensors`),
and its memory is out of reach: in its place it has NaN, one number in the shape of all. Code of
torch settles it at its first use; code that Python does not see meets NaN, or cannot write::

    step()          hold          p is pending, its memory aside
    forward         a hook of the module that has p, before it runs: settle
    anything else   p.sum(), p.data, deepcopy, state_dict: settle

A parameter waits only if it belongs to a module that was called, and if nothing else holds its
memory (a kept ``p.data``, a view, an array, another process), which no function would show.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvd_pipe.torch import pending_tensors
from hvd_pipe.torch.parameters import ModelFinder

Memory = tuple[int, bool]

FIND_STEPS = 5
"""Steps after which no further model is looked for."""


class PendingParameters:
    """Holds the parameters of one optimizer, by index; ``memory`` is `memory_of` them when new.

    Two methods, which are not kept alive: ``use`` is called with the indices of those that are
    about to be used, and calls `show`; ``replace`` before a module loads other weights.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        memory: dict[int, Memory],
        use: Callable[[Collection[int]], object],
        replace: Callable[[torch.nn.Module], object],
    ) -> None:
        self._parameters = parameters
        self._use, self._replace = weakref.WeakMethod(use), weakref.WeakMethod(replace)
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._absent = [_absent(parameter) for parameter in parameters]
        self._memory = memory
        self.owner: object = None
        """What has to live as long as a parameter is pending."""
        self.sees_all_uses = True
        """Whether Python has seen a use of each parameter that had a gradient, while watched."""
        self._gated: set[int] = set()
        self._aside: dict[int, torch.Tensor] = {}
        self._watched: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._finder = ModelFinder(self._add_hooks, FIND_STEPS, through_graph=False)
        self._finder.look_for(parameters)

    def watch(self) -> None:
        """Report the first use of each parameter; their values are all up to date."""
        self._finder.end_step()
        self.show_all()
        self._watched = set(self._gated)
        for index in self._watched:
            pending_tensors.hold(self._parameters[index], self._settle)

    def note_gradient(self, index: int) -> None:
        """Hold a parameter no more if it has a gradient, and was used by code in C++ alone."""
        if index in self._watched:
            self._gated.discard(index)
            self.sees_all_uses = False

    def hold(self, owner: object) -> set[int]:
        """Make parameters pending; return the indices of those that cannot be."""
        self._finder.end_step()
        sample, not_held, self.owner = torch.empty(1), set(), owner
        storage = sample.untyped_storage()
        alone, settle, aside = _count(storage), self._settle, self._aside
        for index, (parameter, absent) in enumerate(
            zip(self._parameters, self._absent, strict=True)
        ):
            if index not in self._gated or self._has_other_holders(parameter, alone):
                not_held.add(index)
                continue
            aside[index] = parameter.data
            parameter.data = absent
            pending_tensors.hold(parameter, settle)
        return not_held

    def _has_other_holders(self, parameter: torch.Tensor, alone: int) -> bool:
        """Return whether a parameter's memory may be reached by anything but the parameter."""
        storage = parameter.untyped_storage()
        before, is_torchs = self._memory.get(id(parameter), (None, False))
        if before != storage._cdata:  # an array whose memory this is counts as no holder
            self._memory[id(parameter)] = _, is_torchs = _memory(parameter)
        is_shared = parameter.is_cpu and storage.is_shared()  # with other processes
        return not is_torchs or is_shared or _count(storage) > alone

    def show(self, indices: Iterable[int]) -> None:
        """Give these parameters their memory back, to be updated; other threads still wait."""
        with torch._C.DisableTorchFunctionSubclass():
            for index in indices:
                if index in self._aside:
                    self._parameters[index].data = self._aside[index]

    def release(self, indices: Iterable[int]) -> None:
        """End the waiting for these, which were shown and are updated."""
        for index in indices:
            if self._aside.pop(index, None) is not None:
                pending_tensors.release(self._parameters[index])

    def show_all(self) -> None:
        """As `show` and `release`; nothing is pending any more."""
        held = list(self._aside)
        self.show(held)
        self.release(held)
        while self._watched:
            pending_tensors.release(self._parameters[self._watched.pop()])

    def close(self) -> None:
        """Show all parameters, and remove the hooks."""
        self.show_all()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._gated.clear()

    def _settle(self, parameter: torch.Tensor, func: Any, args: tuple[Any, ...]) -> None:
        self._settle_some((self._index[id(parameter)],))

    def _before_module(self, indices: Collection[int], module: torch.nn.Module) -> None:
        if not (self._aside or self._watched):
            return
        if not (module.training or torch.is_grad_enabled()):
            # Attention layers look at all weights within them before they take their fast path.
            self._settle_some(range(len(self._parameters)))
        elif not (self._aside.keys().isdisjoint(indices) and self._watched.isdisjoint(indices)):
            self._settle_some(indices)

    def _settle_some(self, indices: Collection[int]) -> None:
        for index in self._watched.intersection(indices):
            self._watched.discard(index)
            pending_tensors.release(self._parameters[index])
        use = self._use()
        if use is not None:
            use(indices)

    def _add_hooks(self, root: torch.nn.Module, _: set[int]) -> None:
        """Have a model's modules settle their own parameters before they run."""
        self._gate(root)
        for module in root.modules():
            if isinstance(module, torch.jit.ScriptModule):  # reads them in C++
                self._gated -= self._indices_of(module.parameters())
            else:
                hook = ModuleHook(self._replace)
                self._hooks.append(module.register_load_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]

    def _gate(self, module: torch.nn.Module) -> set[int]:
        """Gate a module and those in it; return what to settle before it (compiled: all of it)."""
        if isinstance(module, torch.jit.ScriptModule):
            return set()
        compiled = is_compiled(module)
        if compiled:
            indices = self._indices_of(module.parameters())
            if module._compiled_call_impl is not None:
                return indices
        else:
            indices = self._indices_of(module._parameters.values())
            for child in module.children():
                indices |= self._gate(child)
        if indices:
            gate = ModuleHook(weakref.WeakMethod(self._before_module), frozenset(indices))
            self._hooks.append(module.register_forward_pre_hook(gate, prepend=True))
            self._gated |= indices
        return set()

    def _indices_of(self, parameters: Iterable[torch.Tensor | None]) -> set[int]:
        indices = (self._index.get(id(parameter)) for parameter in parameters)
        return {index for index in indices if index is not None}


def memory_of(parameters: Iterable[torch.Tensor]) -> dict[int, Memory]:
    """Return the memory of each parameter, by identity, and whether torch alone has it."""
    return {id(parameter): _memory(parameter) for parameter in parameters}


def _memory(parameter: torch.Tensor) -> Memory:
    storage = parameter.untyped_storage()
    return storage._cdata, storage.resizable()


class ModuleHook:
    """Calls a method with the module, whatever kind of hook it is; a copy calls nothing."""

    def __init__(self, method: Callable[[], Any] = lambda: None, *arguments: Any) -> None:
        self._method, self._arguments = method, arguments

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        method = None if torch.compiler.is_compiling() else self._method()
        if method is not None:
            method(*self._arguments, module)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, ()


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether ``torch.compile`` has been asked to run a module's forward pass."""
    # By its name: to import torch._dynamo takes seconds.
    whole = type(module).__name__ == "OptimizedModule"
    return whole or module._compiled_call_impl is not None


def _absent(parameter: torch.Tensor) -> torch.Tensor:
    one = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
    return one.expand(parameter.shape)


def _count(storage: torch.UntypedStorage) -> int:
    """Return the number of references to this memory, as torch counts them."""
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)
