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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.mpi_ops import Average, ProcessSet, Sum

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.messages import Boundary
from hvd_pipe.pipeline.stage import Buffer, Clipping, Feed, Microbatch, MicrobatchIndex, Tally
from hvd_pipe.tensorflow.messages.buckets import Packing, Shapes
from hvd_pipe.tensorflow.pipedream.graph import Part


class Replicas:
    """The workers of a stage; its gradients of one dtype are one message, as all come together."""

    def __init__(self, process_set: ProcessSet, stage: int, weights: Sequence[Any]) -> None:
        self._process_set, self._tag = process_set, f"hvd_pipe.pipeline.gradients.{stage}"
        shapes = Shapes(
            [weight.path for weight in weights],
            [weight.shape for weight in weights],
            [weight.dtype for weight in weights],
        )
        self._packing = Packing(shapes, shapes.default_groups(range(len(shapes))[::-1], None))
        self._sum = tf.function(self._summed, autograph=False)

    def add(self, gradient: list[Any]) -> list[Any]:
        """Return the sum over all workers of the stage; all of them call this."""
        return list(self._sum(gradient))

    def average(self, variables: Sequence[Any]) -> None:
        """Give variables their mean over the workers of the stage; all of them call this."""
        for place, variable in enumerate(variables):
            # In double precision, so that what is alike, as frozen weights are, stays as it is.
            mean = mpi_ops._allreduce(
                tf.cast(variable.value.read_value(), tf.float64),
                name=f"{self._tag}.state.{place}",
                op=Average,
                process_set=self._process_set,
            )
            variable.assign(tf.cast(mean, variable.dtype))

    def _summed(self, gradient: list[Any]) -> list[Any]:
        flats = self._packing.pack(dict(enumerate(gradient)))
        sums = [
            mpi_ops._allreduce(
                flat,
                name=f"{self._tag}.{number}",
                op=Sum,
                ignore_name_scope=True,
                process_set=self._process_set,
            )
            for number, flat in enumerate(flats)
        ]
        totals = self._packing.unpack(sums)
        return [totals[place] for place in range(len(gradient))]


