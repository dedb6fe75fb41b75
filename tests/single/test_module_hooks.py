"""Hooks by which modules bring their parameters up to date, and the watching of their uses."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hvd_pipe.torch.measuring.first_uses import FirstUses, is_compiled
from hvd_pipe.torch.module_hooks import ModuleHook, copy_first


class Scaled(nn.Module):
    """Owns a parameter beside its child's, as a ViT its class token."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.own)


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("owner", ["", "layer"])
def test_a_copy_has_what_a_hook_has_brought_up_to_date(
    copied: Callable[[nn.Module], nn.Module], owner: str
) -> None:
    """Of the module that is copied, too: its parameters stand before its hooks as a rule."""
    module = Scaled().get_submodule(owner)

    def update() -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(7.0)

    module.register_state_dict_pre_hook(ModuleHook(before_copy=update))
    copy_first(module)
    found = copied(module)
    assert all(bool((parameter == 7.0).all()) for parameter in found.parameters())
    found.state_dict()  # its hook calls nothing
    assert list(found.state_dict()) == list(module.state_dict())


def test_a_scripted_part_counts_as_compiled() -> None:
    """TorchScript refuses hooks of state_dict(), and runs none inside."""
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 1)))
    watched = FirstUses(list(model.parameters()))
    watched.begin()
    model(torch.ones(1, 3)).sum().backward()
    for index in range(4):
        watched.mark(index)
    watched.end_step()
    assert watched.uses().compiled
    watched.close()


@pytest.mark.parametrize("compile_", [torch.compile, lambda module: module.compile() or module])
def test_a_compiled_module_is_known(compile_: Callable[[nn.Module], nn.Module]) -> None:
    layer = nn.Linear(2, 2)
    assert not is_compiled(layer)
    assert is_compiled(compile_(layer))
