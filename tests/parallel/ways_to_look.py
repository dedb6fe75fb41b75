"""Ways in which scripts read and write weights, gradients and states between two steps."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

import hvd_pipe.torch as hvd


@dataclass
class Script:
    """A training script, between two of its steps.

    ``kept`` are the parameters, ``aliases`` what lies over their memory, ``models`` copies that
    are trained along; ``log`` is what was read.
    """

    model: nn.Module
    optimizer: Any
    kept: list[nn.Parameter]
    aliases: list[Any] = field(default_factory=list)
    log: list[float] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)

    def note(self, value: Any) -> None:
        self.log.append(float(value))


X = torch.ones(2, 8, dtype=torch.float64)

Way = Callable[[Script], object]

WAYS: dict[str, Way] = {}
KEEPS_ALIASES = ("a kept .data", "a kept array", "a kept view")
ALL_AT_ONCE = (*KEEPS_ALIASES, "vector_to_parameters", "share_memory_", "freezing and thawing")
"""Somebody holds all weights' memory, which then must be up to date when step() returns; or ranks
compare in step() which parameters they train."""


def way(name: str) -> Callable[[Way], Way]:
    def add(look: Way) -> Way:
        WAYS[name] = look
        return look

    return add


def simple(name: str, look: Callable[[list[nn.Parameter]], Any]) -> None:
    """Add a way that reads numbers from the kept parameters."""
    WAYS[name] = lambda script: script.note(look(script.kept))


simple("sums", lambda kept: sum(float(p.sum()) for p in kept))
simple("numpy", lambda kept: sum(p.detach().numpy().sum() for p in kept))
simple("DLPack", lambda kept: sum(float(torch.from_dlpack(p.detach()).sum()) for p in kept))
simple("_foreach_norm", lambda kept: sum(map(float, torch._foreach_norm(list(kept)))))
simple("F.linear", lambda kept: nn.functional.linear(X, kept[0], bias=kept[1]).sum())
simple("data_ptr", lambda kept: _at(kept[1].data_ptr(), kept[1].numel()))
simple(
    "an out= argument",
    lambda kept: torch.mul(kept[1].detach(), 2, out=torch.zeros(16).double()).sum(),
)
simple("torch.func.grad", lambda kept: torch.func.grad(lambda w: (w * w).sum())(kept[1]).sum())
simple("torch.func.vmap", lambda kept: torch.func.vmap(lambda w: w * 2)(kept[1]).sum())
simple("pickle", lambda kept: sum(float(p.sum()) for p in pickle.loads(pickle.dumps(list(kept)))))
simple("torch.save of parameters", lambda kept: sum(float(p.sum()) for p in _saved(list(kept))))


def _at(address: int, count: int) -> float:
    return sum((ctypes.c_double * count).from_address(address))


def _saved(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@way("torch.save of a state dict")
def save(script: Script) -> None:
    script.note(sum(float(v.double().sum()) for v in _saved(script.model.state_dict()).values()))


@way("deepcopy")
def deep(script: Script) -> None:
    script.note(sum(float(p.sum()) for p in copy.deepcopy(script.model).parameters()))


@way("evaluation")
def evaluate(script: Script) -> None:
    script.model.eval()
    with torch.no_grad():
        script.note(script.model(X).sum())
    script.model.train()


@way("AveragedModel")
def averaged(script: Script) -> None:
    if not script.models:
        script.models.append(AveragedModel(script.model))
    script.models[0].update_parameters(script.model)  # type: ignore[operator]


@way("an EMA, swapped in and back")
def swapped(script: Script) -> None:
    with torch.no_grad():
        before = [p.clone() for p in script.kept]
        for parameter in script.kept:
            parameter.mul_(0.9)
        script.note(script.model(X).sum())
        for parameter, value in zip(script.kept, before, strict=True):
            parameter.copy_(value)


@way("clamp_ of .data")
def clamp_data(script: Script) -> None:
    for parameter in script.kept:
        parameter.data.clamp_(-0.2, 0.2)


@way("vector_to_parameters")
def to_vector(script: Script) -> None:
    vector = parameters_to_vector(script.kept).detach() * 0.99
    vector_to_parameters(vector, script.model.parameters())


@way("_foreach_mul_")
@torch.no_grad()
def foreach_write(script: Script) -> None:
    torch._foreach_mul_(list(script.kept), 0.99)


@way("out= of itself")
@torch.no_grad()
def out_of_itself(script: Script) -> None:
    torch.add(script.kept[1], script.kept[1], alpha=-0.01, out=script.kept[1])


@way("set_")
@torch.no_grad()
def set_(script: Script) -> None:
    script.kept[1].set_(script.kept[1].clone() * 0.9)  # type: ignore[call-overload]


@way("pruning")
def pruned(script: Script) -> None:
    layer = script.model.get_submodule("0")
    prune.l1_unstructured(layer, "weight", amount=0.3)
    prune.remove(layer, "weight")


@way("load_state_dict")
def load(script: Script) -> None:
    script.model.load_state_dict({k: v * 0.99 for k, v in script.model.state_dict().items()})


@way("another .data")
def other_data(script: Script) -> None:
    for parameter in script.kept:
        parameter.data = parameter.data * 0.99


@way("another dtype and back")
def cast(script: Script) -> None:
    script.model.float().double()


@way("share_memory_")
def share(script: Script) -> None:
    for parameter in script.kept:
        parameter.share_memory_()


@way("gradients after step()")
def gradients(script: Script) -> None:
    script.note(sum(float(p.grad.abs().sum()) for p in script.kept if p.grad is not None))


@way("zero_grad(set_to_none=False)")
def zeros(script: Script) -> None:
    script.optimizer.zero_grad(set_to_none=False)


@way("a state that is read")
def state(script: Script) -> None:
    for values in script.optimizer.state.values():
        script.note(sum(float(v.abs().sum()) for v in values.values() if v is not None))


@way("a state that is cleared")
def clear_state(script: Script) -> None:
    for values in script.optimizer.state.values():
        for value in values.values():
            if value is not None and value.dim():
                value.zero_()


@way("the optimizer's state dict")
def state_dict(script: Script) -> None:
    for values in script.optimizer.state_dict()["state"].values():
        script.note(sum(float(v.abs().sum()) for v in values.values() if v is not None))


@way("another learning rate")
def rate(script: Script) -> None:
    script.optimizer.param_groups[0]["lr"] *= 0.97


@way("freezing and thawing")
def freeze(script: Script) -> None:
    script.kept[0].requires_grad_(not script.kept[0].requires_grad)


@way("a kept .data")
def kept_data(script: Script) -> None:
    script.note(sum(float(each.sum()) for each in script.aliases[:-2]))


@way("a kept array")
def kept_array(script: Script) -> None:
    script.note(script.aliases[-2].sum())


@way("a kept view")
@torch.no_grad()
def kept_view(script: Script) -> None:
    script.aliases[-1].mul_(0.9)


@way("a broadcast")
def broadcast(script: Script) -> None:
    hvd.broadcast_parameters(script.model.named_parameters(), root_rank=1)
    script.note(sum(float(p.sum()) for p in script.kept))
