"""A Keras model as calls of layers in forward order, and where it may be cut into stages.

::

    images --> conv --> norm --> add --> dense --> logits        a call has a name: the layer's,
                 |                ^                              "outer/inner" in a nested model,
                 +----------------+                              "dense#2" when called again

Values are numbered: first the model's inputs, then what the calls make. Names and order are those
of :func:`hvd_pipe.tensorflow.layer_times.measure_profile`. A value crosses all cuts between the
stage that makes it and the last one that uses it::

    stage 0: conv, norm        crosses 0|1: norm
    stage 1: dense             crosses 1|2: dense, norm       stage 1 passes norm on
    stage 2: add(dense, norm)

A *block* is one layer, or a run of layers that nothing may cut: from the first to the last call
that use the same variables, and from what makes a mask of Keras to what it goes on to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask
from keras.src.models.functional import Functional, operation_fn

from hvd_pipe.pipeline.messages import TensorSpec
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.tensorflow.layer_times import LOSS, measure_profile


@dataclass(frozen=True)
class Value:
    """A tensor of a pass, which the call ``made`` makes; -1 for an input of the model.

    `trains`: it depends on a weight that is trained; `masked`: Keras passes a mask on beside it.
    """

    name: str
    shape: tuple[int | None, ...]
    dtype: str
    made: int
    trains: bool
    masked: bool


@dataclass(frozen=True)
class Call:
    """A call of a layer, or of an operation, with numbers of values that it takes and makes."""

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
        tensors = {id(s): values[number] for s, number in zip(symbols, self.inputs, strict=True)}
        args, kwargs = self.arguments.fill_in(tensors)
        results = keras.tree.flatten(operation_fn(self.layer, training=training)(*args, **kwargs))
        values.update(zip(self.outputs, results, strict=True))


@dataclass(frozen=True)
class Graph:
    """All calls of a model; the first `inputs` values are its inputs, in the order of `keys`."""

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
        """Return the model's inputs from a batch's x."""
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
        for value, array in zip(self.values, flat, strict=False):
            tensor = tf.cast(tf.convert_to_tensor(array), value.dtype)
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
    """Return the calls of a Sequential or functional model, and of such models in it.

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
    names = tuple(sorted(structure) if named else [symbol.name for symbol in functional.inputs])
    for symbol, name in zip(functional.inputs, names, strict=True):
        walk.add(symbol, name, made=-1, trains=False)
    numbers = {id(symbol): number for number, symbol in enumerate(functional.inputs)}
    walk.through(functional, numbers, "")
    graph = Graph(
        tuple(walk.calls),
        tuple(walk.values),
        len(functional.inputs),
        tuple(numbers[id(symbol)] for symbol in functional.outputs),
        functional._outputs_struct,
        names,
    )
    _check_variables(model, graph)
    return graph


def _functional(model: Any) -> Functional:
    """Return the functional model that links the layers."""
    if not isinstance(model, keras.Model):
        raise TypeError(f"PipeDream needs a keras.Model, got {type(model).__name__}.")
    functional = model
    if isinstance(model, keras.Sequential):
        functional = model._functional if model.built else None
        if functional is None:
            raise ValueError(
                f"the Sequential model {model.name!r} is not built, so its layers have no shapes: "
                "begin it with keras.Input(shape), or call model.build((None, ...))."
            )
    if not _is_plain(model) or not isinstance(functional, Functional):
        raise ValueError(
            f"{type(model).__name__} has a call() of its own, so PipeDream cannot cut it into "
            "stages: write it as keras.Model(inputs, outputs), with what call() does as layers, "
            "or as keras.Sequential."
        )
    return functional


def _is_plain(layer: Any) -> bool:
    """Whether a model does what its layers do, and nothing else."""
    return type(layer).call in (Functional.call, keras.Sequential.call)


