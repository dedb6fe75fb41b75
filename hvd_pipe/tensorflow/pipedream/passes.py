"""A stage's passes, as compiled functions of its weights, its state and what comes in.

State is all that is not trained: statistics, seeds, frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvd_pipe.tensorflow.pipedream.cut import Part

__all__ = ["Losses", "Passed", "Passes"]


@dataclass(frozen=True)
class Losses:
    """What the last stage computes of the targets and the model's output.

    Args:
        loss: ``loss(targets, output)``: a number, or one a sample.
        metric: A number to be reported, likewise; None for none.
    """

    loss: Callable[[Any, Any], Any]
    metric: Callable[[Any, Any], Any] | None = None


class Passed(NamedTuple):
    """What a forward pass has made.

    Args:
        outputs: What goes out.
        loss: The mean over the samples; None where no loss is computed.
        metric: Likewise.
        added: What is differentiated here: the loss, and what layers and regularisers add to it;
            None where there is nothing.
    """

    outputs: list[Any]
    loss: Any
    metric: Any
    added: Any


class Passes:
    """The passes of a stage; each is compiled once for each shape of what comes in.

    Args:
        part: The stage's layers.
        losses: Of the last stage; None for the others.
    """

    def __init__(self, part: Part, losses: Losses | None) -> None:
        self._part, self._losses = part, losses
        self.weights = [each for each in part.variables if each.trainable]
        self.state = [each for each in part.variables if not each.trainable]
        self._changed: list[int] = []
        self._train = tf.function(self._training, autograph=False)
        self._test = tf.function(self._evaluation, autograph=False)

    def newest_state(self) -> list[Any]:
        """Return what is not trained, as it is now."""
        return [each.value.read_value() for each in self.state]

    def train(
        self, weights: Sequence[Any], state: list[Any], inputs: Sequence[Any], targets: Any
    ) -> tuple[Passed, list[Any]]:
        """Run forward with these weights and this state; return the state after it, too."""
        passed, changed = self._train(list(weights), state, list(inputs), targets)
        return Passed(*passed), changed

    def move_on(self, changed: list[Any]) -> None:
        """Take the state that a pass has left."""
        for place, value in zip(self._changed, changed, strict=True):
            self.state[place].assign(value)

    def evaluate(self, weights: Sequence[Any], inputs: Sequence[Any], targets: Any) -> Passed:
        """Run forward in evaluation mode, and change nothing."""
        return Passed(*self._test(list(weights), self.newest_state(), list(inputs), targets))

    def _training(
        self, weights: list[Any], state: list[Any], inputs: list[Any], targets: Any
    ) -> tuple[Passed, list[Any]]:
        scope = self._scope(weights, state)
        before = [scope.get_current_value(each) for each in self.state]
        with scope:
            outputs = self._part.run(inputs, training=True)
            loss, metric = self._measured(targets, outputs)
            terms = [] if loss is None else [loss]
            terms += scope.losses
            for variable, value in zip(self.weights, weights, strict=True):
                if variable.regularizer is not None:
                    terms.append(variable.regularizer(value))
        after = [scope.get_current_value(each) for each in self.state]
        self._changed = [place for place, value in enumerate(after) if value is not before[place]]
        added = tf.add_n([tf.cast(term, terms[0].dtype) for term in terms]) if terms else None
        return Passed(outputs, loss, metric, added), [after[place] for place in self._changed]

    def _evaluation(
        self, weights: list[Any], state: list[Any], inputs: list[Any], targets: Any
    ) -> Passed:
        with self._scope(weights, state):
            outputs = self._part.run(inputs, training=False)
            return Passed(outputs, *self._measured(targets, outputs), None)

    def _scope(self, weights: list[Any], state: list[Any]) -> Any:
        variables = [*self.weights, *self.state]
        return keras.StatelessScope(
            list(zip(variables, [*weights, *state], strict=True)), collect_losses=True
        )

    def _measured(self, targets: Any, outputs: list[Any]) -> tuple[Any, Any]:
        if self._losses is None:
            return None, None
        output = self._part.graph.pack(outputs)
        loss = tf.reduce_mean(self._losses.loss(targets, output))
        if self._losses.metric is None:
            return loss, None
        return loss, tf.reduce_mean(self._losses.metric(targets, output))
