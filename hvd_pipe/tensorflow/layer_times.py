"""Times of a Keras model's layers, each measured by itself, scaled to the whole step.

A compiled graph does not tell which layer a moment belongs to. So every layer of the model's graph
is compiled on its own and fed with what it got in one pass of the whole model::

    forward    the layer alone
    backward   the layer with the gradients of its weights and inputs, less the layer alone

(no gradient of an input that depends on no weight, as in a real step). Within one graph, layers
overlap on several cores, and neighbours are fused, so these times need not add up to the step.
Forward passes and backward passes are therefore each scaled to the time of the whole model's, and
what remains is how the time is shared out.

Source: PipeDream (Narayanan et al., SOSP 2019) profiles layer by layer as well.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.models.functional import Functional, operation_fn

from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.tensorflow.graphs import raw
from hvd_pipe.tensorflow.keras.optimizer import DistributedMixin

__all__ = ["measure_profile"]

LOSS = "(loss)"
"""From the model's output to its loss."""


def _functional(model: Any, inputs: Sequence[tf.Tensor]) -> Functional:
    """Return the graph of a model's layers."""
    if isinstance(model, Functional):
        return model
    if isinstance(model, keras.Sequential):
        if not model.built or model._functional is None:
            model.build((None, *inputs[0].shape[1:]))
        if model._functional is not None:
            return model._functional
    symbolic = [keras.Input(batch_shape=x.shape, dtype=x.dtype.name) for x in inputs]
    try:
        # Keras builds what it can, then takes down which layers `call` uses.
        model(inputs[0] if len(inputs) == 1 else list(inputs))
        outputs = model.call(symbolic[0] if len(symbolic) == 1 else symbolic)
        return Functional(symbolic, outputs)
    except Exception as error:
        line = str(error).strip().splitlines()
        raise ValueError(
            f"the layers of {type(model).__name__} cannot be told apart, as its call() does more "
            "than to call Keras' layers and operations: write it as keras.Model(inputs, outputs). "
            f"({type(error).__name__}: {line[0] if line else ''})"
        ) from error


class _Activation(NamedTuple):
    """An activation of the pass: its value, its call's name, and if it depends on a weight."""

    value: tf.Tensor
    by: str | None
    trains: bool


@dataclass
class _Call:
    """One call of a layer, or of an operation, in one pass of the model."""

    name: str
    what: str
    run: Callable[..., Any]
    """The layer, as a function of the tensors that it gets."""
    given: list[_Activation]
    weights: list[Any]

    def __post_init__(self) -> None:
        self.tensors = [given.value for given in self.given]
        self.wanted = [given.trains and given.value.dtype.is_floating for given in self.given]
        """By tensor, whether its gradient is wanted."""
        self.outputs: list[tf.Tensor] = tf.nest.flatten(self.run(*self.tensors))
        self.trains = bool(self.weights) or any(self.wanted)
        """Whether backward comes here."""


def _calls_of(
    graph: Functional, inputs: Sequence[tf.Tensor], loss_of: Callable[[Any], tf.Tensor]
) -> list[_Call]:
    """Run the model once, layer by layer, then its loss; return all calls in that order."""
    calls: list[_Call] = []
    counts: Counter[str] = Counter()

    def run(graph: Functional, values: dict[int, _Activation], prefix: str) -> None:
        """Run a graph layer by layer, nested ones in their place, and note every call."""
        for depth in sorted(graph._nodes_by_depth, reverse=True):
            for node in graph._nodes_by_depth[depth]:
                symbols = list(node.arguments.keras_tensors)
                if node.is_input or any(id(symbol) not in values for symbol in symbols):
                    continue
                layer = node.operation
                path = f"{prefix}{layer.name}"
                nested = layer if isinstance(layer, Functional) else None
                if isinstance(layer, keras.Sequential):
                    nested = layer._functional
                given = [values[id(symbol)] for symbol in symbols]
                if nested is not None and len(nested.inputs) == len(given):
                    within = dict(zip(map(id, nested.inputs), given, strict=True))
                    run(nested, within, f"{path}/")
                    results = [within[id(symbol)] for symbol in nested.outputs]
                else:
                    counts[path] += 1
                    name = path if counts[path] == 1 else f"{path}#{counts[path]}"
                    weights = [raw(weight) for weight in getattr(layer, "trainable_variables", [])]
                    what = type(layer).__name__
                    calls.append(call := _Call(name, what, partial(_layer, node), given, weights))
                    results = [_Activation(value, name, call.trains) for value in call.outputs]
                values.update(zip(map(id, node.outputs), results, strict=True))

    values = {
        id(symbol): _Activation(tf.cast(value, symbol.dtype), None, False)
        for symbol, value in zip(graph.inputs, inputs, strict=True)
    }
    run(graph, values, "")
    given = [values[id(symbol)] for symbol in graph.outputs]

    def loss(*tensors: tf.Tensor) -> Any:
        return loss_of(keras.tree.pack_sequence_as(graph._outputs_struct, tensors))

    return [*calls, _Call(LOSS, "from the model's output to one number", loss, given, [])]


