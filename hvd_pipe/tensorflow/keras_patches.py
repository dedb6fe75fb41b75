"""Patches to functions of Keras and TensorFlow that must know of distributed optimizers.

`install` makes them, at ``hvd.init()`` or when the first optimizer or tape is distributed; nothing
is patched at import. `PATCHES` lists them all. Optimizers that are not distributed are treated as
ever.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from horovod.tensorflow.mpi_ops import is_initialized, size
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.trainers import trainer
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

from hvd_pipe.tensorflow import pending
from hvd_pipe.tensorflow.sync_batch_norm import moments_of_all

trained_models: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""The models that have been trained, in this order."""

_expects_distributed = False


def note_distributed() -> None:
    """Take it that the script distributes its optimizers."""
    global _expects_distributed  # noqa: PLW0603 - one a process, as Horovod itself
    _expects_distributed = True


def _warn_of_plain(model: Any) -> None:
    """Say once that a model trains on each rank by itself."""
    global _expects_distributed  # noqa: PLW0603
    if _expects_distributed and _is_of_keras(model) and is_initialized() and size() > 1:
        _expects_distributed = False
        name = type(model.optimizer).__name__
        warnings.warn(
            f"model.fit trains with a {name} that is not distributed, each rank by itself (said "
            "once). Copies of a model, and models from files, have a "
            "plain optimizer: compile with hvd.DistributedOptimizer(model.optimizer), or load by "
            "hvd.load_model.",
            stacklevel=3,
        )


def _is_of_keras(model: Any) -> bool:
    """Whether a step is Keras' own: another `train_step` may train other variables."""
    return type(model).train_step is tensorflow_trainer.TensorFlowTrainer.train_step


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizer that a model was compiled with, and those in its attributes."""
    values = [getattr(model, "optimizer", None)]  # none before `compile`
    for attribute in vars(model).values():
        parts = attribute.values() if isinstance(attribute, dict) else attribute
        values += parts if isinstance(attribute, list | tuple | dict) else [attribute]
    unique = {id(v): v for v in values if isinstance(v, keras.optimizers.Optimizer)}
    return list(unique.values())


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Make an optimizer's variables; a trace that makes them is made twice."""
    with keras.name_scope(optimizer.name, caller=optimizer):
        optimizer.build(variables)


