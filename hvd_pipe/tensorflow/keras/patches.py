"""Five places in Keras that must know of Horovod, as nobody asks ours.

- ``model.compile(jit_compile="auto")`` compiles with XLA wherever layers allow it. XLA cannot
  compile Horovod's messages, so with a distributed optimizer "auto" means no.
- LossScaleOptimizer, which ``compile`` puts around the optimizer under mixed_float16, decides by
  this rank's gradients whether there is an update. Ranks must decide alike, so with a distributed
  optimizer inside it decides by what has been averaged.
- Horovod's scripts write ``model.compile(..., experimental_run_tf_function=False)``, which older
  versions needed, and Keras 3 refuses.
- Horovod's callbacks are of Keras 2: most fail in ``fit`` with an AttributeError. With
  a distributed optimizer, ``fit`` says at once which ones to take instead.
- ``BatchNormalization(synchronized=True)`` knows ``tf.distribute``'s replicas only. That is what a
  SyncBatchNormalization is in a file, and it must not become a local one when it is loaded. The
  same method tells which models have statistics (`hvd_pipe.tensorflow.keras.variables`).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from horovod.tensorflow.mpi_ops import is_initialized
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.trainers import trainer

from hvd_pipe.tensorflow.keras.optimizer import DistributedMixin
from hvd_pipe.tensorflow.keras.variables import note_layer
from hvd_pipe.tensorflow.sync_batch_norm import moments_of_all

__all__ = ["install"]


def install() -> None:
    """Let Keras ask; other optimizers are treated as ever."""
    if not hasattr(trainer.model_supports_jit, "__wrapped__"):
        trainer.model_supports_jit = _no_xla(trainer.model_supports_jit)
        scaler = keras.optimizers.LossScaleOptimizer
        scaler.apply = _alike(scaler.apply)
        trainer.Trainer.compile = _tolerant(trainer.Trainer.compile)
        # TensorFlow's trainer has a `fit` of its own.
        tensorflow_trainer.TensorFlowTrainer.fit = _with_own_callbacks(
            tensorflow_trainer.TensorFlowTrainer.fit
        )
        normalization = keras.layers.BatchNormalization
        normalization._moments = _over_ranks(normalization._moments)


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
        optimizer = args[0] if args else kwargs.get("optimizer")
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        if kwargs.get("jit_compile") is True and isinstance(optimizer, DistributedMixin):
            warnings.warn(
                "XLA cannot compile Horovod's messages: write model.compile(..., "
                "jit_compile=False); going on so.",
                stacklevel=2,
            )
            kwargs["jit_compile"] = False
        compile(self, *args, **kwargs)

    return compiled


_KERAS_2 = ("Broadcast", "MetricAverage", "LearningRate")
"""What the names of Horovod's callbacks begin with that call what Keras 3 lacks."""

_MISCOUNTS = "UpdateBatchStateCallback"


def _with_own_callbacks(fit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fit)
    def fitted(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = getattr(self, "optimizer", None)
        if isinstance(getattr(optimizer, "inner_optimizer", optimizer), DistributedMixin):
            given = inspect.signature(fit).bind(self, *args, **kwargs).arguments.get("callbacks")
            for each in given if isinstance(given, list | tuple) else [given]:
                _refuse_keras_2(each)
        return fit(self, *args, **kwargs)

    return fitted


def _refuse_keras_2(callback: Any) -> None:
    for cls in type(callback).__mro__:
        if cls.__module__.startswith("horovod.") and cls.__name__.startswith(_KERAS_2):
            raise TypeError(
                f"{cls.__module__}.{cls.__name__} is for Keras 2, and fails under Keras "
                f"{keras.__version__}: pass hvd_pipe.tensorflow.keras.callbacks.{cls.__name__}, "
                "with the same arguments."
            )
        if cls.__module__.startswith("horovod.") and cls.__name__ == _MISCOUNTS:
            warnings.warn(
                f"{cls.__module__}.{cls.__name__} cannot shorten an epoch under Keras 3, and "
                "counts the batches of one that was interrupted from 0: pass "
                f"hvd_pipe.tensorflow.keras.elastic.{_MISCOUNTS}.",
                stacklevel=4,
            )


def _over_ranks(moments: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(moments)
    def found(self: Any, inputs: Any, mask: Any) -> Any:
        if self.synchronized and is_initialized() and not tf.distribute.has_strategy():
            return moments_of_all(self, inputs, mask)
        note_layer(self)
        return moments(self, inputs, mask)

    return found


def _divided(gradient: Any, scale: Any) -> Any:
    return keras.ops.divide(gradient, keras.ops.cast(scale, gradient.dtype))