def _layer(node: Any, *tensors: tf.Tensor) -> Any:
    symbols = map(id, node.arguments.keras_tensors)
    args, kwargs = node.arguments.fill_in(dict(zip(symbols, tensors, strict=True)))
    return operation_fn(node.operation, training=True)(*args, **kwargs)


def _gradients(tape: tf.GradientTape, targets: Any, sources: Any, arriving: Any = None) -> Any:
    gradients = tape.gradient(targets, sources, arriving)
    return [gradient for gradient in gradients if gradient is not None]


def measure_profile(
    model: Any,
    inputs: Sequence[tf.Tensor],
    loss: Callable[[Any], Any] | None = None,
    batch: int | None = None,
    steps: int = 10,
    skip: int = 3,
    name: str = "",
) -> ModelProfile:
    """Return what each layer of a Keras model costs; the model's variables keep their values.

    Layers come in forward order, those of nested models as ``outer/inner``. A layer that the model
    calls several times has an entry for each call (``dense``, ``dense#2``), and its gradient is
    complete at the first one. Masks of Keras are not passed on between layers.

    Args:
        model: Sequential, functional, or a subclassed one whose ``call`` uses Keras' layers and
            operations only. If it is compiled, its optimizer's update is measured, too.
        inputs: One tensor for each input of the model; the first dimension is the batch.
        loss: A function from the model's output to one number; None for the mean of the output.
        batch: Samples of a minibatch of one worker; the first size of the first input if None.
        steps: How often each time is measured; the profile has the medians.
        skip: Runs before these, which are not measured.
        name: The model's name in the profile; its own name if left out.

    Raises:
        ValueError: A model whose layers cannot be told apart, or with nothing to train, a loss
            that is not one number, or ``steps`` or ``skip`` that are too small.

    Example:
        >>> model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
        >>> profile = measure_profile(model, [tf.ones((5, 2))], name="net", steps=1)
        >>> profile.gradient_bytes().tolist(), profile.layers[-1].name, profile.edges
        ([16, 36], '(loss)', None)
    """
    if steps < 1 or skip < 0:
        raise ValueError(f"steps must be at least 1 and skip at least 0, got {steps} and {skip}.")
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            f"Keras runs on {keras.backend.backend()}: set KERAS_BACKEND=tensorflow to measure."
        )
    graph = _functional(model, inputs)
    if len(graph.inputs) != len(inputs):
        raise ValueError(
            f"the model has {len(graph.inputs)} inputs, and {len(inputs)} were given: give a "
            "tensor (on the command line --input) for each."
        )
    if not model.trainable_variables:
        raise ValueError(f"{type(model).__name__} has no weight to train: nothing to measure.")
    clock = partial(_median_seconds, skip, steps)
    weights = [raw(variable) for variable in model.trainable_variables]
    loss_of = partial(_checked_loss, loss or _mean_of)

    def whole(*tensors: tf.Tensor) -> tf.Tensor:
        return loss_of(model(tensors[0] if len(tensors) == 1 else list(tensors), training=True))

    def with_gradients(*tensors: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            value = whole(*tensors)
        return value, _gradients(tape, value, weights)

    with _kept(model.variables):
        calls = _calls_of(graph, inputs, loss_of)
        forward = [clock(call.run, call.tensors) for call in calls]
        backward = [
            _backward_seconds(call, clock, alone)
            for call, alone in zip(calls, forward, strict=True)
        ]
        forward_s = clock(whole, inputs)
        backward_s = clock(with_gradients, inputs) - forward_s
        update_s = _update_seconds(model, clock)
    times = _scaled(forward, forward_s), _scaled(backward, backward_s)
    edges = dict.fromkeys(
        (given.by, call.name) for call in calls for given in call.given if given.by is not None
    )
    chain = [(before.name, after.name) for before, after in itertools.pairwise(calls)]
    return ModelProfile(
        tuple(_layers_of(calls, *times, weights)),
        None if list(edges) == chain else tuple(edges),
        batch=batch or int(inputs[0].shape[0]),
        update_s=update_s,
        name=name or model.name,
    )


def _checked_loss(loss: Callable[[Any], Any], output: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(loss(output))
    if value.shape.num_elements() != 1 or not value.dtype.is_floating:
        raise ValueError(
            f"the loss must be one number with a gradient, got a {list(value.shape)} tensor "
            f"of {value.dtype.name}."
        )
    return value


def _mean_of(output: Any) -> Any:
    """Return the sum of the means of all tensors of an output that can carry a gradient."""
    means = [
        tf.reduce_mean(tf.cast(tensor, tf.float32))
        for tensor in tf.nest.flatten(output)
        if tf.as_dtype(tensor.dtype).is_floating
    ]
    if not means:
        raise ValueError(
            "the model's output has no tensor with a gradient: say how it becomes a loss "
            "(loss=, on the command line --loss module:function)."
        )
    return tf.add_n(means)


def _median_seconds(
    skip: int, steps: int, function: Callable[..., Any], tensors: Sequence[tf.Tensor]
) -> float:
    """Compile a function and return the median time of its calls, the first ones left out."""
    compiled = tf.function(function)
    for _ in range(1 + skip):
        compiled(*tensors)
    seconds = []
    for _ in range(steps):
        tf.test.experimental.sync_devices()
        start = time.perf_counter()
        compiled(*tensors)
        tf.test.experimental.sync_devices()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def _backward_seconds(call: _Call, clock: Callable[..., float], forward_s: float) -> float:
    """Return the seconds of a call's gradients, measured with the forward pass in one graph."""
    floats = [output for output in call.outputs if output.dtype.is_floating]
    if not call.trains or not floats:
        return 0.0
    # Passed as arguments: TensorFlow would fold constants before the first step.
    seeds = [tf.random.normal(output.shape, dtype=output.dtype) for output in floats]
    count = len(call.tensors)

    def both(*given: tf.Tensor) -> Any:
        tensors, arriving = given[:count], list(given[count:])
        wanted = [x for x, is_wanted in zip(tensors, call.wanted, strict=True) if is_wanted]
        with tf.GradientTape() as tape:
            tape.watch(wanted)
            results = tf.nest.flatten(call.run(*tensors))
        targets = [result for result in results if result.dtype.is_floating]
        return results, _gradients(tape, targets, [*wanted, *call.weights], arriving)

    return max(0.0, clock(both, [*call.tensors, *seeds]) - forward_s)


def _update_seconds(model: Any, clock: Callable[..., float]) -> float:
    """Time the update of a compiled model's optimizer, with another of its kind."""
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if optimizer is None:
        return 0.0
    plain: Any = next(
        cls for cls in type(optimizer).__mro__ if not issubclass(cls, DistributedMixin)
    )
    other = plain.from_config(optimizer.get_config())
    other.build(model.trainable_variables)

    def update(*gradients: tf.Tensor) -> None:
        other.apply(list(gradients), model.trainable_variables)

    return clock(update, [tf.zeros_like(raw(variable)) for variable in model.trainable_variables])


def _scaled(seconds: Sequence[float], total: float) -> list[float]:
    """Return what adds up to ``total``, in the same proportions."""
    added = sum(seconds)
    scale = total / added if added > 0.0 < total else 1.0  # a difference may be lost in noise
    return [scale * value for value in seconds]


def _layers_of(
    calls: Sequence[_Call],
    forward: Sequence[float],
    backward: Sequence[float],
    weights: Sequence[Any],
) -> Iterator[LayerProfile]:
    """Yield the layers; a layer's gradients are complete at its first call."""
    owners: dict[int, str] = {}
    for call in calls:
        for weight in call.weights:
            owners.setdefault(id(weight), call.name)
    sizes: Counter[str | None] = Counter()
    for weight in weights:
        sizes[owners.get(id(weight))] += _nbytes(weight)
    if None in sizes:
        description = "weights of no layer of the model's graph"
        yield LayerProfile("(unused)", sizes[None], 0.0, 0.0, 0, description)
    for call, f, b in zip(calls, forward, backward, strict=True):
        activations = sum(map(_nbytes, call.outputs))
        description = f"{call.what} {tuple(call.outputs[0].shape)}"
        yield LayerProfile(call.name, sizes[call.name], b, f, activations, description)


def _nbytes(tensor: Any) -> int:
    return int(tensor.shape.num_elements() * tensor.dtype.size)


@contextmanager
def _kept(variables: Sequence[Any]) -> Iterator[None]:
    """Put the variables back in the end: BatchNormalization's averages, weights, random seeds."""
    copies = [tf.identity(raw(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, copies, strict=True):
            raw(variable).assign(value)
