"""Sum up the gradients of several passes (minibatches) into one, which is then exchanged.

``backward_passes_per_step`` of Horovod and ``gradient_accumulation_steps`` of Keras end here. What
is summed up so far is saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvd_pipe.tensorflow.arguments import Arguments
from hvd_pipe.tensorflow.graphs import Arrays, branch, raw, restore, variable
from hvd_pipe.tensorflow.session import Session

__all__ = ["Accumulation"]


@dataclass(frozen=True)
class _Window:
    """The passes that make one gradient, so far.

    Args:
        passes: How many there were, of all windows.
        sums: Of their gradients, by variable.
        named: What a state holds of it.
    """

    passes: tf.Variable
    sums: Sequence[tf.Variable]
    named: dict[str, tf.Variable]

    def load(self, number: int, state: Arrays) -> bool:
        """Go on from the part of a state that is this window's; return whether there is one."""
        prefix = f"{number}."
        mine = {
            name.removeprefix(prefix): array
            for name, array in state.items()
            if name.startswith(prefix)
        }
        if mine:
            restore(self.named, mine)
        return bool(mine)


class Accumulation:
    """The accumulated gradients of one distributed optimizer.

    Args:
        optimizer: A `hvd_pipe.tensorflow.keras.optimizer.DistributedMixin`.
        arguments: What it was distributed with.
    """

    def __init__(self, optimizer: Any, arguments: Arguments) -> None:
        self._optimizer = optimizer
        self._arguments = arguments
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
        passes, optimizer = self.passes, self._optimizer
        is_mean = (
            optimizer.gradient_accumulation_steps or self._arguments.average_aggregated_gradients
        )
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
            for each in sums:
                each.assign(tf.zeros(each.shape, each.dtype))
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
        found = dict(self._resumed)
        for number, window in self._windows.items():
            found |= {f"{number}.{name}": each.numpy() for name, each in window.named.items()}
        return found

    def load(self, state: Arrays) -> None:
        """Go on from a `state`; {} holds nothing."""
        self._resumed = dict(state)
        for number, window in self._windows.items():
            if not window.load(number, state):
                restore(window.named, {})

    def _window(self, session: Session, variables: Sequence[Any]) -> _Window:
        """Return what sums up the gradients of a session's passes."""
        optimizer = self._optimizer
        number = list(optimizer._hvd_pipe).index(session)
        if number not in self._windows:
            passes = variable([], tf.int64, f"hvd_pipe.passes.{number}")
            if optimizer.gradient_accumulation_steps:  # Keras keeps the sums, files have them
                kept = optimizer._accumulated_gradients
                sums = [raw(kept[optimizer._get_variable_index(each)]) for each in variables]
                with tf.init_scope():
                    done = int(optimizer._iterations.numpy())
                    passes.assign(done % optimizer.gradient_accumulation_steps)
                window = _Window(passes, sums, {"passes": passes})
            else:
                sums = [
                    variable(each.shape, each.dtype, f"hvd_pipe.sum.{number}.{i}")
                    for i, each in enumerate(variables)
                ]
                named = {f"sum.{i}": each for i, each in enumerate(sums)}
                window = _Window(passes, sums, {"passes": passes, **named})
            with tf.init_scope():
                window.load(number, self._resumed)
            self._windows[number] = window
        return self._windows[number]
