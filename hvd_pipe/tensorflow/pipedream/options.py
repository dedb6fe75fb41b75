"""What the user asks of a pipeline, checked on every rank before anything is sent."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvd_pipe.pipeline.checks import check_microbatches, check_positive
from hvd_pipe.pipeline.plans import read_plan
from hvd_pipe.pipeline.transport import check_transport
from hvd_pipe.planning.modes import MODES, Mode
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.stages import Partition
from hvd_pipe.tensorflow.agree import Description
from hvd_pipe.tensorflow.keras.optimizer import DistributedMixin
from hvd_pipe.tensorflow.pipedream.graph import graph_of

__all__ = ["Options", "check_optimizer"]

SUPPORTED = ("stash", "2bw", "flush")


@dataclass
class Options:
    """The arguments of `PipeDream`; it says what they mean."""

    model: Any
    loss_fn: Callable[[Any, Any], Any]
    optimizer_fn: Callable[[], Any]
    plan: str | os.PathLike[str] | Partition
    mode: str
    microbatches: int | None
    transport: str
    scale_lr: bool
    metric_fn: Callable[[Any, Any], Any] | None
    profile: ModelProfile | str | os.PathLike[str] | None
    bandwidth: float | None
    memory_bytes: float | None
    progress: bool
    recompute: bool = False
    """Not for Keras models: what is kept for backward is TensorFlow's to decide."""

    @property
    def modes(self) -> Mode:
        """What ``mode`` names."""
        return MODES[self.mode]

    def check(self, workers: int) -> Description:
        """Check all arguments, and return what ranks must have alike.

        Raises:
            TypeError, ValueError: One of them cannot be; says what can.
        """
        graph = graph_of(self.model)
        if not self.model.trainable_variables:
            raise ValueError(f"the model {self.model.name!r} has no weight to train.")
        if self.mode not in SUPPORTED:
            more = (
                f"; {self.mode!r} is for PyTorch only (hvd_pipe.torch.pipedream)"
                if self.mode in MODES
                else ""
            )
            raise ValueError(
                f"mode must be one of {', '.join(SUPPORTED)}, got {self.mode!r}{more}"
            )
        request = read_plan(self.plan, workers)
        check_transport(self.transport)
        self._check_functions()
        check_microbatches(self.microbatches, self.modes)
        for name in ("bandwidth", "memory_bytes"):
            check_positive(name, getattr(self, name))
        if self.profile is not None and not isinstance(self.profile, ModelProfile):
            self.profile = ModelProfile.read(self.profile)
        return [
            ("the mode of the pipeline", self.mode),
            ("the plan of the pipeline", str(request)),
            ("microbatches", str(self.microbatches)),
            ("the pipeline's options", self._alike()),
            ("layers of the model", ", ".join(call.name for call in graph.calls)),
            *((f"{each.path} of the model", _shape(each)) for each in self.model.variables),
        ]

    def _check_functions(self) -> None:
        if isinstance(self.optimizer_fn, keras.optimizers.Optimizer):
            raise TypeError(
                "optimizer_fn makes an optimizer for each stage: give a function, "
                f"lambda: keras.optimizers.{type(self.optimizer_fn).__name__}(...)"
            )
        for name, least in (("loss_fn", "a function"), ("optimizer_fn", "a function")):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} must be {least}, got {getattr(self, name)!r}")
        if self.metric_fn is not None and not callable(self.metric_fn):
            raise TypeError(f"metric_fn must be a function or None, got {self.metric_fn!r}")
        if isinstance(self.metric_fn, keras.metrics.Metric):
            raise TypeError(
                "metric_fn is a function of targets and output, as "
                "keras.metrics.sparse_categorical_accuracy; a keras.metrics.Metric adds up by "
                f"itself, got {type(self.metric_fn).__name__}"
            )
        check_optimizer(self.optimizer_fn())

    def _alike(self) -> str:
        shown = [f"{name}={getattr(self, name)}" for name in ("transport", "scale_lr")]
        shown += [f"bandwidth={self.bandwidth}", f"profile={self.profile is not None}"]
        shown += [f"metric_fn={self.metric_fn is not None}"]
        return ", ".join(shown)


def check_optimizer(optimizer: Any) -> None:
    """Raise unless each stage can have such an optimizer for itself.

    Raises:
        TypeError, ValueError: It cannot; says what can.

    Example:
        >>> check_optimizer(keras.optimizers.SGD(0.1, clipnorm=1.0))
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"optimizer_fn must return a Keras optimizer, got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, DistributedMixin):
        raise TypeError(
            "optimizer_fn must return the plain optimizer, and not a DistributedOptimizer: a "
            "pipeline averages over the replicas of each stage by itself"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "a pipeline's stages cannot scale losses by themselves: use the policy "
            "'mixed_bfloat16' in place of 'mixed_float16', without a LossScaleOptimizer"
        )
    if optimizer.global_clipnorm is not None:
        raise ValueError(
            f"global_clipnorm={optimizer.global_clipnorm} would be the norm of one stage only: "
            "use clipnorm, of each weight's gradient, or clipvalue"
        )


def _shape(variable: Any) -> str:
    trained = ", trained" if variable.trainable else ""
    return f"{tf.as_dtype(variable.dtype).name} {tuple(variable.shape)}{trained}"
