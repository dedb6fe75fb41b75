"""Stages as modules: a model's graph in parts, each with what it gets and what it sends."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.messages import TensorSpec
from hvd_pipe.torch.pipedream.graph import Traced, assemble
from hvd_pipe.torch.pipedream.joined import questions, tensors_of

__all__ = ["StageModule", "cut", "part", "parts_of"]


@dataclass(frozen=True)
class StageModule:
    """One stage of a model.

    ``module(*inputs)`` returns a tuple of tensors in the order of ``outputs``; the last stage's
    returns what the model itself does. Its parameters and buffers are the model's own, under the
    model's keys.

    Args:
        module: Runs the stage's layers.
        inputs: What it gets; of the first stage the model's own inputs.
        outputs: What it sends to the next stage; none of the last stage.
    """

    module: fx.GraphModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def cut(
    traced: Traced, stages: Sequence[Sequence[str]], values: Mapping[str, TensorSpec]
) -> list[StageModule]:
    """Divide a model into stages.

    The stages in turn compute what the model computes, bit for bit: operations keep their order
    within a stage. A tensor that a later stage than the next one uses is passed on by those
    between.

    Args:
        traced: The model.
        stages: Names of the layers of each stage, each layer once.
        values: What crosses, from :func:`hvd_pipe.torch.pipedream.shapes.specs`.

    Raises:
        ValueError: A layer is missing, unknown or there twice, a stage is empty, or a layer uses
            one of a later stage.
        HvdPipeError: What crosses a cut is no tensor.

    Example:
        >>> import torch
        >>> from hvd_pipe.torch.pipedream.graph import trace
        >>> from hvd_pipe.torch.pipedream.shapes import specs
        >>> traced = trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
        >>> values = specs(traced, (torch.ones(8, 4),))
        >>> first, last = cut(traced, [["0", "1"], ["2"]], values)
        >>> [(spec.name, spec.shape) for spec in first.outputs]
        [('1', (8, 3))]
        >>> last.inputs == first.outputs, list(last.module.state_dict())
        (True, ['2.weight', '2.bias'])
    """
    home = _homes(traced, stages)
    asks = questions(traced.graph_module.graph)
    crossing = _crossing(traced, home, len(stages), asks)
    made = []
    for number in range(len(stages)):
        nodes = [node for node, stage in home.items() if stage == number]
        gets = traced.inputs if number == 0 else crossing[number - 1]
        last = number == len(stages) - 1
        sends = None if last else crossing[number]
        for node in sends or ():
            _check_crosses(traced, node, number, stages, values)
        received = {node: () if number == 0 else parts_of(traced, node, values) for node in gets}
        sent = {node: parts_of(traced, node, values) for node in sends or ()}
        module = part(
            traced, nodes, received, None if last else sent, number > 0, asks, f"Stage{number}"
        )
        made.append(
            StageModule(module, _specs(traced, received, values), _specs(traced, sent, values))
        )
    return made


_Part = tuple[int, ...]


def parts_of(traced: Traced, node: fx.Node, values: Mapping[str, TensorSpec]) -> tuple[_Part, ...]:
    """Return where the tensors are in a result that is a tuple; none for a tensor itself."""
    name = traced.names[node]
    if name in values:
        return ()
    found = []
    for key in values:
        rest = key.removeprefix(f"{name}[")
        if rest != key and rest.endswith("]"):
            found.append(tuple(int(at) for at in rest[:-1].split("][")))
    return tuple(found)


def part(
    traced: Traced,
    nodes: Iterable[fx.Node],
    received: Mapping[fx.Node, tuple[_Part, ...]],
    sent: Mapping[fx.Node, tuple[_Part, ...]] | None,
    copies: bool,
    asks: Collection[fx.Node],
    name: str = "Part",
) -> fx.GraphModule:
    """Return a module that runs some nodes of a model."""
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node, places in received.items():
        if places:
            env[node] = _nested({at: graph.placeholder(_label(node, at)) for at in places})
        elif node.op == "placeholder":
            env[node] = graph.node_copy(node)
        else:
            env[node] = graph.placeholder(node.name)

    def find(node: fx.Node) -> Any:
        if node not in env:  # a size or an attribute: each part reads it itself
            env[node] = graph.node_copy(node, find)
        return env[node]

    for node in nodes:
        if copies and _changes_inside(traced, node):
            for source in node.all_input_nodes:
                found = env.get(source)
                if isinstance(found, fx.Node) and found.op == "placeholder":
                    env[source] = graph.call_method("clone", (found,))
        env[node] = graph.node_copy(node, find)
    if sent is None:
        graph.output(fx.node.map_arg(traced.output.args[0], find))
    else:
        results = []
        for node, places in sent.items():
            for at in places or ((),):
                value = find(node)
                for index in at:
                    if isinstance(value, tuple):
                        value = value[index]
                    else:
                        value = graph.call_function(operator.getitem, (value, index))
                results.append(value)
        graph.output(tuple(results))
    return assemble(traced.graph_module, graph, traced.model, name)


def _homes(traced: Traced, stages: Sequence[Sequence[str]]) -> dict[fx.Node, int]:
    """Return each call's stage, in the order of forward; checks the table."""
    names = [layer.name for layer in traced.layers]
    given = Counter(name for stage in stages for name in stage)
    unknown = [name for name in given if name not in set(names)]
    if unknown:
        raise ValueError(
            f"stages name {unknown[0]!r}, but the model's layers are {', '.join(names)}"
        )
    twice = [name for name, count in given.items() if count > 1]
    if twice:
        raise ValueError(
            f"each layer is in one stage, but {twice[0]!r} is there {given[twice[0]]} times"
        )
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(
            f"each layer is in one stage, but these are in none: {', '.join(missing)}"
        )
    for number, stage in enumerate(stages):
        if not stage:
            raise ValueError(f"stage {number} has no layer: take fewer stages")
    where = {name: number for number, stage in enumerate(stages) for name in stage}
    for source, target in traced.edges:
        if where[source] > where[target]:
            raise ValueError(
                f"layer {target!r} of stage {where[target]} uses {source!r} of stage "
                f"{where[source]}, which runs after it: put {source!r} into stage "
                f"{where[target]} or before"
            )
    home = {node: where[layer.name] for layer in traced.layers for node in layer.nodes}
    return {node: home[node] for node in traced.graph_module.graph.nodes if node in home}


