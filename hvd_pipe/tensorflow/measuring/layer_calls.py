"""The calls of a Keras model's layers: what each gets, returns and trains, in one pass.

`hvd_pipe.tensorflow.layer_times` measures each of them by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional, operation_fn

from hvd_pipe.tensorflow.graphs import raw

__all__ = ["LOSS", "Call", "Outputs", "calls_of", "functional", "present"]

LOSS = "(loss)"
"""From the model's output to its loss."""


def functional(model: Any, inputs: Sequence[tf.Tensor]) -> Functional:
    """Return the graph of a model's layers."""
    if isinstance(model, Functional):
        return model
    if isinstance(model, keras.Sequential):
        if not model.built or model._functional is None:
            model.build((None, *inputs[0].shape[1:]))
        if model._functional is not None:
            return model._functional
    symbolic = [keras.Input(batch_shape=each.shape, dtype=each.dtype.name) for each in inputs]
    try:
        # Keras builds what it can, then takes down which layers `call` uses.
        model(inputs[0] if len(inputs) == 1 else list(inputs))
        found = model.call(symbolic[0] if len(symbolic) == 1 else symbolic)
        return Functional(symbolic, found)
    except Exception as error:
        line = str(error).strip().splitlines()
        raise ValueError(
            f"the layers of {type(model).__name__} cannot be told apart, as its call() does more "
            "than to call Keras' layers and operations: write it as keras.Model(inputs, outputs). "
            f"({type(error).__name__}: {line[0] if line else ''})"
        ) from error


@dataclass
class Call:
    """One call of a layer, or of an operation, in one pass of the model."""

    name: str
    what: str
    run: Callable[[Sequence[tf.Tensor]], Any]
    """The layer, as a function of the tensors that it gets."""
    tensors: list[tf.Tensor]
    """What it got."""
    sources: list[str | None]
    """Which call made each of these; None for an input of the model."""
    wanted: list[bool]
    """Whether a gradient of each is wanted."""
    weights: list[Any]
    outputs: list[tf.Tensor]

    @property
    def trains(self) -> bool:
        """Whether backward comes here."""
        return bool(self.weights) or any(self.wanted)


@dataclass(frozen=True)
class _Made:
    """A tensor of the pass: its value, who made it, and whether it depends on a weight."""

    value: tf.Tensor
    by: str | None
    trains: bool


def calls_of(graph: Functional, inputs: Sequence[tf.Tensor], outputs: Outputs) -> list[Call]:
    """Run the model once, layer by layer, then its loss; return all calls in that order."""
    calls: list[Call] = []
    made = {
        id(symbol): _Made(tf.cast(value, symbol.dtype), None, False)
        for symbol, value in zip(graph.inputs, inputs, strict=True)
    }
    _pass(graph, made, "", calls, {})
    return [*calls, _loss_call(graph, made, outputs)]


def _pass(
    graph: Functional,
    made: dict[int, _Made],
    prefix: str,
    calls: list[Call],
    counts: dict[str, int],
) -> None:
    """Run a graph layer by layer, nested ones in their place, and note every call."""
    for depth in sorted(graph._nodes_by_depth, reverse=True):
        for node in graph._nodes_by_depth[depth]:
            symbols = list(node.arguments.keras_tensors)
            if node.is_input or any(id(symbol) not in made for symbol in symbols):
                continue
            layer = node.operation
            path = f"{prefix}{layer.name}"
            nested = layer if isinstance(layer, Functional) else None
            if isinstance(layer, keras.Sequential):
                nested = layer._functional
            found = [made[id(symbol)] for symbol in symbols]
            if nested is not None and len(nested.inputs) == len(found):
                within = dict(zip(map(id, nested.inputs), found, strict=True))
                _pass(nested, within, f"{path}/", calls, counts)
                results = [within[id(symbol)] for symbol in nested.outputs]
            else:
                count = counts[path] = counts.get(path, 0) + 1
                name = path if count == 1 else f"{path}#{count}"
                weights = [raw(each) for each in getattr(layer, "trainable_variables", [])]
                what = type(layer).__name__
                calls.append(call := _called(name, what, _layer(node), found, weights))
                results = [_Made(value, name, call.trains) for value in call.outputs]
            made.update(zip(map(id, node.outputs), results, strict=True))


def _layer(node: Any) -> Callable[[Sequence[tf.Tensor]], Any]:
    """Return a call of a layer as a function of the tensors that it gets."""
    symbols = list(node.arguments.keras_tensors)

    def run(tensors: Sequence[tf.Tensor]) -> Any:
        values = {id(symbol): value for symbol, value in zip(symbols, tensors, strict=True)}
        args, kwargs = node.arguments.fill_in(values)
        return operation_fn(node.operation, training=True)(*args, **kwargs)

    return run


def _called(
    name: str,
    what: str,
    run: Callable[[Sequence[tf.Tensor]], Any],
    found: Sequence[_Made],
    weights: list[Any],
) -> Call:
    """Make a call, and note it."""
    tensors = [each.value for each in found]
    outputs = tf.nest.flatten(run(tensors))
    return Call(
        name,
        f"{what} {tuple(outputs[0].shape)}",
        run,
        tensors,
        [each.by for each in found],
        [each.trains and each.value.dtype.is_floating for each in found],
        weights,
        outputs,
    )


class Outputs:
    """The whole model with its loss."""

    def __init__(self, model: Any, loss: Callable[[Any], Any]) -> None:
        self._model, self._loss = model, loss

    def of(self, tensors: Sequence[tf.Tensor]) -> Any:
        return self._model(tensors[0] if len(tensors) == 1 else list(tensors), training=True)

    def checked(self, output: Any) -> tf.Tensor:
        """Return the loss of an output, which must be one number."""
        value = tf.convert_to_tensor(self._loss(output))
        if value.shape.num_elements() != 1 or not value.dtype.is_floating:
            raise ValueError(
                f"the loss must be one number with a gradient, got a {list(value.shape)} tensor "
                f"of {value.dtype.name}."
            )
        return value

    def loss(self, *tensors: tf.Tensor) -> tf.Tensor:
        return self.checked(self.of(tensors))

    def gradients(self, *tensors: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss(*tensors)
        weights = [raw(each) for each in self._model.trainable_variables]
        return loss, present(tape.gradient(loss, weights))


def _loss_call(graph: Functional, made: Mapping[int, _Made], outputs: Outputs) -> Call:
    """Return the loss as the last call."""
    found = [made[id(symbol)] for symbol in graph.outputs]

    def run(tensors: Sequence[tf.Tensor]) -> Any:
        return outputs.checked(keras.tree.pack_sequence_as(graph._outputs_struct, tensors))

    return _called(LOSS, "from the model's output to one number", run, found, [])


def present(gradients: Sequence[Any]) -> list[Any]:
    return [each for each in gradients if each is not None]