def _check_variables(model: Any, graph: Graph) -> None:
    """Refuse weights that no layer has: they would belong to no stage."""
    known = {id(variable) for call in graph.calls for variable in call.variables}
    lost = [variable.path for variable in model.trainable_variables if id(variable) not in known]
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

    def through(self, graph: Functional, numbers: dict[int, int], prefix: str) -> None:
        """Record the calls of a graph, nested ones in place; ``numbers`` has the values."""
        for depth in sorted(graph._nodes_by_depth, reverse=True):
            for node in graph._nodes_by_depth[depth]:
                symbols = list(node.arguments.keras_tensors)
                if node.is_input or any(id(symbol) not in numbers for symbol in symbols):
                    continue
                inputs = [numbers[id(symbol)] for symbol in symbols]
                nested = self._nested(node.operation, inputs)
                path = f"{prefix}{node.operation.name}"
                if nested is None:
                    results = self._call(path, node, inputs)
                else:
                    within = dict(zip(map(id, nested.inputs), inputs, strict=True))
                    self.through(nested, within, f"{path}/")
                    results = [within[id(symbol)] for symbol in nested.outputs]
                numbers.update(zip(map(id, node.outputs), results, strict=True))

    def _nested(self, layer: Any, inputs: Sequence[int]) -> Functional | None:
        nested = layer._functional if isinstance(layer, keras.Sequential) else layer
        plain = isinstance(nested, Functional) and _is_plain(layer)
        return nested if plain and len(nested.inputs) == len(inputs) else None

    def _call(self, path: str, node: Any, inputs: Sequence[int]) -> list[int]:
        count = self._counts[path] = self._counts.get(path, 0) + 1
        name = path if count == 1 else f"{path}#{count}"
        layer, place = node.operation, len(self.calls)
        trains = bool(getattr(layer, "trainable_variables", []))
        trains = trains or any(self.values[number].trains for number in inputs)
        results = [
            self.add(symbol, f"{name}:{i}" if i else name, place, trains)
            for i, symbol in enumerate(node.outputs)
        ]
        self.calls.append(Call(name, layer, node.arguments, tuple(inputs), tuple(results)))
        return results


# Stages.

Blocks = Mapping[str, tuple[int, ...]]
"""Places of the calls of each block, by its name, in forward order."""

Shapes = Sequence[tuple[int, ...]]
"""The shape of each value of a model, for a sample."""


