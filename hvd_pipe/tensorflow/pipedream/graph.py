"""A Keras model as calls of layers in forward order, and the values that go from one to the next.

::

    images --> conv --> norm --> add --> dense --> logits        a call has a name: the layer's,
                 |                ^                              "outer/inner" in a nested model,
                 +----------------+                              "dense#2" when called again

Values are numbered: first the model's inputs, then what the calls make. Names and order are those
of :func:`hvd_pipe.tensorflow.layer_times.measure_profile`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask
from keras.src.models.functional import Functional, operation_fn


@dataclass(frozen=True)
class Value:
    """A tensor of a pass.

    Args:
        name: The call that makes it, with ``:1`` for its second output; of an input, its own.
        shape: Of one sample after another: None first, and wherever a size is not known.
        dtype: Its name.
        made: Which call makes it; -1 for an input of the model.
        trains: Whether it depends on a weight that is trained, and can have a gradient.
        masked: Whether Keras passes a mask on beside it.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    made: int
    trains: bool
    masked: bool


@dataclass(frozen=True)
class Call:
    """A call of a layer, or of an operation.

    Args:
        name: Unique in its model.
        layer: What is called.
        arguments: Keras' note of how.
        inputs: Numbers of the values that it takes.
        outputs: Numbers of those that it makes.
    """

    name: str
    layer: Any
    arguments: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def variables(self) -> list[Any]:
        """All variables of the layer: weights, statistics, seeds."""
        return list(getattr(self.layer, "variables", []))

    def run(self, values: dict[int, Any], training: bool) -> None:
        """Take the inputs out of ``values``, call the layer, and put the outputs there."""
        symbols = self.arguments.keras_tensors
        found = {id(s): values[number] for s, number in zip(symbols, self.inputs, strict=True)}
        args, kwargs = self.arguments.fill_in(found)
        results = keras.tree.flatten(operation_fn(self.layer, training=training)(*args, **kwargs))
        values.update(zip(self.outputs, results, strict=True))


@dataclass(frozen=True)
class Graph:
    """All calls of a model.

    Args:
        calls: In forward order.
        values: By number.
        inputs: How many of the values are the model's inputs: the first ones.
        outputs: Numbers of the values that are its outputs.
        structure: The model's outputs, as it would return them, for Keras to pack.
        keys: Names of the inputs, in the order of their numbers.
    """

    calls: tuple[Call, ...]
    values: tuple[Value, ...]
    inputs: int
    outputs: tuple[int, ...]
    structure: Any
    keys: tuple[str, ...]

    def pack(self, tensors: Sequence[Any]) -> Any:
        """Return outputs as the model would."""
        return keras.tree.pack_sequence_as(self.structure, list(tensors))

    def feed(self, x: Any) -> list[Any]:
        """Return the inputs in a batch's x, as the model would take them."""
        if isinstance(x, Mapping) and set(self.keys) <= set(x):
            flat = [x[key] for key in self.keys]
        else:
            flat = keras.tree.flatten(x)
        if len(flat) != self.inputs:
            raise ValueError(
                f"the model has {self.inputs} inputs ({', '.join(self.keys)}), and a batch's x "
                f"holds {len(flat)}: a dataset yields (x, y), x with a tensor for each input."
            )
        fed = []
        for value, each in zip(self.values, flat, strict=False):
            tensor = tf.cast(tf.convert_to_tensor(each), value.dtype)
            known = len(tensor.shape) == len(value.shape) and all(
                wanted in (None, size)
                for wanted, size in zip(value.shape[1:], tensor.shape[1:], strict=True)
            )
            if not known:
                raise ValueError(
                    f"input {value.name!r} of the model has shape {list(value.shape)}, and a "
                    f"batch brings {list(tensor.shape)}."
                )
            fed.append(tensor)
        return fed


