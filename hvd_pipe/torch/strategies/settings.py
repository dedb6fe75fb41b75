"""What a strategy is given: the settings of a `DistributedOptimizer`, parameters by index."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.runtime.bucket_planner import GradientIndex
from hvd_pipe.runtime.consensus import Description
from hvd_pipe.torch.messages.allreduce import Reduction
from hvd_pipe.torch.parameters import gradient_dtype
from hvd_pipe.torch.partial_updates import Options, updates_each_parameter, updates_quietly
from hvd_pipe.torch.strategies.backward_passes import GradientHooks


class Owner:
    """Leads an engine to the user's optimizer, without keeping that alive.

    Args:
        itself: Returns the optimizer, a `hvd_pipe.torch.engine_holder.EngineHolder`; None where it
            is gone. Who holds it keeps it alive.
    """

    def __init__(self, itself: Callable[[], Any]) -> None:
        self.itself, self.hooks = itself, GradientHooks()

    def _optimizer(self) -> Any:
        owner = self.itself()
        if owner is None:
            raise HvdPipeError("the DistributedOptimizer of these parameters is gone: keep it.")
        return owner

    def update(self) -> None:
        """Make one update with the gradients as they are."""
        self._optimizer()._update()

    def predict(self) -> None:
        """Move the weights as `update` would, and leave all else as it is."""
        self._optimizer()._predict_update()

    def updates_quietly(self) -> bool:
        """Return whether nobody but the optimizer takes part in an update: no hook, no scaler."""
        return updates_quietly(self._optimizer())

    def updates_each_parameter(self) -> bool:
        """Return whether updates of some parameters at a time equal one update of all."""
        return updates_each_parameter(self._optimizer())

    def options(self) -> Options:
        """Return what an update depends on beside gradients and state, as it is now."""
        return Options.of(self._optimizer())

    def update_some(self, parameters: Sequence[torch.Tensor], options: Options) -> None:
        """Update just these parameters, by the options that `options` has returned."""
        self._optimizer()._update_some(parameters, options)

    def settle(self, func: Any, args: tuple[Any, ...]) -> None:
        """Make gradients what ``step()`` will apply: this function of torch reads one of them."""
        self._optimizer()._gradients_are_read(func, args)

    def note_old(self) -> None:
        """Take what is in ``p.grad`` for applied: no update is to come of it."""
        self._optimizer()._note_old()

    def state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the optimizer's live state of a parameter; empty where there is none."""
        state: dict[str, Any] = self._optimizer().state.get(parameter, {})
        return state

    def new_parameters(self, known: set[int]) -> dict[str, torch.Tensor]:
        """Return the parameters, by name, that train and whose identities are not ``known``."""
        found: dict[str, torch.Tensor] = self._optimizer()._joining(known)
        return found


@dataclass(frozen=True)
class Settings:
    """What a `DistributedOptimizer` was asked for, in terms of its parameters' indices.

    Args:
        names: The parameters' names, in an order that all ranks share.
        parameters: The parameters, in the same order.
        reduction: How gradients are reduced.
        passes: Backward passes that make one gradient.
        sparse_as_dense: Whether sparse gradients may travel as dense ones.
        tag: Begins the names of all messages.
        groups: Gradients that the user groups by hand (indices), or None.
        owner: The user's optimizer.
        sparse: Places of the gradients that all ranks know to be sparse.
        frozen: Places of the parameters that were frozen in the last round.
    """

    names: Sequence[str]
    parameters: Sequence[torch.Tensor]
    reduction: Reduction
    passes: int
    sparse_as_dense: bool
    tag: str
    groups: Sequence[Sequence[int]] | None
    owner: Owner
    sparse: set[int] = field(default_factory=set)
    frozen: set[int] = field(default_factory=set)

    def with_parameters(self, joining: Mapping[str, torch.Tensor]) -> Settings:
        """Return the settings with more parameters, behind those that are there.

        One with the name of another takes its place: the optimizer has it in place of that.
        """
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
            [each.numel() * gradient_dtype(each).itemsize for each in self.parameters],
            [((each.dtype, gradient_dtype(each)), each.device) for each in self.parameters],
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
    """What an engine needs to go on bit for bit, beside the model and the user's optimizer.

    Args:
        counters: Numbers and strings by name: steps taken, a plan.
        tensors: By name, one tensor a parameter (by index), or None where there is none: a
            gradient in flight, a model's start of the round, a codec's residuals.
    """

    counters: dict[str, Any]
    tensors: dict[str, list[torch.Tensor | None]]


def describe(parameters: Mapping[str, torch.Tensor]) -> Description:
    """Say in a line a parameter what all ranks must have alike."""
    lines = []
    for name, parameter in parameters.items():
        layout = "" if parameter.is_contiguous() else f" with strides {parameter.stride()}"
        dtype = str(parameter.dtype).removeprefix("torch.")
        shape = f"{parameter.device.type} {dtype} {tuple(parameter.shape)}"
        if gradient_dtype(parameter) != parameter.dtype:
            layout += f", gradients {gradient_dtype(parameter)}".replace("torch.", "")
        lines.append(("a parameter", f"{name!r}: {shape}{layout}"))
    return lines
