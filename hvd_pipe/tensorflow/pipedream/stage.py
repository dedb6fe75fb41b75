"""A worker's stage in Keras: its layers with weights in several versions, and what is in flight.

A version is a tuple of tensors, which nothing can change. To read a variable copies nothing; an
update of it makes a new buffer for as long as someone holds what was read::

    version 4 (w, b) --+--> forward(weights, state, inputs) --> outputs    recorded on a tape,
    state -------------+                                                  which holds version 4
    update 5           the optimizer changes the variables; version 5 is what they then hold

So backward is the gradient at the weights of its forward, whatever was updated in between. State
(BatchNorm's statistics, seeds) is no weight: a pass takes the newest one, and leaves a newer one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.feed import Feed, Piece
from hvd_pipe.pipeline.stage import Buffer, Tally, Unit
from hvd_pipe.tensorflow.pipedream.cut import Part
from hvd_pipe.tensorflow.pipedream.messages import Messages
from hvd_pipe.tensorflow.pipedream.passes import Losses, Passed, Passes
from hvd_pipe.tensorflow.pipedream.updates import ByMinibatch

__all__ = ["KerasStage", "Reduce"]

Reduce = Callable[[list[Any]], list[Any]]
"""Adds gradients up over a stage's workers."""


@dataclass
class _Flight:
    """A microbatch between its forward and its backward pass."""

    digest: int
    inputs: list[Any]
    outputs: list[Any] = field(default_factory=list)
    added: Any = None
    share: float = 1.0
    tape: Any = None
    arrived: list[Any] = field(default_factory=list)
    """Gradients of the outputs."""
    gradients: list[Any] = field(default_factory=list)
    """Gradients of the inputs."""


