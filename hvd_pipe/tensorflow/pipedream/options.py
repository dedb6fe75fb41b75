"""What the user asks of a pipeline, checked on every rank before anything is sent."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvd_pipe.pipeline import options
from hvd_pipe.planning.modes import MODES
from hvd_pipe.tensorflow.agree import Description
from hvd_pipe.tensorflow.keras.optimizer import DistributedMixin
from hvd_pipe.tensorflow.pipedream.graph import graph_of

__all__ = ["Options", "check_optimizer"]

SUPPORTED = ("stash", "2bw", "flush")


class Options(options.Options):
    """The arguments of `PipeDream`; it says what they mean."""

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
        if isinstance(self.optimizer_fn, keras.optimizers.Optimizer):
            raise TypeError(
                "optimizer_fn makes an optimizer for each stage: give a function, "
                f"lambda: keras.optimizers.{type(self.optimizer_fn).__name__}(...)"
            )
        alike = super().check(workers)
        if isinstance(self.metric_fn, keras.metrics.Metric):
            raise TypeError(
                "metric_fn is a function of targets and output, as "
                "keras.metrics.sparse_categorical_accuracy; a keras.metrics.Metric adds up by "
                f"itself, got {type(self.metric_fn).__name__}"
            )
        one, other = self.optimizer_fn(), self.optimizer_fn()
        check_optimizer(one)
        if one is other:
            raise ValueError(
                "optimizer_fn must make a new optimizer in each call, as each has its own "
                f"weights: lambda: keras.optimizers.{type(one).__name__}(...)"
            )
        return [
            *alike,
            ("layers of the model", ", ".join(call.name for call in graph.calls)),
            *((f"{each.path} of the model", _shape(each)) for each in self.model.variables),
        ]


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
            "use PipeDream(..., max_grad_norm=), or clipnorm, of each weight's gradient"
        )


def _shape(variable: Any) -> str:
    trained = ", trained" if variable.trainable else ""
    return f"{tf.as_dtype(variable.dtype).name} {tuple(variable.shape)}{trained}"
