"""Sum up the gradients of several passes (minibatches) into one, which is then exchanged.

``backward_passes_per_step`` of Horovod and ``gradient_accumulation_steps`` of Keras end here. What
is summed up so far is saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from hvd_pipe.tensorflow.arguments import Arguments
from hvd_pipe.tensorflow.graphs import Arrays, branch, identity, raw, restore, variable
from hvd_pipe.tensorflow.keras_patches import trained_models
from hvd_pipe.tensorflow.sessions import Session
from hvd_pipe.tensorflow.strategies.base import Momentum

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
    """Return all that the optimizer keeps for these variables, of whatever shape."""
    own = {id(variable) for variable in optimizer.variables}
    count = len(optimizer._trainable_variables)
    indices = [optimizer._get_variable_index(variable) for variable in variables]
    return [
        slots[index]
        for name, slots in vars(optimizer).items()
        if name not in _OTHER and isinstance(slots, list) and len(slots) == count
        for index in indices
        if id(slots[index]) in own
    ]


def momenta_of(optimizer: Any, variables: Sequence[Any]) -> list[Momentum]:
    """Return the momenta of these variables, in an order that all ranks share."""
    own = {id(variable) for variable in optimizer.variables}
    indices = [optimizer._get_variable_index(variable) for variable in variables]
    momenta: list[Momentum] = []
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
                momenta.append(Momentum(raw(slot), f"{of}.{label}", label in _NONNEGATIVE))
    return momenta


def statistics_of(trained: Container[int], kept: Container[int]) -> list[Any]:
    """Return the moving averages of all models that have some of the trained variables."""
    statistics: dict[int, Any] = {}
    for model in list(trained_models):
        if any(identity(variable) in trained for variable in model.trainable_variables):
            for layer in model._flatten_layers():
                if not getattr(layer, "stateful", False):  # the states of a rank's own samples
                    statistics |= {id(v): v for v in layer._non_trainable_variables}
    return [
        variable
        for variable in statistics.values()
        if tf.as_dtype(variable.dtype).is_floating and identity(variable) not in kept
    ]


class _Window(NamedTuple):
    """The passes of a session that make one gradient, so far."""

    passes: tf.Variable
    """The number of passes in all windows up to now."""
    sums: Sequence[tf.Variable]
    """The sum of the gradients of this window, for each variable."""
    named: dict[str, tf.Variable]
    """What a state holds of it."""


class Accumulation:
    """The accumulated gradients of one distributed optimizer."""

    def __init__(self, optimizer: Any, arguments: Arguments) -> None:
        self._optimizer, self._arguments = optimizer, arguments
        self._windows: dict[int, _Window] = {}
        self._resumed: Arrays = {}
        self.applying: int | None = None
        """Keras' accumulation steps, while an accumulated gradient is applied."""

    @property
    def passes(self) -> int:
        """How many passes make a gradient; users may set Keras' number at any time."""
        steps = self._optimizer.gradient_accumulation_steps
        return int(steps or self._arguments.backward_passes_per_step)

    def add(
        self,
        session: Session,
        variables: Sequence[Any],
        gradients: Sequence[Any],
        step: Callable[[list[Any]], None],
    ) -> None:
        """Add the gradients of a pass; ``step`` is given their sum where it is complete."""
        passes, optimizer, arguments = self.passes, self._optimizer, self._arguments
        is_mean = optimizer.gradient_accumulation_steps or arguments.average_aggregated_gradients
        share = 1.0 / passes if is_mean else 1.0
        window = self._window(session, variables)
        sums = window.sums
        # What has no gradient keeps none, and neither its sum.
        pairs = [
            None if gradient is None else (tf.convert_to_tensor(gradient), total)
            for gradient, total in zip(gradients, sums, strict=True)
        ]

        def last() -> None:
            totals = [None if pair is None else (pair[0] + pair[1]) * share for pair in pairs]
            for total in sums:
                total.assign(tf.zeros(total.shape, total.dtype))
            with self.suspended():
                step(totals)

        def another() -> None:
            for gradient, total in filter(None, pairs):
                total.assign_add(gradient)
            optimizer._iterations.assign_add(1)

        count = window.passes.assign_add(1)
        tf.cond(tf.equal(count % passes, 0), branch(last), branch(another))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let Keras apply a gradient without accumulating it once more."""
        optimizer = self._optimizer
        steps = optimizer.gradient_accumulation_steps
        self.applying, optimizer.gradient_accumulation_steps = steps, None
        try:
            yield
        finally:
            self.applying, optimizer.gradient_accumulation_steps = None, steps

    def state(self) -> Arrays:
        """Return what has been summed up."""
        windows = self._windows.values()
        named = {name: variable for window in windows for name, variable in window.named.items()}
        return {**self._resumed, **{name: variable.numpy() for name, variable in named.items()}}

    def load(self, state: Arrays) -> None:
        """Go on from a `state`; {} holds nothing."""
        self._resumed = dict(state)
        for window in self._windows.values():
            restore(window.named, state)

    def _window(self, session: Session, variables: Sequence[Any]) -> _Window:
        optimizer, number = self._optimizer, session.number
        if number in self._windows:
            return self._windows[number]
        passes = variable([], tf.int64, f"hvd_pipe.passes.{number}")
        named = {f"{number}.passes": passes}
        steps = optimizer.gradient_accumulation_steps
        if steps:  # Keras keeps the sums, files have them
            gradients = optimizer._accumulated_gradients
            sums = [raw(gradients[optimizer._get_variable_index(v)]) for v in variables]
        else:
            sums = [
                variable(v.shape, v.dtype, f"hvd_pipe.sum.{number}.{i}")
                for i, v in enumerate(variables)
            ]
            named |= {f"{number}.sum.{i}": total for i, total in enumerate(sums)}
        with tf.init_scope():
            if f"{number}.passes" in self._resumed:
                restore(named, self._resumed)
            elif steps:
                passes.assign(int(optimizer._iterations.numpy()) % steps)
        window = self._windows[number] = _Window(passes, sums, named)
        return window
