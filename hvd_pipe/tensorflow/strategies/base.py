"""What all strategies share: gradients in, what the optimizer may apply out.

One engine belongs to one optimizer or tape. It is asked at these moments, mostly while a graph is
traced, so that what it does becomes operations of the step::

    exchange(gradients) -> Due     this rank's gradients; Due says what is to be applied, and when
    after_step(access)               when the update has been made, or left out
    drain(update)                  now, outside any graph: finish what is in flight
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from horovod.tensorflow.mpi_ops import rank

from hvd_pipe.runtime import check_mode
from hvd_pipe.tensorflow.checking import Replicas
from hvd_pipe.tensorflow.graphs import Arrays
from hvd_pipe.tensorflow.messages.buckets import Shapes
from hvd_pipe.tensorflow.messages.reduction import Reduction

Gradients = Mapping[int, Any]
"""Dense tensors, or ``tf.IndexedSlices``, by index."""


def together(parts: Sequence[Gradients]) -> Gradients:
    """Return the gradients of all parts."""
    return {index: gradient for part in parts for index, gradient in part.items()}


def same(gradient: Any) -> Any:
    """Return a gradient as an operation of the graph and the dependencies at hand."""
    return gradient if isinstance(gradient, tf.IndexedSlices) else tf.identity(gradient)


@dataclass(frozen=True)
class Momentum:
    """A variable of the optimizer that has a value for each value of a model variable."""

    variable: tf.Variable
    name: str
    nonnegative: bool = False
    """Whether the optimizer takes its square root, so that it must not become negative."""


@dataclass(frozen=True)
class Settings:
    """What an optimizer or a tape was asked for, in terms of its variables' indices."""

    shapes: Shapes
    variables: Sequence[Any]
    reduction: Reduction
    tag: str
    """Begins the names of all messages."""
    sparse: frozenset[int] = frozenset()
    """The gradients that travel as they are, sparse."""
    groups: Sequence[Sequence[int]] | None = None
    """The gradients that the user groups by hand."""
    momenta: Sequence[Momentum] = ()

    @property
    def dense(self) -> list[int]:
        """The gradients that travel in buckets."""
        return [index for index in range(len(self.shapes)) if index not in self.sparse]


@dataclass(frozen=True)
class OptimizerAccess:
    """What prediction asks of the user's optimizer: its variables, and how it updates."""

    state: Sequence[tf.Variable]
    update: Callable[[Gradients], None]


@dataclass(frozen=True)
class Due:
    """What the optimizer may apply in this step."""

    gradients: Gradients
    when: tf.Tensor | None = None
    """A bool, the same on all ranks; None where there always is an update."""
    note: Callable[[Any, Any], None] | None = None
    """Takes the iterations and the learning rate where some updates are left to the next step."""


class Engine(abc.ABC):
    """One strategy at work; see the module's docstring."""

    name: str
    is_local = False
    """Whether an update applies this rank's own gradients."""
    keeps_equal = True
    """Whether all ranks have the same weights after every step."""
    predicts = False
    """Whether `after_step` needs the optimizer."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.replicas: Replicas | None = None
        if not check_mode.active.on:
            return
        check_mode.active.begin(int(rank()))
        names, variables = settings.shapes.names, settings.variables
        if not settings.reduction.alone and all(hasattr(v, "read_value") for v in variables):
            process_set = settings.reduction.process_set
            self.replicas = Replicas(names, variables, settings.tag, process_set)

    @property
    def defers(self) -> bool:
        """Whether steps that are traced from now on leave messages to the next one."""
        return False

    def compare_replicas(self, due: Gradients) -> None:
        """Under ``HVD_PIPE_CHECK``, compare weights and due gradients every some steps."""
        if self.replicas is None or self.is_local or not self.keeps_equal:
            return
        # What is sparse is equal where the weights are.
        dense = [due[index] for index in self.settings.dense if index in due]
        self.replicas.step(dense if len(dense) == len(self.settings.shapes) else [])

    def joins(self) -> None:
        """Go on after ``hvd.join()``, which this rank is about to call."""
        if self.replicas is not None:
            self.replicas.restart()

    @abc.abstractmethod
    def exchange(self, gradients: Gradients) -> Due:
        """Send this rank's gradients and return what is due."""

    def after_step(self, access: OptimizerAccess | None = None) -> None:  # noqa: B027 - most do nothing
        """Go on after the update, or after the step that had none; a tape gives no access."""

    @abc.abstractmethod
    def drain(self, update: Callable[[Gradients], None]) -> None:
        """Finish what is in flight, on all ranks; ``update`` applies gradients."""

    def equalise(self, variables: Sequence[Any]) -> None:  # noqa: B027 - most have equal ones
        """Make moving averages of the model equal on all ranks, after `drain`."""

    def state(self) -> Arrays:
        """Return what is in flight; waits for what has been sent."""
        return {}

    def load(self, state: Arrays) -> None:  # noqa: B027 - the same
        """Go on from a `state`, of the same engine on the same variables; {} holds nothing."""

    def is_ahead(self) -> bool:
        """Whether an average is in flight that the model has not had."""
        return False

    def settle(self) -> None:  # noqa: B027 - most have nothing to do
        """Wait for what this rank has sent, so that no other waits for it in vain."""

    def forget(self) -> None:  # noqa: B027 - the same
        """Wait for nothing that was sent: after a failure it may never arrive."""

    def share(self) -> None:  # noqa: B027 - the same
        """Make what is in flight, or the models, equal on all ranks; between two steps."""