@dataclass(frozen=True)
class Part:
    """The layers of one stage, as a function of the values it `takes` to those that it `gives`."""

    graph: Graph
    calls: tuple[int, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def variables(self) -> list[Any]:
        """All Keras variables of the stage, each once."""
        variables = (v for place in self.calls for v in self.graph.calls[place].variables)
        return list({id(v): v for v in variables}.values())

    def run(self, tensors: Sequence[Any], training: bool) -> list[Any]:
        """Return the output tensors for the input tensors."""
        values = dict(zip(self.takes, tensors, strict=True))
        for place in self.calls:
            self.graph.calls[place].run(values, training)
        return [values[number] for number in self.gives]


def blocks_of(graph: Graph) -> Blocks:
    """Return the blocks that a model can be divided into.

    Example:
        >>> twice = keras.layers.Dense(4, name="twice")
        >>> inputs = keras.Input((4,))
        >>> hidden = keras.layers.ReLU(name="relu")(twice(inputs))
        >>> outputs = keras.layers.Dense(1, name="last")(twice(hidden))
        >>> blocks_of(graph_of(keras.Model(inputs, outputs)))
        {'twice .. twice#2': (0, 1, 2), 'last': (3,)}
    """
    reach = list(range(len(graph.calls)))
    for first, last in _together(graph):
        reach[first] = max(reach[first], last)
    blocks: dict[str, tuple[int, ...]] = {}
    start = end = 0
    for place in range(len(graph.calls)):
        end = max(end, reach[place])
        if place == end:
            names = graph.calls[start].name, graph.calls[end].name
            name = names[0] if start == end else " .. ".join(names)
            blocks[name] = tuple(range(start, end + 1))
            start = end = place + 1
    return blocks


def _together(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of the calls that nothing may cut."""
    uses: dict[int, list[int]] = {}
    for place, call in enumerate(graph.calls):
        for variable in call.variables:
            uses.setdefault(id(variable), []).append(place)
        for number in call.inputs:
            if graph.values[number].masked and graph.values[number].made >= 0:
                yield graph.values[number].made, place
    yield from ((min(places), max(places)) for places in uses.values())


def profile_of(
    model: Any,
    graph: Graph,
    x: Any,
    loss: Callable[[Any], Any] | None = None,
    *,
    steps: int = 5,
    skip: int = 2,
) -> ModelProfile:
    """Return what each block of a model costs; the model's variables keep their values."""
    measured = measure_profile(model, graph.feed(x), loss, steps=steps, skip=skip)
    return merged(measured, graph, blocks_of(graph))


def merged(profile: ModelProfile, graph: Graph, blocks: Blocks) -> ModelProfile:
    """Return a profile of a model's layers as one of its blocks; the loss goes to the last."""
    block_of = {graph.calls[at].name: name for name, places in blocks.items() for at in places}
    block_of[LOSS] = list(blocks)[-1]
    owner = {}
    for layer in profile.layers:
        name = layer.name
        while name not in block_of:  # the nested model that it is in
            name = name.rpartition("/")[0]
        owner[layer.name] = block_of[name]
    names = [layer.name for layer in profile.layers]
    edges = profile.edges or tuple(itertools.pairwise(names))
    leaving = {source for source, target in edges if owner[source] != owner[target]}
    layers = []
    for name in blocks:
        inside = [layer for layer in profile.layers if owner[layer.name] == name]
        layers.append(
            LayerProfile(
                name,
                sum(layer.gradient_bytes for layer in inside),
                sum(layer.backward_s for layer in inside),
                sum(layer.forward_s for layer in inside),
                sum(layer.activation_bytes for layer in inside if layer.name in leaving),
                "; ".join(layer.description for layer in inside if layer.name != LOSS),
            )
        )
    between = dict.fromkeys((owner[a], owner[b]) for a, b in edges if owner[a] != owner[b])
    chain = list(itertools.pairwise(blocks))
    branches = None if list(between) == chain else tuple(between)
    return replace(profile, layers=tuple(layers), edges=branches)


def shapes_of(graph: Graph, x: Any) -> Shapes:
    """Return the shape of each value of a model, by running it once; it changes nothing."""
    values: dict[int, Any] = dict(enumerate(graph.feed(x)))
    with keras.StatelessScope():
        for call in graph.calls:
            call.run(values, training=False)
    return [tuple(int(n) for n in values[number].shape) for number in range(len(graph.values))]


def cut(graph: Graph, stages: Sequence[Sequence[str]], shapes: Shapes) -> list[Part]:
    """Return the stages of a model, from names of each one's blocks or layers.

    Example:
        >>> layers = [keras.layers.Dense(3, name="a"), keras.layers.Dense(1, name="b")]
        >>> graph = graph_of(keras.Sequential([keras.Input((2,)), *layers]))
        >>> first, last = cut(graph, [["a"], ["b"]], shapes_of(graph, keras.ops.ones((5, 2))))
        >>> first.outputs
        (TensorSpec(name='a', shape=(5, 3), dtype='float32', dynamic=(0,), gradient=True),)
    """
    stage_of = _stage_of(graph, stages)
    last = len(stages) - 1

    def spec(number: int) -> TensorSpec:
        value = graph.values[number]
        dynamic = tuple(i for i, size in enumerate(value.shape) if size is None)
        return TensorSpec(value.name, shapes[number], value.dtype, dynamic, value.trains)

    used = dict.fromkeys(graph.outputs, last)
    for place, call in enumerate(graph.calls):
        for number in call.inputs:
            used[number] = max(used.get(number, 0), stage_of[place])
    source = [0 if value.made < 0 else stage_of[value.made] for value in graph.values]
    crossing = [
        tuple(number for number, end in sorted(used.items()) if source[number] <= stage < end)
        for stage in range(last)
    ]
    specs = [tuple(spec(number) for number in cross) for cross in crossing]
    takes = [tuple(range(graph.inputs)), *crossing]
    gives = [*crossing, graph.outputs]
    return [
        Part(
            graph,
            tuple(place for place in range(len(graph.calls)) if stage_of[place] == stage),
            takes[stage],
            gives[stage],
            specs[stage - 1] if stage else (),
            specs[stage] if stage < last else (),
        )
        for stage in range(last + 1)
    ]


def _stage_of(graph: Graph, stages: Sequence[Sequence[str]]) -> list[int]:
    """Return the stage of each call; refuse stages that cannot run."""
    blocks = blocks_of(graph)
    places = {call.name: (place,) for place, call in enumerate(graph.calls)} | dict(blocks)
    home: dict[int, int] = {}
    for stage, names in enumerate(stages):
        if not names:
            raise ValueError(f"stage {stage} has no layer: take it out, or give it one.")
        for name in names:
            if name not in places:
                raise ValueError(
                    f"stage {stage} names the layer {name!r}, and the model has none of that "
                    f"name, but {_some(places)}."
                )
            for place in places[name]:
                if place in home:
                    raise ValueError(
                        f"layer {graph.calls[place].name!r} is in stage {home[place]} and again "
                        f"in stage {stage}: name it once."
                    )
                home[place] = stage
    missing = [call.name for place, call in enumerate(graph.calls) if place not in home]
    if missing:
        raise ValueError(f"no stage has {_some(missing)}: add what is missing to one.")
    for name, members in blocks.items():
        if len({home[place] for place in members}) > 1:
            raise ValueError(
                f"the layers {name} share weights or a mask, so they must be in one stage, and "
                f"are in stages {sorted({home[place] for place in members})}."
            )
    for place, call in enumerate(graph.calls):
        for number in call.inputs:
            source = graph.values[number].made
            if source >= 0 and home[source] > home[place]:
                raise ValueError(
                    f"layer {call.name!r} in stage {home[place]} uses what "
                    f"{graph.calls[source].name!r} in stage {home[source]} makes: values go "
                    "from a stage to later ones only."
                )
    return [home[place] for place in range(len(graph.calls))]


def _some(names: Iterable[str]) -> str:
    """Return the first few of some names."""
    shown = list(names)
    return ", ".join(map(repr, shown[:8])) + (", ..." if len(shown) > 8 else "")