class ByMinibatch(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A user's schedule that counts minibatches, of which an update may take several.

    Example:
        >>> halving = keras.optimizers.schedules.PiecewiseConstantDecay([3], [1.0, 0.5])
        >>> rate = ByMinibatch(halving, scale=2.0)
        >>> for update in range(4):
        ...     print(update, float(rate(update)))
        ...     rate.advance(minibatches=2)
        0 2.0
        1 2.0
        2 1.0
        3 1.0
    """

    def __init__(self, schedule: Any, scale: float) -> None:
        self._schedule, self._scale = schedule, scale
        self.minibatches = tf.Variable(0, trainable=False, dtype=tf.int64)
        """How many there were."""

    def __call__(self, _: Any) -> Any:
        """Return the rate of the next update, whatever its number."""
        return self._schedule(self.minibatches) * self._scale

    def advance(self, minibatches: int) -> None:
        """Count the minibatches of an update."""
        self.minibatches.assign_add(minibatches)

    def get_config(self) -> dict[str, Any]:
        """Return what Keras would save."""
        return {"schedule": self._schedule, "scale": self._scale}


def scaled(optimizer: Any, scale: float) -> Any:
    """Return an optimizer whose rates are scaled, and whose schedule counts minibatches."""
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        optimizer._learning_rate = ByMinibatch(rate, scale)
    elif scale != 1.0:
        optimizer.learning_rate = float(rate) * scale
    return optimizer


def add(value: float, name: str, ranks: ProcessSet) -> float:
    """Return the sum of all ranks' numbers."""
    number = tf.constant(value, tf.float64)
    return float(mpi_ops._allreduce(number, name=name, op=Sum, process_set=ranks))


@dataclass(frozen=True)
class Losses:
    """What the last stage computes of the targets and the model's output."""

    loss: Callable[[Any, Any], Any]
    metric: Callable[[Any, Any], Any] | None = None


class Passed(NamedTuple):
    """The results of a forward pass; None where it has none."""

    outputs: list[Any]
    loss: Any
    """The mean over the samples, as of the metric."""
    metric: Any
    added: Any
    """The differentiated value: the loss and the losses of layers and regularisers."""


class Passes:
    """The passes of a stage; each is compiled once for each shape of its inputs."""

    def __init__(self, part: Part, losses: Losses | None) -> None:
        self._part, self._losses = part, losses
        self.weights = [variable for variable in part.variables if variable.trainable]
        self.state = [variable for variable in part.variables if not variable.trainable]
        self.changed: list[int] = []
        """Places of the state that a pass in training mode changes."""
        self.train = tf.function(self._train, autograph=False)
        self.evaluate = tf.function(self._evaluate, autograph=False)

    def _train(
        self, weights: tuple[Any, ...], state: list[Any], inputs: list[Any], targets: Any
    ) -> tuple[Passed, list[Any]]:
        """Run forward with these weights and this state; return the state after it, too."""
        scope = self._scope(weights, state)
        before = [scope.get_current_value(variable) for variable in self.state]
        with scope:
            outputs = self._part.run(inputs, training=True)
            loss, metric = self._measured(targets, outputs)
            terms = [] if loss is None else [loss]
            terms += scope.losses
            for variable, value in zip(self.weights, weights, strict=True):
                if variable.regularizer is not None:
                    terms.append(variable.regularizer(value))
        after = [scope.get_current_value(variable) for variable in self.state]
        self.changed = [place for place, value in enumerate(after) if value is not before[place]]
        added = tf.add_n([tf.cast(term, terms[0].dtype) for term in terms]) if terms else None
        return Passed(outputs, loss, metric, added), [after[place] for place in self.changed]

    def _evaluate(
        self, weights: tuple[Any, ...], state: list[Any], inputs: list[Any], targets: Any
    ) -> Passed:
        """Run forward in evaluation mode, and change nothing."""
        with self._scope(weights, state):
            outputs = self._part.run(inputs, training=False)
            return Passed(outputs, *self._measured(targets, outputs), None)

    def _scope(self, weights: tuple[Any, ...], state: list[Any]) -> Any:
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


@dataclass
class _Pending:
    """A microbatch between its forward and its backward pass."""

    digest: int
    inputs: list[Any]
    targets: Any = None
    outputs: list[Any] = field(default_factory=list)
    added: Any = None
    share: float = 1.0
    tape: Any = None
    state: list[Any] = field(default_factory=list)
    """What forward has begun with, where backward is to run it again."""
    arrived: list[Any] = field(default_factory=list)
    """Gradients of the outputs."""
    gradients: list[Any] = field(default_factory=list)
    """Gradients of the inputs."""


class KerasStage:
    """The stage of one worker; see :class:`hvd_pipe.pipeline.stage.Stage`.

    Where an update takes the microbatches of one minibatch (`coalesces`), gradients count by their
    share of it, and replicas add them up; else they are averaged.
    """

    def __init__(
        self,
        part: Part,
        losses: Losses | None,
        optimizer: Any,
        clipping: Clipping,
        before: Boundary | None,
        after: Boundary | None,
        coalesces: bool = False,
        reduce: Callable[[list[Any]], list[Any]] | None = None,
        recompute: bool = False,
        recycle: Callable[[Buffer], object] = lambda _: None,
    ) -> None:
        self.part, self.optimizer = part, optimizer
        self.passes = Passes(part, losses)
        self.feed: Feed | None = None
        """Where the first and the last stage read; to be set before each run."""
        self._before, self._after, self._is_last = before, after, losses is not None
        self._coalesces, self._reduce = coalesces, reduce
        self._recompute, self._recycle = recompute, recycle
        self._clipping, self.norms = clipping, clipping.norms
        self._arriving = [place for place, spec in enumerate(part.inputs) if spec.gradient]
        self._leaving = [place for place, spec in enumerate(part.outputs) if spec.gradient]
        self._pending: dict[MicrobatchIndex, _Pending] = {}
        self._versions: dict[int, tuple[Any, ...]] = {}
        self._gradient: list[Any] | None = None
        self._minibatches = 1  # of the next update: an epoch's last round may have fewer
        self._training = True
        self._tally = Tally()
        if self.passes.weights:
            optimizer.build(self.passes.weights)
        self._apply = tf.function(
            lambda gradient: optimizer.apply(gradient, self.passes.weights), autograph=False
        )

    # A run.

    def begin(self, training: bool) -> None:
        self._pending.clear()  # a run that has failed may have left some
        self._gradient = None
        self._training = training
        self._tally = Tally()
        self._versions = {0: self._newest()}

    def tally(self) -> Tally:
        tally, self._tally = self._tally, Tally()
        self._versions.clear()  # the variables have the newest, and may be loaded
        return tally

    # A microbatch.

    def take_input(self, index: MicrobatchIndex, message: Buffer) -> None:
        assert self._before is not None
        header, tensors = self._before.activations.unpack(index, message)
        self._recycle(message)
        self.norms.update(header.squared_norms, from_before=True)
        self._pending[index] = _Pending(header.digest, tensors)

    def forward(self, index: MicrobatchIndex, version: int) -> None:
        microbatch = self._read(index) if self._before is None or self._is_last else None
        if self._before is None:
            assert microbatch is not None
            self._pending[index] = _Pending(microbatch.digest, list(microbatch.inputs))
        pending = self._pending[index]
        if microbatch is not None and pending.digest != microbatch.digest:
            raise HvdPipeError(
                "the first and the last stage read different minibatches: the targets of "
                f"minibatch {index.minibatch} differ. Datasets must yield the same minibatches in "
                "the same order on every rank: shuffle with a seed (tf.data's "
                "shuffle(..., seed=1)), and do not shard them: replicas of a stage share the "
                "minibatches out."
            )
        pending.targets = microbatch.targets if microbatch is not None and self._is_last else None
        if self._training:
            passed = self._trained(pending, version)
            if passed.added is not None and self._coalesces:
                pending.share = self._read(index).share
        else:
            passed = self.passes.evaluate(
                self._versions[version], self._newest_state(), pending.inputs, pending.targets
            )
        pending.outputs = passed.outputs
        if self._is_last:
            assert microbatch is not None
            self._count(microbatch, passed)
            if not self._training:
                del self._pending[index]

    def output(self, index: MicrobatchIndex) -> Buffer:
        assert self._after is not None
        pending = self._pending[index]
        if not self._training:
            del self._pending[index]
        message = self._after.activations.pack(
            index, pending.outputs, pending.digest, self.norms.squared
        )
        if self._recompute:
            pending.outputs = []
        return message

    def take_gradient(self, index: MicrobatchIndex, message: Buffer) -> None:
        assert self._after is not None
        header, self._pending[index].arrived = self._after.gradients.unpack(index, message)
        self._recycle(message)
        self.norms.update(header.squared_norms, from_before=False)

    def backward(self, index: MicrobatchIndex, version: int) -> None:
        pending = self._pending[index]
        if self._recompute:
            pending.outputs = self._recorded(pending, version)[0].outputs
        targets = [pending.outputs[at] for at in self._leaving]
        given = pending.arrived
        if pending.added is not None:
            targets.append(pending.added)
            given.append(tf.constant(pending.share, pending.added.dtype))
        sources = [*self._versions[version], *(pending.inputs[at] for at in self._arriving)]
        gradients = pending.tape.gradient(targets, sources, given, tf.UnconnectedGradients.ZERO)
        dense = [tf.convert_to_tensor(g) for g in gradients]  # those of embeddings are sparse
        gradient = dense[: len(self.passes.weights)]
        if self._gradient is not None:
            gradient = [a + b for a, b in zip(self._gradient, gradient, strict=True)]
        self._gradient = gradient
        if self._before is None:
            del self._pending[index]
        else:
            self._pending[index] = _Pending(pending.digest, [], gradients=dense[len(gradient) :])

    def input_gradient(self, index: MicrobatchIndex) -> Buffer:
        assert self._before is not None
        pending = self._pending.pop(index)
        return self._before.gradients.pack(
            index, pending.gradients, pending.digest, self.norms.squared
        )

    # Weights.

    def average(self, contributors: int) -> None:
        gradient = self._pop_gradient()
        if self._reduce is not None and gradient:
            gradient = self._reduce(gradient)
        if not self._coalesces:
            self._minibatches = contributors
            gradient = [g / contributors for g in gradient]
        self._gradient = gradient

    def update(self, version: int, keep: bool) -> None:
        gradient = self._pop_gradient()
        if not keep:  # where nobody holds the values of before, variables change in place
            self._versions.pop(version - 1, None)
        factor = self._clipping.factor(lambda: _squared_norm(gradient))
        if factor != 1.0:
            gradient = [g * tf.constant(factor, g.dtype) for g in gradient]
        if self.passes.weights:
            self._apply(gradient)
        rate = self.optimizer._learning_rate
        if isinstance(rate, ByMinibatch):
            rate.advance(self._minibatches)
        self._versions[version] = self._newest()

    def release(self, version: int) -> None:
        self._versions.pop(version, None)

    # Inside.

    def _trained(self, pending: _Pending, version: int) -> Passed:
        """Run forward, and keep what backward needs; the state moves on."""
        passed: Passed
        pending.state = self._newest_state()
        if self._recompute:
            passed, changed = self.passes.train(
                self._versions[version], pending.state, pending.inputs, pending.targets
            )
        else:
            passed, changed = self._recorded(pending, version)
            pending.state = []
        for place, value in zip(self.passes.changed, changed, strict=True):
            self.passes.state[place].assign(value)
        return passed

    def _recorded(self, pending: _Pending, version: int) -> tuple[Passed, list[Any]]:
        """Run forward on a tape, from the state that the microbatch has begun with."""
        weights = self._versions[version]
        with tf.GradientTape(watch_accessed_variables=False) as pending.tape:
            pending.tape.watch([*weights, *(pending.inputs[at] for at in self._arriving)])
            passed, changed = self.passes.train(
                weights, pending.state, pending.inputs, pending.targets
            )
        pending.added = passed.added
        return passed, changed

    def _newest(self) -> tuple[Any, ...]:
        return tuple(weight.value.read_value() for weight in self.passes.weights)

    def _newest_state(self) -> list[Any]:
        return [variable.value.read_value() for variable in self.passes.state]

    def _pop_gradient(self) -> list[Any]:
        """Return and clear the sum of the backward passes' gradients."""
        gradient, self._gradient = self._gradient, None
        if gradient is None:  # a replica that has had no minibatch in the last round
            return [tf.zeros(weight.shape, weight.dtype) for weight in self.passes.weights]
        return gradient

    def _read(self, index: MicrobatchIndex) -> Microbatch:
        assert self.feed is not None
        microbatch: Microbatch = self.feed.microbatch(index)
        return microbatch

    def _count(self, microbatch: Microbatch, passed: Passed) -> None:
        weight = float(microbatch.samples)
        if self._training:
            weight = microbatch.share if self._coalesces else 1.0
        loss = float(passed.loss) * weight
        metric = 0.0 if passed.metric is None else float(passed.metric) * weight
        samples = self._tally.samples + microbatch.samples
        old = self._tally
        self._tally = Tally(old.loss + loss, old.metric + metric, old.weight + weight, samples)


def _squared_norm(gradient: list[Any]) -> float:
    return float(tf.add_n([tf.reduce_sum(tf.cast(x, tf.float64) ** 2) for x in gradient] or [0.0]))
