"""Hooks of modules, of which copies know nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hvd_pipe.torch.strategies.pending_parameters import ModuleHook, is_compiled


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_calls_nothing(copied: Callable[[nn.Module], nn.Module]) -> None:
    called: list[int] = []
    module = nn.Linear(3, 3)
    module.register_forward_pre_hook(ModuleHook(lambda: lambda _: called.append(1)))
    copied(module)(torch.ones(1, 3))
    assert not called
    module(torch.ones(1, 3))
    assert called == [1]


@pytest.mark.parametrize("compile_", [torch.compile, lambda module: module.compile() or module])
def test_a_compiled_module_is_known(compile_: Callable[[nn.Module], nn.Module]) -> None:
    layer = nn.Linear(2, 2)
    assert not is_compiled(layer)
    assert is_compiled(compile_(layer))
