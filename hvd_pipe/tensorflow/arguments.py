"""Check what an optimizer or a tape was given, and put it into the terms of the engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf
from horovod.tensorflow.mpi_ops import Adasum, Average, Sum

from hvd_pipe.runtime import arguments
from hvd_pipe.runtime.consensus import Description
from hvd_pipe.strategy import Auto, CoCoD, MergedGradient, Method, PipeSGD, Strategy
from hvd_pipe.tensorflow.compression import Codec
from hvd_pipe.tensorflow.messages.buckets import Shapes
from hvd_pipe.tensorflow.messages.reduction import Reduction

TAPE = "a gradient tape"
"""The `Arguments.owner` of tapes."""


@dataclass(frozen=True, kw_only=True)
class Arguments(arguments.Arguments):
    """What the user passed beside the optimizer or tape."""

    ops: ClassVar = {Average: arguments.AVERAGE, Sum: "Sum"}
    codec = Codec
    noun = "variable"

    owner: str
    """What errors call the optimizer or tape."""
    device_dense: str
    device_sparse: str
    scale_local_gradients: bool
    average_aggregated_gradients: bool = False
    accumulation_steps: int | None = None
    """What a Keras optimizer was given to accumulate."""

    def __deepcopy__(self, _: Any) -> Arguments:
        """Return these: a copy of a process set is none that Horovod knows."""
        return self

    def check(self) -> Strategy:
        """Return the strategy, or raise TypeError or ValueError; sends nothing."""
        if self.op == Adasum:
            raise ValueError(
                "op=hvd.Adasum is not for Keras optimizers and tapes, as in Horovod: use "
                "op=hvd.Average, or hvd_pipe.torch."
            )
        strategy = self.check_values()
        for name in ("average_aggregated_gradients", "scale_local_gradients"):
            self.check_type(name, bool, "True or False")
        for name in ("device_dense", "device_sparse"):
            self.check_type(name, str, "a device's name such as '/gpu:0', or '' for any")
        if isinstance(strategy, Auto):
            self.candidates(strategy)
            return strategy
        if not isinstance(strategy, MergedGradient | PipeSGD | CoCoD):
            raise ValueError(
                f"{strategy.name!r} has no engine for TensorFlow: use hvd_pipe.torch, or another "
                "strategy."
            )
        if isinstance(strategy, MergedGradient) and strategy.overlaps_forward:
            self._check_overlap(strategy)
        self.check_method(strategy)
        return strategy

    def check_alone(self) -> Strategy:
        """Check on a worker of an elastic job, where ranks come and go."""
        strategy = self.check()
        if isinstance(strategy, Auto):
            raise ValueError(
                "strategy='auto' chooses for the workers that it has measured, and in an elastic "
                f"job they change: name the strategy, {MergedGradient.name!r} say."
            )
        self.check_elastic(strategy)
        return strategy

    def candidates(self, auto: Auto) -> tuple[tuple[Method, ...], dict[str, str]]:
        """Return the methods that ``auto`` may choose, and by name why others are excluded."""

        def check(method: Method) -> None:
            if isinstance(method, MergedGradient) and method.overlaps_forward:
                raise ValueError(
                    "auto does not choose overlap='forward' under Keras: name the strategy "
                    "'merged-gradient:overlap=forward', which goes on with the barrier where that "
                    "is faster."
                )
            self.check_method(method)

        return self.choices(auto, check)

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
        factor, device = self.gradient_predivide_factor, self.device_dense
        return Reduction(self.op, factor, self.compression, self.process_set, device)

    def describe(self, strategy: Strategy) -> Description:
        """Say in lines what this rank is about to do; all ranks must say the same."""
        plan = strategy.load_plan() if isinstance(strategy, MergedGradient) else None
        return [
            ("what is distributed", self.owner),
            *self.describe_values(strategy, plan),
            ("average_aggregated_gradients", str(self.average_aggregated_gradients)),
            ("the optimizer's gradient_accumulation_steps", str(self.accumulation_steps)),
            ("scale_local_gradients", str(self.scale_local_gradients)),
        ]


def shapes_of(variables: Sequence[Any]) -> Shapes:
    """Describe variables, Keras' or TensorFlow's; names that come twice are numbered."""
    names: list[str] = []
    counts: dict[str, int] = {}
    for variable in variables:
        name = str(getattr(variable, "path", variable.name))
        count = counts[name] = counts.get(name, 0) + 1
        names.append(name if count == 1 else f"{name}#{count}")
    return Shapes(
        names,
        [tuple(variable.shape) for variable in variables],
        [tf.as_dtype(variable.dtype) for variable in variables],
    )