def _crossing(
    traced: Traced, home: Mapping[fx.Node, int], count: int, asks: Collection[fx.Node]
) -> list[list[fx.Node]]:
    """Return the values that cross each cut, in the order of forward."""
    last_use: dict[fx.Node, int] = {}
    for node in [*home, traced.output]:
        stage = home.get(node, count - 1)
        for source in tensors_of(node, asks):
            last_use[source] = max(stage, last_use.get(source, 0))
    values = [node for node in traced.graph_module.graph.nodes if node.op != "get_attr"]
    return [
        [n for n in values if n in last_use and home.get(n, 0) <= at < last_use[n]]
        for at in range(count - 1)
    ]


def _check_crosses(
    traced: Traced,
    node: fx.Node,
    number: int,
    stages: Sequence[Sequence[str]],
    values: Mapping[str, TensorSpec],
) -> None:
    name = traced.names[node]
    if name not in values and not parts_of(traced, node, values):
        raise HvdPipeError(
            f"{name!r} crosses the cut behind stage {number} ({stages[number][-1]!r}), but it is "
            "neither a tensor nor a tuple of tensors: let forward return tensors there, or put "
            "the layers that use it into the same stage"
        )


def _specs(
    traced: Traced,
    received: Mapping[fx.Node, tuple[_Part, ...]],
    values: Mapping[str, TensorSpec],
) -> tuple[TensorSpec, ...]:
    return tuple(
        values[traced.names[node] + "".join(f"[{index}]" for index in at)]
        for node, places in received.items()
        for at in places or ((),)
    )


def _label(node: fx.Node, at: _Part) -> str:
    return "_".join([node.name, *map(str, at)])


def _nested(found: Mapping[_Part, Any]) -> Any:
    """Return tuples of tuples, from what is at each place in them."""
    if () in found:
        return found[()]
    size = 1 + max(at[0] for at in found)
    return tuple(
        _nested({at[1:]: value for at, value in found.items() if at[0] == index})
        for index in range(size)
    )


def _changes_inside(traced: Traced, node: fx.Node) -> bool:
    if node.op != "call_module":
        return False
    module: nn.Module = traced.graph_module.get_submodule(str(node.target))
    return any(getattr(each, "inplace", False) for each in module.modules())
