"""Hooks of modules that a copy or a pickle of the module does not take along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ModuleHook", "copy_first"]


class ModuleHook:
    """Calls a function with no arguments, whatever kind of hook it is; a copy calls nothing.

    Args:
        call: What to call before, or after, what the module does.
        before_copy: What to call before the module is copied; see `copy_first`.
    """

    def __init__(
        self,
        call: Callable[[], object] | None = None,
        before_copy: Callable[[], object] | None = None,
    ) -> None:
        self._call, self._before_copy = call, before_copy

    def __call__(self, *_: Any) -> None:
        if self._call is not None and not torch.compiler.is_compiling():
            self._call()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._before_copy is not None:
            self._before_copy()
        return ModuleHook, ()


def copy_first(module: torch.nn.Module) -> None:
    """Have copies and pickles of a module meet its hooks of ``state_dict()`` before all else.

    They take a module's attributes in their order, and parameters come before hooks as a rule.
    """
    attributes = dict(module.__dict__)
    hooks = {"_state_dict_pre_hooks": attributes.pop("_state_dict_pre_hooks")}
    module.__dict__.clear()
    module.__dict__.update(hooks | attributes)
