"""Find the statistics (BatchNormalization's) of the models whose variables an optimizer trains.

An optimizer sees trainable variables only. A model shows itself when one of its
BatchNormalization layers computes the moments of a batch: Keras then knows the outermost layer
that was called.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from typing import Any

import tensorflow as tf

from hvd_pipe.tensorflow.strategies.engine import identity

__all__ = ["note_layer", "note_model", "statistics_of"]

_models: list[weakref.ref[Any]] = []


def note_layer(layer: Any) -> None:
    """Remember the model of a layer that is being called in training."""
    note_model(layer._get_call_context().entry_layer)


def note_model(model: Any) -> None:
    """Remember a model that is trained."""
    if all(reference() is not model for reference in _models):
        _models[:] = [reference for reference in _models if reference() is not None]
        _models.append(weakref.ref(model))


def statistics_of(trained: Container[int], kept: Container[int]) -> list[Any]:
    """Return the moving averages of all models that have some of the trained variables.

    Args:
        trained: The `identity` of each trainable variable.
        kept: That of each variable that each rank has for itself.
    """
    models = [model for model in (reference() for reference in _models) if model is not None]
    found: dict[int, Any] = {}
    for model in models:
        if any(identity(each) in trained for each in model.trainable_variables):
            for layer in model._flatten_layers():
                if not getattr(layer, "stateful", False):  # the states of a rank's own samples
                    found |= {id(each): each for each in layer._non_trainable_variables}
    return [
        each
        for each in found.values()
        if tf.as_dtype(each.dtype).is_floating and identity(each) not in kept
    ]
