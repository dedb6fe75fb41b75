"""What a strategy is given: the settings of a `DistributedOptimizer`, and its parameters by index.

`default_groups` and `plan_groups` say which gradients share a bucket.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from hvd_pipe.planning import merge
from hvd_pipe.planning.plan import Plan
from hvd_pipe.torch.agree import Description
from hvd_pipe.torch.messages.allreduce import Reduction

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "Owner",
    "Settings",
    "State",
    "default_groups",
    "describe",
    "dtype_groups",
    "plan_groups",
]

DEFAULT_BUCKET_BYTES = 8 * 2**20


class Owner(Protocol):
    """What an engine asks of the user's optimizer."""

    def update(self) -> None:
        """Make one update with the gradients as they are."""

    def predict(self) -> None:
        """Move the weights as `update` would, and leave all else as it is."""

    def note_old(self) -> None:
        """Take what is in ``p.grad`` for applied: no update is to come of it."""

    def state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the optimizer's live state of a parameter; empty where there is none."""

    def new_parameters(self, known: set[int]) -> dict[str, torch.Tensor]:
        """Return the parameters, by name, that train and whose identities are not ``known``."""


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
        """Return the settings with more parameters, behind the ones that are there."""
        first = len(self.parameters)
        groups = self.groups
        if groups is not None:
            groups = [*groups, *([first + i] for i in range(len(joining)))]
        return dataclasses.replace(
            self,
            names=[*self.names, *joining],
            parameters=[*self.parameters, *joining.values()],
            groups=groups,
        )

    def nbytes(self, index: int) -> int:
        """Return the size of a gradient in bytes."""
        return self.parameters[index].numel() * self.parameters[index].element_size()

    def wire_bytes(self) -> list[int]:
        """Return the size of each gradient as it is sent, after compression, in bytes."""
        sizes = [0] * len(self.parameters)
        for indices in dtype_groups(self.parameters):
            ratio = self.reduction.ratio(self.parameters[indices[0]])
            for index in indices:
                if index not in self.sparse:
                    sizes[index] = round(self.nbytes(index) * ratio)
        return sizes

    def as_plan(self, groups: Sequence[Sequence[int]], method: str) -> Plan:
        """Return groups of indices as a plan of names."""
        return Plan(tuple(tuple(self.names[i] for i in group) for group in groups), method)


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
        lines.append(("a parameter", f"{name!r}: {shape}{layout}"))
    return lines


def dtype_groups(parameters: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group indices by dtype and device: only equals share a buffer. Order is kept."""
    found: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, parameter in enumerate(parameters):
        found.setdefault((parameter.dtype, parameter.device), []).append(index)
    return list(found.values())


def default_groups(
    settings: Settings, bucket_bytes: int | None, first: int = 0
) -> list[list[int]]:
    """Fill buckets in reverse order of registration, about the order in which backward goes.

    Args:
        settings: The parameters.
        bucket_bytes: Size of a bucket at most; 1 for one tensor a bucket, None for one bucket.
        first: The first index that counts; those before it are left out.
    """
    groups: list[list[int]] = []
    for indices in dtype_groups(settings.parameters[first:]):
        order = [first + index for index in reversed(indices)]
        sizes = [settings.nbytes(index) for index in order]
        start = 0
        for count in merge.by_bytes(sizes, bucket_bytes or sum(sizes)).tolist():
            groups.append(order[start : start + count])
            start += count
    return groups


def plan_groups(plan: Plan, settings: Settings) -> list[list[int]]:
    """Return the plan in terms of indices.

    Raises:
        ValueError: The plan is not about these parameters, or mixes dtypes in one bucket.
    """
    index = {name: i for i, name in enumerate(settings.names)}
    unknown = [name for name in plan.names if name not in index]
    absent = [name for name in index if name not in set(plan.names)]
    if unknown or absent:
        what = f"names {unknown[0]!r}, no parameter" if unknown else f"lacks {absent[0]!r}, one"
        raise ValueError(
            f"the plan {what} of this optimizer's ({len(plan.names)} names in the plan, "
            f"{len(index)} trainable parameters): make a new one with plan='auto', or pass "
            "named_parameters=model.named_parameters() as when it was made."
        )
    groups = [[index[name] for name in bucket] for bucket in plan.buckets]
    for bucket, group in zip(plan.buckets, groups, strict=True):
        if len(dtype_groups([settings.parameters[i] for i in group])) > 1:
            raise ValueError(
                f"the plan's bucket {bucket[0]!r} .. {bucket[-1]!r} mixes dtypes or devices: "
                "split it so that each bucket has one of each."
            )
    return groups
