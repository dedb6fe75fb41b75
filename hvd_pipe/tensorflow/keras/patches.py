"""Three places in Keras that must know of distributed optimizers, as nobody asks these.

- ``model.compile(jit_compile="auto")`` compiles with XLA wherever layers allow it. XLA cannot
  compile Horovod's messages, so with a distributed optimizer "auto" means no.
- LossScaleOptimizer, which ``compile`` puts around the optimizer under mixed_float16, decides by
  this rank's gradients whether there is an update. Ranks must decide alike, so with a distributed
  optimizer inside it decides by what has been averaged.
- Horovod's scripts write ``model.compile(..., experimental_run_tf_function=False)``, which older
  versions needed, and Keras 3 refuses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras.src.trainers import trainer

from hvd_pipe.tensorflow.keras.optimizer import DistributedMixin

__all__ = ["install"]


def install() -> None:
    """Let Keras ask; other optimizers are treated as ever."""
    if not hasattr(trainer.model_supports_jit, "__wrapped__"):
        trainer.model_supports_jit = _no_xla(trainer.model_supports_jit)
        scaler = keras.optimizers.LossScaleOptimizer
        scaler.apply = _alike(scaler.apply)
        trainer.Trainer.compile = _tolerant(trainer.Trainer.compile)


def _no_xla(supports_jit: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @functools.wraps(supports_jit)
    def asked(model: Any) -> bool:
        optimizer = getattr(model, "optimizer", None)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        return not isinstance(optimizer, DistributedMixin) and supports_jit(model)

    return asked


def _alike(apply: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(apply)
    def applied(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        inner = self.inner_optimizer
        if not isinstance(inner, DistributedMixin):
            apply(self, grads, trainable_variables)
            return
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(trainable_variables)
            self.built = True
        scale = self.dynamic_scale
        unscaled = [None if each is None else _divided(each, scale) for each in grads]
        inner._hvd_pipe_apply(unscaled, trainable_variables, self)

    return applied


def _tolerant(compile: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(compile)
    def compiled(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("experimental_run_tf_function", None)
        compile(self, *args, **kwargs)

    return compiled


def _divided(gradient: Any, scale: Any) -> Any:
    return keras.ops.divide(gradient, keras.ops.cast(scale, gradient.dtype))