def graph_of(model: Any) -> Graph:
    """Return a Keras model's calls.

    Args:
        model: Sequential, or functional: ``keras.Model(inputs, outputs)``. Nested models of these
            kinds are taken apart, too.

    Raises:
        TypeError: No Keras model.
        ValueError: A model whose layers cannot be told apart, or that is not built.

    Example:
        >>> inputs = keras.Input((4,))
        >>> hidden = keras.layers.Dense(4, name="first")(inputs)
        >>> outputs = keras.layers.Add(name="sum")([hidden, inputs])
        >>> graph = graph_of(keras.Model(inputs, outputs))
        >>> [(call.name, call.inputs, call.outputs) for call in graph.calls]
        [('first', (0,), (1,)), ('sum', (1, 0), (2,))]
    """
    functional = _functional(model)
    walk = _Walk()
    structure = functional._inputs_struct
    named = isinstance(structure, dict)
    names = tuple(sorted(structure) if named else [each.name for each in functional.inputs])
    for symbol, name in zip(functional.inputs, names, strict=True):
        walk.add(symbol, name, made=-1, trains=False)
    made = {id(symbol): number for number, symbol in enumerate(functional.inputs)}
    walk.through(functional, made, "")
    graph = Graph(
        tuple(walk.calls),
        tuple(walk.values),
        len(functional.inputs),
        tuple(made[id(symbol)] for symbol in functional.outputs),
        functional._outputs_struct,
        names,
    )
    _check_variables(model, graph)
    return graph


def _functional(model: Any) -> Functional:
    """Return what knows how the layers of a model hang together."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"PipeDream needs a keras.Model, got {type(model).__name__}.")
    found = model
    if isinstance(model, keras.Sequential):
        found = model._functional if model.built else None
        if found is None:
            raise ValueError(
                f"the Sequential model {model.name!r} is not built, so its layers have no shapes: "
                "begin it with keras.Input(shape), or call model.build((None, ...))."
            )
    if not _is_plain(model) or not isinstance(found, Functional):
        raise ValueError(
            f"{type(model).__name__} has a call() of its own, so PipeDream cannot cut it into "
            "stages: write it as keras.Model(inputs, outputs), with what call() does as layers, "
            "or as keras.Sequential."
        )
    return found


def _is_plain(layer: Any) -> bool:
    """Whether a model does what its layers do, and nothing else."""
    return type(layer).call in (Functional.call, keras.Sequential.call)


def _check_variables(model: Any, graph: Graph) -> None:
    """Refuse weights beside the layers, which would belong to no stage."""
    known = {id(each) for call in graph.calls for each in call.variables}
    lost = [each.path for each in model.trainable_variables if id(each) not in known]
    if lost:
        raise ValueError(
            f"{lost[0]!r} is a weight of the model, but of no layer between its inputs and its "
            "outputs: take it out of the model, or freeze it (trainable=False)."
        )


class _Walk:
    """Goes through a model's graph, and notes calls and values."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self._counts: dict[str, int] = {}

    def add(self, symbol: Any, name: str, made: int, trains: bool) -> int:
        """Note a value; return its number."""
        shape = tuple(None if size is None else int(size) for size in symbol.shape)
        dtype = keras.backend.standardize_dtype(symbol.dtype)
        masked = get_keras_mask(symbol) is not None
        floating = tf.as_dtype(dtype).is_floating
        self.values.append(Value(name, shape, dtype, made, trains and floating, masked))
        return len(self.values) - 1

    def through(self, graph: Functional, made: dict[int, int], prefix: str) -> None:
        """Note the calls of a graph, nested ones in their place; ``made`` says who made what."""
        for depth in sorted(graph._nodes_by_depth, reverse=True):
            for node in graph._nodes_by_depth[depth]:
                symbols = list(node.arguments.keras_tensors)
                if node.is_input or any(id(symbol) not in made for symbol in symbols):
                    continue
                found = [made[id(symbol)] for symbol in symbols]
                nested = self._nested(node.operation, found)
                path = f"{prefix}{node.operation.name}"
                if nested is None:
                    results = self._call(path, node, found)
                else:
                    within = dict(zip(map(id, nested.inputs), found, strict=True))
                    self.through(nested, within, f"{path}/")
                    results = [within[id(symbol)] for symbol in nested.outputs]
                made.update(zip(map(id, node.outputs), results, strict=True))

    def _nested(self, layer: Any, found: Sequence[int]) -> Functional | None:
        nested = layer._functional if isinstance(layer, keras.Sequential) else layer
        plain = isinstance(nested, Functional) and _is_plain(layer)
        return nested if plain and len(nested.inputs) == len(found) else None

    def _call(self, path: str, node: Any, found: Sequence[int]) -> list[int]:
        count = self._counts[path] = self._counts.get(path, 0) + 1
        name = path if count == 1 else f"{path}#{count}"
        layer, place = node.operation, len(self.calls)
        trains = bool(getattr(layer, "trainable_variables", []))
        trains = trains or any(self.values[number].trains for number in found)
        results = [
            self.add(symbol, f"{name}:{i}" if i else name, place, trains)
            for i, symbol in enumerate(node.outputs)
        ]
        self.calls.append(Call(name, layer, node.arguments, tuple(found), tuple(results)))
        return results
