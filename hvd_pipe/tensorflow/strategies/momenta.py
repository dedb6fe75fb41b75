"""Which variables of a Keras optimizer are momenta: a value for each value of a model variable.

Keras' optimizers keep them in lists, one entry a trainable variable: ``momentums``,
``_velocities``, ``_accumulators``, ... Counters, learning rates and Adafactor's row and column
sums have other shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_pipe.tensorflow.strategies.engine import Momentum, raw

__all__ = ["momenta_of", "slots_of"]

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
    places = [optimizer._get_variable_index(each) for each in variables]
    return [
        slots[place]
        for name, slots in vars(optimizer).items()
        if name not in _OTHER and isinstance(slots, list) and len(slots) == count
        for place in places
        if id(slots[place]) in own
    ]


def momenta_of(optimizer: Any, variables: Sequence[Any]) -> list[Momentum]:
    """Return the momenta of these variables, in an order that all ranks share.

    Args:
        optimizer: A built Keras optimizer.
        variables: Some of those that it was built with.
    """
    own = {id(each) for each in optimizer.variables}
    places = [optimizer._get_variable_index(each) for each in variables]
    found: list[Momentum] = []
    for name, slots in sorted(vars(optimizer).items()):
        if name in _NO_MOMENTA or not isinstance(slots, list):
            continue
        label = name.lstrip("_")
        for place, reference in zip(places, variables, strict=True):
            slot = slots[place] if place < len(slots) else None
            if slot is None or id(slot) not in own or tuple(slot.shape) != tuple(reference.shape):
                continue
            if tf.as_dtype(slot.dtype).is_floating:
                of = str(getattr(reference, "path", reference.name))
                found.append(Momentum(raw(slot), f"{of}.{label}", label in _NONNEGATIVE))
    return found
