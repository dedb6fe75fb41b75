"""What a strategy is given: the settings of a `DistributedOptimizer`, parameters by index."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime.consensus import Description
from hvd_pipe.runtime.gradient_index import GradientIndex
from hvd_pipe.torch.messages.allreduce import Reduction
from hvd_pipe.torch.parameters import gradient_dtype


class GradientHooks:
    """The hooks of an optimizer's parameters; engines that follow each other share them."""

    def __init__(self) -> None:
        self.engine: Callable[[], Any] = lambda: None
        """Returns the engine whose ``on_gradient`` is called."""
        self.places: dict[int, int] = {}
        """The index of a parameter, by its identity."""
        self._handles: dict[int, RemovableHandle] = {}

    def attach(self, engine: object, parameters: Sequence[torch.Tensor], hook: Any) -> None:
        """Call this engine for gradients; existing hooks keep their places among others."""
        self.engine = weakref.ref(engine)
        self.places = {id(parameter): index for index, parameter in enumerate(parameters)}
        for identity in self._handles.keys() - self.places.keys():
            self._handles.pop(identity).remove()
        for parameter in parameters:
            if id(parameter) not in self._handles:
                trains = parameter.requires_grad
                parameter.requires_grad_()  # or torch takes no hook: it may be frozen for now
                register = parameter.register_post_accumulate_grad_hook
                self._handles[id(parameter)] = register(hook)  # type: ignore[no-untyped-call]
                parameter.requires_grad_(trains)

    def are_alone(self) -> bool:
        """Return whether the parameters have no other hooks, which could read gradients."""
        return all(len(handle.hooks_dict_ref() or ()) == 1 for handle in self._handles.values())

    def end(self, engine: object = None) -> None:
        """Remove the hooks, unless they call another engine; None for an engine that is gone."""
        if self.engine() in (engine, None):
            for handle in self._handles.values():
                handle.remove()
            self._handles.clear()


@dataclass(frozen=True)
class Settings:
    """What a `DistributedOptimizer` was asked for, in terms of its parameters' indices."""

    names: Sequence[str]
    """The parameters' names, in an order that all ranks share."""
    parameters: Sequence[torch.Tensor]
    reduction: Reduction
    passes: int
    """Backward passes that make one gradient."""
    sparse_as_dense: bool
    tag: str
    """Begins the names of all messages."""
    groups: Sequence[Sequence[int]] | None
    """Gradients that the user groups by hand (indices), or None."""
    owner: Callable[[], Any]
    """Returns the user's optimizer (a `DistributedMixin`), or None where it is gone."""
    sparse: set[int] = field(default_factory=set)
    """Places of the gradients that all ranks know to be sparse."""
    known_as_dense: set[int] = field(default_factory=set)
    """The same of sparse gradients that travel as dense ones."""
    frozen: set[int] = field(default_factory=set)
    """Places of the parameters that were frozen in the last round."""
    hooks: GradientHooks = field(default_factory=GradientHooks)

    @property
    def optimizer(self) -> Any:
        """The user's optimizer, which engines do not keep alive; raises where it is gone."""
        owner = self.owner()
        if owner is None:
            raise HvdPipeError("the DistributedOptimizer of these parameters is gone: keep it.")
        return owner

    def with_parameters(self, joining: Mapping[str, torch.Tensor]) -> Settings:
        """Return the settings with more parameters behind, or in the place of the same name."""
        named = {**dict(zip(self.names, self.parameters, strict=True)), **joining}
        groups = self.groups
        if groups is not None:
            groups = [*groups, *([i] for i in range(len(self.names), len(named)))]
        parameters = list(named.values())
        return dataclasses.replace(self, names=list(named), parameters=parameters, groups=groups)

    @property
    def index(self) -> GradientIndex:
        """The parameters' names and sizes, and which may share a bucket."""
        return GradientIndex(
            self.names,
            [p.numel() * gradient_dtype(p).itemsize for p in self.parameters],
            [((p.dtype, gradient_dtype(p)), p.device) for p in self.parameters],
        )

    def wire_bytes(self) -> list[int]:
        """Return the size of each gradient as it is sent, after compression, in bytes."""
        sizes, index_of = [0] * len(self.parameters), self.index
        for indices in index_of.dtype_groups(range(len(sizes))):
            ratio = self.reduction.ratio(self.parameters[indices[0]])
            for index in indices:
                if index not in self.sparse:
                    sizes[index] = round(index_of.nbytes[index] * ratio)
        return sizes


@dataclass(frozen=True)
class State:
    """What an engine needs to go on bit for bit, beside the model and the user's optimizer."""

    counters: dict[str, Any]
    tensors: dict[str, list[torch.Tensor | None]]
    """By label (a gradient in flight, a codec's residuals), one tensor a parameter, or None."""


def describe(parameters: Mapping[str, torch.Tensor]) -> Description:
    """Describe each parameter in one line, which all ranks must have alike."""
    lines = []
    for name, parameter in parameters.items():
        layout = "" if parameter.is_contiguous() else f" with strides {parameter.stride()}"
        dtype = str(parameter.dtype).removeprefix("torch.")
        shape = f"{parameter.device.type} {dtype} {tuple(parameter.shape)}"
        if gradient_dtype(parameter) != parameter.dtype:
            layout += f", gradients {gradient_dtype(parameter)}".replace("torch.", "")
        lines.append(("a parameter", f"{name!r}: {shape}{layout}"))
    return lines
