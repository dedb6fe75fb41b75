"""Stages as modules: a model's graph in parts, each with what it gets and what it sends."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.messages import TensorSpec
from hvd_pipe.torch.pipedream.graph import Traced, apart, assemble


@dataclass(frozen=True)
class StageModule:
    """One stage of a model."""

    module: fx.GraphModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def cut(
    traced: Traced,
    stages: Sequence[Sequence[str]],
    values: Mapping[fx.Node, tuple[TensorSpec, ...]],
) -> list[StageModule]:
    """Divide a model into stages.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from hvd_pipe.torch.pipedream.graph import specs, trace
        >>> sample = (torch.ones(8, 4),)
        >>> traced = trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), sample)
        >>> first, last = cut(traced, [["0", "1"], ["2"]], specs(traced, sample))
        >>> [(spec.name, spec.shape) for spec in first.outputs]
        [('1', (8, 3))]
        >>> last.inputs == first.outputs, list(last.module.state_dict())
        (True, ['2.weight', '2.bias'])
    """
    home = _homes(traced, stages)
    crossing = _crossing(traced, home, len(stages))
    for number, sends in enumerate(crossing):
        for node in sends:
            if not values[node]:
                raise HvdPipeError(
                    f"{traced.names[node]!r} crosses the cut behind stage {number} "
                    f"({stages[number][-1]!r}), but it is neither a tensor nor a tuple of "
                    "tensors: let forward return tensors there, or put the layers that use it "
                    "into the same stage"
                )
    sides = [traced.inputs, *crossing]
    specs = [tuple(spec for node in side for spec in values[node]) for side in sides]
    cuts = []
    for number in range(len(stages)):
        nodes = [node for node, stage in home.items() if stage == number]
        last = number == len(stages) - 1
        module = part(
            traced,
            nodes,
            sides[number],
            None if last else sides[number + 1],
            copies=number > 0,
            name=f"Stage{number}",
        )
        cuts.append(StageModule(module, specs[number], () if last else specs[number + 1]))
    return cuts


def part(
    traced: Traced,
    nodes: Iterable[fx.Node],
    received: Iterable[fx.Node],
    sent: Iterable[fx.Node] | None,
    *,
    copies: bool,
    name: str = "Part",
) -> fx.GraphModule:
    """Return a module that runs some nodes of a model, from tensors to a tuple of them."""
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    for node in received:
        structure = traced.run.structures[node]
        count = structure.num_leaves
        names = [node.name] if count == 1 else [f"{node.name}_{at}" for at in range(count)]
        env[node] = pytree.tree_unflatten([*map(graph.placeholder, names)], structure)

    def find(node: fx.Node) -> Any:
        if node not in env:  # a size or an attribute: each part reads it itself
            env[node] = graph.node_copy(node, find)
        return env[node]

    for node in nodes:
        if copies and node in traced.run.changing:
            for source in node.all_input_nodes:
                value = env.get(source)
                if isinstance(value, fx.Node) and value.op == "placeholder":
                    env[source] = graph.call_method("clone", (value,))
        env[node] = graph.node_copy(node, find)
    if sent is None:
        graph.output(fx.node.map_arg(traced.output.args[0], find))
    else:
        results = []
        for node in sent:
            structure, value = traced.run.structures[node], find(node)
            if structure.is_leaf():
                results.append(value)
            else:
                tensors = graph.call_function(flattened, (value,))
                places = range(structure.num_leaves)
                results += [graph.call_function(operator.getitem, (tensors, at)) for at in places]
        graph.output(tuple(results))
    return assemble(traced.graph_module, graph, traced.model, name)


def flattened(value: Any) -> list[Any]:
    """Return the tensors of nested tuples."""
    return apart(value)[0]


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


def _crossing(traced: Traced, home: Mapping[fx.Node, int], count: int) -> list[list[fx.Node]]:
    """Return the values that cross each cut, in the order of forward."""
    last_use: dict[fx.Node, int] = {}
    for node in [*home, traced.output]:
        stage = home.get(node, count - 1)
        for source in traced.run.tensors_of(node):
            last_use[source] = max(stage, last_use.get(source, 0))
    values = [n for n in traced.graph_module.graph.nodes if n.op != "get_attr" and n in last_use]
    return [[n for n in values if home.get(n, 0) <= at < last_use[n]] for at in range(count - 1)]