class KerasStage:
    """The stage of one worker; see :class:`hvd_pipe.pipeline.stage.Stage`.

    Args:
        part: Its layers, and what they get and give.
        losses: What the last stage computes; None in all others.
        optimizer: The user's, for the weights of these layers.
        coalesces: Whether an update takes the microbatches of one minibatch; gradients then count
            by their share of it, and replicas add them up, where else they are averaged.
        reduce: Adds up over replicas; None where there are none.
        stages: How many the pipeline has.
        where: Who this is, for errors.

    Example:
        >>> import keras
        >>> from hvd_pipe.tensorflow.pipedream.batches import split
        >>> from hvd_pipe.tensorflow.pipedream.cut import cut, shapes_of
        >>> from hvd_pipe.tensorflow.pipedream.graph import graph_of
        >>> layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="sum")
        >>> graph = graph_of(keras.Sequential([keras.Input((2,)), layer]))
        >>> x, y = tf.constant([[1.0, 2.0]]), tf.zeros((1, 1))
        >>> (part,) = cut(graph, [["sum"]], shapes_of(graph, x))
        >>> losses = Losses(keras.losses.mean_squared_error)
        >>> stage = KerasStage(part, losses, keras.optimizers.SGD(0.1))
        >>> stage.feed = Feed([(x, y)], 1, lambda batch, pieces: split(graph, batch, pieces))
        >>> stage.begin(training=True)
        >>> stage.forward(Unit(0, 0), 0)
        >>> stage.backward(Unit(0, 0), 0)
        >>> stage.update(1, keep=False)
        >>> stage.tally().loss, layer.kernel.numpy().round(3).ravel()
        (9.0, array([ 0.4, -0.2], dtype=float32))
    """

    def __init__(
        self,
        part: Part,
        losses: Losses | None,
        optimizer: Any,
        coalesces: bool = False,
        reduce: Reduce | None = None,
        stages: int = 1,
        where: str = "stage 0 replica 0",
    ) -> None:
        self.part, self.optimizer = part, optimizer
        self.passes = Passes(part, losses)
        self.feed: Feed | None = None
        """Where the first and the last stage read; to be set before each run."""
        self._is_first, self._is_last = not part.inputs, losses is not None
        self._coalesces, self._reduce = coalesces, reduce
        self.recycle: Callable[[Buffer], object] = lambda _: None
        """Takes the memory of a received message back."""
        self._arriving = [place for place, spec in enumerate(part.inputs) if spec.gradient]
        self._leaving = [place for place, spec in enumerate(part.outputs) if spec.gradient]
        self.messages = {
            name: Messages(specs, stages, where)
            for name, specs in (
                ("input", part.inputs),
                ("output", part.outputs),
                ("input gradient", [part.inputs[place] for place in self._arriving]),
                ("output gradient", [part.outputs[place] for place in self._leaving]),
            )
        }
        self._flights: dict[Unit, _Flight] = {}
        self._versions: dict[int, tuple[Any, ...]] = {}
        self._gradient: list[Any] | None = None
        self._minibatches = 1  # of the next update: an epoch's last round may have fewer
        self._training = True
        self._tally = Tally()
        if self.passes.weights:
            optimizer.build(self.passes.weights)
        self._apply = tf.function(self._updated, autograph=False)

    # A run.

    def begin(self, training: bool) -> None:
        self._flights.clear()  # a run that has failed may have left some
        self._gradient = None
        self._training = training
        self._tally = Tally()
        self._versions = {0: self._newest()}

    def tally(self) -> Tally:
        tally, self._tally = self._tally, Tally()
        self._versions.clear()  # the variables have the newest, and may be loaded
        return tally

    # A microbatch.

    def take_input(self, unit: Unit, message: Buffer) -> None:
        digest, tensors = self.messages["input"].unpack(unit, message)
        self.recycle(message)
        self._flights[unit] = _Flight(digest, tensors)

    def forward(self, unit: Unit, version: int) -> None:
        piece = self._piece(unit) if self._is_first or self._is_last else None
        if self._is_first:
            assert piece is not None
            self._flights[unit] = _Flight(piece.digest, list(piece.inputs))
        flight = self._flights[unit]
        if piece is not None and flight.digest != piece.digest:
            raise HvdPipeError(
                "the first and the last stage read different minibatches: the targets of "
                f"minibatch {unit.minibatch} differ. Datasets must yield the same minibatches in "
                "the same order on every rank: shuffle with a seed (tf.data's "
                "shuffle(..., seed=1)), and do not shard them: replicas of a stage share the "
                "minibatches out."
            )
        targets = piece.targets if piece is not None and self._is_last else None
        weights = self._versions[version]
        if self._training:
            with tf.GradientTape(watch_accessed_variables=False) as flight.tape:
                flight.tape.watch([*weights, *(flight.inputs[at] for at in self._arriving)])
                passed = self.passes.train(weights, flight.inputs, targets)
            if passed.added is not None and self._coalesces:
                flight.share = self._piece(unit).share
        else:
            passed = self.passes.evaluate(weights, flight.inputs, targets)
        flight.outputs, flight.added = passed.outputs, passed.added
        if self._is_last:
            assert piece is not None
            self._count(piece, passed)
            if not self._training:
                del self._flights[unit]

    def output(self, unit: Unit) -> Buffer:
        flight = self._flights[unit]
        if not self._training:
            del self._flights[unit]
        return self.messages["output"].pack(unit, flight.outputs, flight.digest)

    def take_gradient(self, unit: Unit, message: Buffer) -> None:
        _, self._flights[unit].arrived = self.messages["output gradient"].unpack(unit, message)
        self.recycle(message)

    def backward(self, unit: Unit, version: int) -> None:
        flight = self._flights[unit]
        targets = [flight.outputs[at] for at in self._leaving]
        given = flight.arrived
        if flight.added is not None:
            targets.append(flight.added)
            given.append(tf.constant(flight.share, flight.added.dtype))
        sources = [*self._versions[version], *(flight.inputs[at] for at in self._arriving)]
        found = flight.tape.gradient(targets, sources, given, tf.UnconnectedGradients.ZERO)
        dense = [tf.convert_to_tensor(each) for each in found]  # those of embeddings are sparse
        gradient = dense[: len(self.passes.weights)]
        if self._gradient is not None:
            gradient = [a + b for a, b in zip(self._gradient, gradient, strict=True)]
        self._gradient = gradient
        if self._is_first:
            del self._flights[unit]
        else:
            self._flights[unit] = _Flight(flight.digest, [], gradients=dense[len(gradient) :])

    def input_gradient(self, unit: Unit) -> Buffer:
        flight = self._flights.pop(unit)
        return self.messages["input gradient"].pack(unit, flight.gradients, flight.digest)

    # Weights.

    def average(self, contributors: int) -> None:
        gradient = self._take_gradient()
        if self._reduce is not None and gradient:
            gradient = self._reduce(gradient)
        if not self._coalesces:
            self._minibatches = contributors
            gradient = [each / contributors for each in gradient]
        self._gradient = gradient

    def update(self, version: int, keep: bool) -> None:
        gradient = self._take_gradient()
        if not keep:  # where nobody holds the values of before, variables change in place
            self._versions.pop(version - 1, None)
        if self.passes.weights:
            self._apply(gradient)
        rate = self.optimizer._learning_rate
        if isinstance(rate, ByMinibatch):
            rate.advance(self._minibatches)
        self._versions[version] = self._newest()

    def release(self, version: int) -> None:
        self._versions.pop(version, None)

    # Inside.

    def _newest(self) -> tuple[Any, ...]:
        return tuple(each.value.read_value() for each in self.passes.weights)

    def _take_gradient(self) -> list[Any]:
        """Return what backward passes have left, and leave nothing."""
        found, self._gradient = self._gradient, None
        if found is None:  # a replica that has had no minibatch in the last round
            return [tf.zeros(each.shape, each.dtype) for each in self.passes.weights]
        return found

    def _updated(self, gradient: list[Any]) -> None:
        self.optimizer.apply(gradient, self.passes.weights)

    def _piece(self, unit: Unit) -> Piece:
        assert self.feed is not None
        piece: Piece = self.feed.piece(unit)
        return piece

    def _count(self, piece: Piece, passed: Passed) -> None:
        weight = float(piece.samples)
        if self._training:
            weight = piece.share if self._coalesces else 1.0
        loss = float(passed.loss) * weight
        metric = 0.0 if passed.metric is None else float(passed.metric) * weight
        samples = self._tally.samples + piece.samples
        old = self._tally
        self._tally = Tally(old.loss + loss, old.metric + metric, old.weight + weight, samples)