def _distributed(optimizer: Any) -> Any:
    """Return the distributed optimizer that this is, or that LossScaleOptimizer wraps, or None."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return inner if hasattr(inner, "_hvd_pipe") else None


def _no_xla(supports_jit: Callable[[Any], bool]) -> Callable[[Any], bool]:
    @functools.wraps(supports_jit)
    def asked(model: Any) -> bool:
        return _distributed(getattr(model, "optimizer", None)) is None and supports_jit(model)

    return asked


def _alike(apply: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(apply)
    def applied(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        inner = _distributed(self)
        if inner is None:
            apply(self, grads, trainable_variables)
            return
        if not self.built:
            build(self, trainable_variables)
        scale, divide, cast = self.dynamic_scale, keras.ops.divide, keras.ops.cast
        unscaled = [g if g is None else divide(g, cast(scale, g.dtype)) for g in grads]
        inner._hvd_pipe_apply(unscaled, trainable_variables, self)

    return applied


def _tolerant(compile: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(compile)
    def compiled(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("experimental_run_tf_function", None)
        optimizer = args[0] if args else kwargs.get("optimizer")
        if kwargs.get("jit_compile") is True and _distributed(optimizer) is not None:
            warnings.warn(
                "XLA cannot compile Horovod's messages: write model.compile(..., "
                "jit_compile=False); going on so.",
                stacklevel=2,
            )
            kwargs["jit_compile"] = False
        compile(self, *args, **kwargs)

    return compiled


def _prepared(fit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fit)
    def fitted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _distributed(getattr(self, "optimizer", None)) is not None:
            bound = inspect.signature(fit).bind(self, *args, **kwargs).arguments
            given = bound.get("callbacks", kwargs.get("callbacks"))  # another may have wrapped fit
            given = getattr(given, "callbacks", given)
            for callback in given if isinstance(given, list | tuple) else [given]:
                _refuse_keras_2(callback)
            is_ready = _is_of_keras(self) and all(layer.built for layer in self._flatten_layers())
            if is_ready and not self.optimizer.built:
                build(self.optimizer, self.trainable_weights)
        elif getattr(self, "optimizer", None) is not None:
            _warn_of_plain(self)
        distributed = [opt for opt in map(_distributed, optimizers_of(self)) if opt is not None]
        for optimizer in distributed:
            optimizer._hvd_pipe.fit_ended = False
        try:
            return fit(self, *args, **kwargs)
        finally:  # also after an exception, of a callback as `fit` ends, say
            for optimizer in distributed:
                if optimizer._hvd_pipe.watcher is not None:
                    optimizer._hvd_pipe.watcher.takes(None)
                if optimizer._hvd_pipe.fit_ended:
                    unlike = [session.end_fit() for session in optimizer._hvd_pipe]
                    if any(unlike):
                        optimizer.synchronize()

    return fitted


def _refuse_keras_2(callback: Any) -> None:
    for cls in type(callback).__mro__:
        if not cls.__module__.startswith("horovod."):
            continue
        if cls.__name__.startswith(("Broadcast", "MetricAverage", "LearningRate")):
            raise TypeError(
                f"{cls.__module__}.{cls.__name__} is for Keras 2, and fails under Keras "
                f"{keras.__version__}: pass hvd_pipe.tensorflow.keras.callbacks.{cls.__name__}, "
                "with the same arguments."
            )
        if cls.__name__ == "UpdateBatchStateCallback":
            warnings.warn(
                f"{cls.__module__}.{cls.__name__} cannot shorten an epoch under Keras 3, and "
                "counts the batches of one that was interrupted from 0: pass "
                f"hvd_pipe.tensorflow.keras.elastic.{cls.__name__}.",
                stacklevel=4,
            )


def _over_ranks(moments: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(moments)
    def moments_over_ranks(self: Any, inputs: Any, mask: Any) -> Any:
        if self.synchronized and is_initialized() and not tf.distribute.has_strategy():
            return moments_of_all(self, inputs, mask)
        trained_models[self._get_call_context().entry_layer] = None  # the outermost layer
        return moments(self, inputs, mask)

    return moments_over_ranks


class Patch(NamedTuple):
    """One function, of a module or a class, that another takes the place of."""

    owner: Any
    name: str
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
    """Returns the function that calls it."""
    reason: str
    """Why it must know of distributed optimizers."""


PATCHES = (
    Patch(
        trainer,
        "model_supports_jit",
        _no_xla,
        "jit_compile='auto' compiles with XLA wherever layers allow it. XLA cannot compile "
        "Horovod's messages, so with a distributed optimizer 'auto' means no.",
    ),
    Patch(
        keras.optimizers.LossScaleOptimizer,
        "apply",
        _alike,
        "It decides by this rank's gradients whether there is an update. Ranks must decide alike, "
        "so with a distributed optimizer inside it decides by what has been averaged.",
    ),
    Patch(
        trainer.Trainer,
        "compile",
        _tolerant,
        "Horovod's scripts write experimental_run_tf_function=False, which older versions needed "
        "and Keras 3 refuses. jit_compile=True is turned off, with a warning.",
    ),
    Patch(
        tensorflow_trainer.TensorFlowTrainer,  # TensorFlow's trainer has a `fit` of its own
        "fit",
        _prepared,
        "Horovod's callbacks are of Keras 2: most fail with an AttributeError. With a distributed "
        "optimizer, fit says at once which ones to take instead. It builds the optimizer.",
    ),
    Patch(
        keras.layers.BatchNormalization,
        "_moments",
        _over_ranks,
        "BatchNormalization(synchronized=True) knows the replicas of tf.distribute only. It is "
        "what a SyncBatchNormalization is in a file, and must not become a local one when it is "
        "loaded. The same method tells which models have statistics (`keras.accumulation`).",
    ),
    Patch(
        ConcreteFunction,
        "_call_flat",
        pending.looked_at,
        "Under overlap='forward', a step leaves updates to the next one. A graph that uses such a "
        "variable between the two, as evaluate and predict do, must find the update made.",
    ),
)


@functools.cache
def install() -> None:
    """Make all patches, once a process."""
    for patch in PATCHES:
        setattr(patch.owner, patch.name, patch.wrap(getattr(patch.owner, patch.name)))
