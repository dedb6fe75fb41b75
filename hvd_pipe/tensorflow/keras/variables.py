"""Which variables of optimizers and models are what: momenta, slots, statistics."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import tensorflow as tf

from hvd_pipe.tensorflow.graphs import identity, raw
from hvd_pipe.tensorflow.keras_patches import noted_models
from hvd_pipe.tensorflow.strategies.base import Momentum

__all__ = ["momenta_of", "slots_of", "statistics_of"]

# Lists that do not have an entry of their own for each variable of the model.
_OTHER = frozenset({"_trainable_variables", "_variables"})
# Moving averages of the model are equalised by themselves, and sums of gradients are at zero
# whenever there has been an update.
_NO_MOMENTA = _OTHER | {"_accumulated_gradients", "_model_variables_moving_average"}

# What Keras' optimizers take a root of, or divide by.
_NONNEGATIVE = frozenset(
    {
        "accumulated_delta_vars",
        "accumulated_grads",
        "accumulators",
        "adam_velocities",
        "u",
        "v",
        "velocities",
        "velocity_hats",
    }
)


def slots_of(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return all that the optimizer keeps for these variables, of whatever shape.

    Args:
        optimizer: A built Keras optimizer.
        variables: Some of those that it was built with.
    """
    own = {id(each) for each in optimizer.variables}
    count = len(optimizer._trainable_variables)
    indices = [optimizer._get_variable_index(each) for each in variables]
    return [
        slots[index]
        for name, slots in vars(optimizer).items()
        if name not in _OTHER and isinstance(slots, list) and len(slots) == count
        for index in indices
        if id(slots[index]) in own
    ]


def momenta_of(optimizer: Any, variables: Sequence[Any]) -> list[Momentum]:
    """Return the momenta of these variables, in an order that all ranks share.

    Args:
        optimizer: A built Keras optimizer.
        variables: Some of those that it was built with.
    """
    own = {id(each) for each in optimizer.variables}
    indices = [optimizer._get_variable_index(each) for each in variables]
    found: list[Momentum] = []
    for name, slots in sorted(vars(optimizer).items()):
        if name in _NO_MOMENTA or not isinstance(slots, list):
            continue
        label = name.lstrip("_")
        for index, reference in zip(indices, variables, strict=True):
            slot = slots[index] if index < len(slots) else None
            if slot is None or id(slot) not in own or tuple(slot.shape) != tuple(reference.shape):
                continue
            if tf.as_dtype(slot.dtype).is_floating:
                of = str(getattr(reference, "path", reference.name))
                found.append(Momentum(raw(slot), f"{of}.{label}", label in _NONNEGATIVE))
    return found


def statistics_of(trained: Container[int], kept: Container[int]) -> list[Any]:
    """Return the moving averages of all models that have some of the trained variables.

    Args:
        trained: The `identity` of each trainable variable.
        kept: That of each variable that each rank has for itself.
    """
    found: dict[int, Any] = {}
    for model in noted_models():
        if any(identity(each) in trained for each in model.trainable_variables):
            for layer in model._flatten_layers():
                if not getattr(layer, "stateful", False):  # the states of a rank's own samples
                    found |= {id(each): each for each in layer._non_trainable_variables}
    return [
        each
        for each in found.values()
        if tf.as_dtype(each.dtype).is_floating and identity(each) not in kept
    ]
