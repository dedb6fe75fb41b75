"""Check what an optimizer or a tape was given, and put it into the terms of the engines."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from horovod.tensorflow.mpi_ops import Adasum, Average, ProcessSet, Sum

from hvd_pipe.runtime.argument_checks import (
    allowed,
    check_buckets,
    check_compression,
    check_groups,
    check_passes,
    check_process_set,
    check_scaling,
    describe_strategy,
    refuse_for_cocod,
    refuse_ranks,
)
from hvd_pipe.runtime.timeline import DIRECTORY
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, Method, Strategy, parse
from hvd_pipe.tensorflow.agree import Description
from hvd_pipe.tensorflow.compression import Codec
from hvd_pipe.tensorflow.messages.buckets import Shapes
from hvd_pipe.tensorflow.messages.reduction import Reduction

__all__ = ["TAPE", "Arguments", "shapes_of"]

TAPE = "a gradient tape"
"""The `Arguments.owner` of tapes."""


@dataclass(frozen=True)
class Arguments:
    """What the user passed beside the optimizer or tape: Horovod's arguments, and the strategy.

    Args:
        owner: How errors call what they are for.
        accumulation_steps: What a Keras optimizer was given to accumulate.
    """

    owner: str
    compression: Any
    sparse_as_dense: bool
    op: Any
    gradient_predivide_factor: float
    groups: Any
    process_set: ProcessSet
    device_dense: str
    device_sparse: str
    scale_local_gradients: bool
    strategy: str | Strategy | None
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    accumulation_steps: int | None = None

    def __deepcopy__(self, _: Any) -> Arguments:
        """Return these: a copy of a process set is none that Horovod knows."""
        return self

    def check(self) -> Strategy:
        """Return the strategy; looks at this rank only and sends nothing.

        Raises:
            TypeError, ValueError: What cannot be; the message says what to do.
        """
        strategy = parse(self.strategy)
        if self.op == Adasum:
            raise ValueError(
                "op=hvd.Adasum is not for Keras optimizers and tapes, as in Horovod: use "
                "op=hvd.Average, or hvd_pipe.torch."
            )
        if not isinstance(self.op, int) or self.op not in _OP_NAMES:
            raise ValueError(f"op must be hvd.Average or hvd.Sum, got {self.op!r}.")
        check_scaling(self.gradient_predivide_factor, self.op == Average)
        check_compression(self.compression, Codec)
        check_process_set(self.process_set)
        for name in ("sparse_as_dense", "average_aggregated_gradients", "scale_local_gradients"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        for name in ("device_dense", "device_sparse"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(
                    f"{name} must be a device's name such as '/gpu:0', or '' for any, got "
                    f"{getattr(self, name)!r}."
                )
        check_passes(self.backward_passes_per_step)
        if self.groups is not None:
            check_groups(self.groups, "variable")
        if isinstance(strategy, Auto):
            self.candidates(strategy)
        else:
            self._check_strategy(strategy)
        return strategy

    def check_alone(self) -> Strategy:
        """Check on a worker of an elastic job, where ranks come and go.

        Raises:
            TypeError, ValueError: As `check`; also what names ranks.
        """
        strategy = self.check()
        if isinstance(strategy, Auto):
            raise ValueError(
                "strategy='auto' chooses for the workers that it has measured, and in an elastic "
                f"job they change: name the strategy, {MergedGradient.name!r} say."
            )
        refuse_ranks(
            has_weights=isinstance(strategy, CoCoD) and strategy.weights is not None,
            process_set=self.process_set,
        )
        if os.environ.get(DIRECTORY):
            warnings.warn(f"{DIRECTORY}: elastic jobs write no timeline", stacklevel=4)
        return strategy

    def candidates(self, auto: Auto) -> tuple[tuple[Method, ...], dict[str, str]]:
        """Return what ``auto`` may choose from here; and why not from the rest, by name.

        Raises:
            ValueError: Nothing is left.
        """
        return allowed(auto, self._check_allowed)

    def _check_allowed(self, strategy: Method) -> None:
        if isinstance(strategy, MergedGradient) and strategy.overlaps_forward:
            raise ValueError(
                "auto does not choose overlap='forward' under Keras: name the strategy "
                "'merged-gradient:overlap=forward', which goes on with the barrier where that is "
                "faster."
            )
        self._check_strategy(strategy)

    def _check_strategy(self, strategy: Method) -> None:
        if isinstance(strategy, MergedGradient) and strategy.overlaps_forward:
            self._check_overlap(strategy)
        if isinstance(strategy, CoCoD):
            refuse_for_cocod(
                strategy,
                is_average=self.op == Average,
                gradient_predivide_factor=self.gradient_predivide_factor,
                has_groups=self.groups is not None,
                process_set=self.process_set,
            )
        check_buckets(strategy, self.groups is not None)

    def _check_overlap(self, strategy: MergedGradient) -> None:
        if self.owner == TAPE:
            raise ValueError(
                "overlap='forward' is for optimizers under model.fit, which has a place before "
                "the forward pass where updates of the step before are made: leave it out for a "
                "gradient tape."
            )
        plan = strategy.load_plan()
        fixed = strategy.plan != "auto" and (plan is None or plan.order is None)
        if fixed or strategy.bucket_bytes is not None or self.groups is not None:
            raise ValueError(
                "overlap='forward' plans its own messages under Keras: leave bucket_bytes, "
                "groups and plan out, or give a plan with an order."
            )

    def reduction(self) -> Reduction:
        """Return how gradients are reduced."""
        return Reduction(
            self.op,
            self.gradient_predivide_factor,
            self.compression,
            self.process_set,
            self.device_dense,
        )

    def describe(self, strategy: Strategy) -> Description:
        """Say in lines what this rank is about to do; all ranks must say the same."""
        codec = self.compression
        name = repr(codec) if isinstance(codec, Codec) else _name_of(codec)
        plan = strategy.load_plan() if isinstance(strategy, MergedGradient) else None
        return [
            ("what is distributed", self.owner),
            ("strategy", describe_strategy(strategy, plan)),
            ("op", _OP_NAMES[self.op]),
            ("gradient_predivide_factor", str(self.gradient_predivide_factor)),
            ("compression", name),
            ("backward_passes_per_step", str(self.backward_passes_per_step)),
            ("average_aggregated_gradients", str(self.average_aggregated_gradients)),
            ("the optimizer's gradient_accumulation_steps", str(self.accumulation_steps)),
            ("sparse_as_dense", str(self.sparse_as_dense)),
            ("scale_local_gradients", str(self.scale_local_gradients)),
        ]


_OP_NAMES = {Average: "Average", Sum: "Sum"}


def _name_of(compression: Any) -> str:
    return str(getattr(compression, "__name__", type(compression).__name__))


def shapes_of(variables: Sequence[Any]) -> Shapes:
    """Describe variables, Keras' or TensorFlow's; names that come twice are numbered."""
    names: list[str] = []
    seen: dict[str, int] = {}
    for each in variables:
        name = str(getattr(each, "path", each.name))
        count = seen[name] = seen.get(name, 0) + 1
        names.append(name if count == 1 else f"{name}#{count}")
    return Shapes(
        names,
        [tuple(each.shape) for each in variables],
        [tf.as_dtype(each.dtype) for each in variables],
    )
