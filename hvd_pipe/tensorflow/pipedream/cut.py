"""Stages of a Keras model: which layers must stay together, what each costs, what crosses a cut.

::

    stage 0: conv, norm        crosses 0|1: norm        norm is made in stage 0 and used in
    stage 1: dense             crosses 1|2: dense, norm    stage 2, so stage 1 passes it on
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

from hvd_pipe.pipeline.messages import TensorSpec
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.tensorflow.layer_times import LOSS, measure_profile
from hvd_pipe.tensorflow.pipedream.graph import Graph

Blocks = Mapping[str, tuple[int, ...]]
"""Places of the calls of each block, by its name, in forward order."""

Shapes = Sequence[tuple[int, ...]]
"""Of each value of a model, with a sample."""


@dataclass(frozen=True)
class Part:
    """The layers of one stage, as a function of what comes in.

    Args:
        graph: The whole model.
        calls: Places of the stage's calls, in forward order.
        takes: Numbers of the values that come in; of the model's inputs for the first stage.
        gives: Numbers of the values that go out; of the model's outputs for the last stage.
        inputs: What ``takes`` looks like on the way; nothing for the first stage.
        outputs: Likewise ``gives``; nothing for the last.
    """

    graph: Graph
    calls: tuple[int, ...]
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(self.graph.calls[place].name for place in self.calls)

    @property
    def variables(self) -> list[Any]:
        """All Keras variables of the stage, each once."""
        each = (each for place in self.calls for each in self.graph.calls[place].variables)
        return list({id(variable): variable for variable in each}.values())

    def run(self, tensors: Sequence[Any], training: bool) -> list[Any]:
        """Return what goes out, given what comes in."""
        values = dict(zip(self.takes, tensors, strict=True))
        for place in self.calls:
            self.graph.calls[place].run(values, training)
        return [values[number] for number in self.gives]


def blocks_of(graph: Graph) -> Blocks:
    """Return what a model can be divided into.

    Args:
        graph: The model.

    Example:
        >>> from hvd_pipe.tensorflow.pipedream.graph import graph_of
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
    found: dict[str, tuple[int, ...]] = {}
    start = end = 0
    for place in range(len(graph.calls)):
        end = max(end, reach[place])
        if place == end:
            names = graph.calls[start].name, graph.calls[end].name
            name = names[0] if start == end else " .. ".join(names)
            found[name] = tuple(range(start, end + 1))
            start = end = place + 1
    return found


def _together(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of the calls that nothing may cut."""
    uses: dict[int, list[int]] = {}
    for place, call in enumerate(graph.calls):
        for each in call.variables:
            uses.setdefault(id(each), []).append(place)
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
    owner = {layer.name: _owner(layer.name, block_of) for layer in profile.layers}
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
    found = None if list(between) == chain else tuple(between)
    return replace(profile, layers=tuple(layers), edges=found)


def _owner(name: str, block_of: Mapping[str, str]) -> str:
    """Return the block of a layer, or of the nested model that it is in."""
    while name not in block_of:
        name = name.rpartition("/")[0]
    return block_of[name]


def shapes_of(graph: Graph, x: Any) -> Shapes:
    """Return the shape of each value of a model, by running it once; it changes nothing."""
    values: dict[int, Any] = dict(enumerate(graph.feed(x)))
    with keras.StatelessScope():
        for call in graph.calls:
            call.run(values, training=False)
    return [tuple(int(n) for n in values[number].shape) for number in range(len(graph.values))]


def cut(graph: Graph, stages: Sequence[Sequence[str]], shapes: Shapes) -> list[Part]:
    """Return the stages of a model.

    Args:
        graph: The model.
        stages: Names of each stage's blocks, or of its layers.
        shapes: Of all values, with a sample; see :func:`shapes_of`.

    Raises:
        ValueError: A layer that is unknown, missing or in two stages; layers that must be in one
            stage and are not; or a stage that uses what a later one makes.

    Example:
        >>> from hvd_pipe.tensorflow.pipedream.graph import graph_of
        >>> layers = [keras.layers.Dense(3, name="a"), keras.layers.Dense(1, name="b")]
        >>> graph = graph_of(keras.Sequential([keras.Input((2,)), *layers]))
        >>> first, last = cut(graph, [["a"], ["b"]], shapes_of(graph, keras.ops.ones((5, 2))))
        >>> first.outputs
        (TensorSpec(name='a', shape=(5, 3), dtype='float32', dynamic=(0,), gradient=True),)
    """
    stage_of = _stage_of(graph, stages)
    last = len(stages) - 1
    used = dict.fromkeys(graph.outputs, last)
    for place, call in enumerate(graph.calls):
        for number in call.inputs:
            used[number] = max(used.get(number, 0), stage_of[place])
    made = [0 if value.made < 0 else stage_of[value.made] for value in graph.values]
    crossing = [
        tuple(number for number, end in sorted(used.items()) if made[number] <= stage < end)
        for stage in range(last)
    ]
    specs = [tuple(_spec(graph, number, shapes[number]) for number in cross) for cross in crossing]
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


def _spec(graph: Graph, number: int, shape: tuple[int, ...]) -> TensorSpec:
    value = graph.values[number]
    dynamic = tuple(i for i, size in enumerate(value.shape) if size is None)
    return TensorSpec(value.name, shape, value.dtype, dynamic, value.trains)


def _stage_of(graph: Graph, stages: Sequence[Sequence[str]]) -> list[int]:
    """Return the stage of each call, if all is as it must be."""
    blocks = blocks_of(graph)
    places = {call.name: (place,) for place, call in enumerate(graph.calls)} | dict(blocks)
    found: dict[int, int] = {}
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
                if place in found:
                    raise ValueError(
                        f"layer {graph.calls[place].name!r} is in stage {found[place]} and again "
                        f"in stage {stage}: name it once."
                    )
                found[place] = stage
    missing = [call.name for place, call in enumerate(graph.calls) if place not in found]
    if missing:
        raise ValueError(f"no stage has {_some(missing)}: add what is missing to one.")
    for name, members in blocks.items():
        if len({found[place] for place in members}) > 1:
            raise ValueError(
                f"the layers {name} share weights or a mask, so they must be in one stage, and "
                f"are in stages {sorted({found[place] for place in members})}."
            )
    for place, call in enumerate(graph.calls):
        for number in call.inputs:
            source = graph.values[number].made
            if source >= 0 and found[source] > found[place]:
                raise ValueError(
                    f"layer {call.name!r} in stage {found[place]} uses what "
                    f"{graph.calls[source].name!r} in stage {found[source]} makes: values go "
                    "from a stage to later ones only."
                )
    return [found[place] for place in range(len(graph.calls))]


def _some(names: Iterable[str]) -> str:
    """Return the first few of some names."""
    shown = list(names)
    return ", ".join(map(repr, shown[:8])) + (", ..." if len(shown) > 8 else "")
