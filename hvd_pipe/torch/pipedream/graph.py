"""A user's model as layers and edges between them: where a pipeline may cut it.

A layer is a call of the model's graph with what must stay with it. A cut lies between layers, and
only tensors travel over it. Nodes are joined into one layer where

* one takes a part of another's result (``y, state = lstm(x)``),
* both use one parameter, or one of them changes a buffer that the other uses,
* one changes a tensor of the other in place,
* one is computed from parameters alone (``class_token.expand(n, -1, -1)``) for the other,

and with them all that lies on a path between them. Sizes, dtypes and devices are no layers: each
stage asks its own tensors. Buffers that are only read, such as masks, may be in several stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import fx, nn
from torch.utils import _pytree as pytree

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.torch.pipedream.joined import Joined, called, takes_part
from hvd_pipe.torch.pipedream.tracer import graph_of

__all__ = ["Layer", "Traced", "assemble", "trace"]


@dataclass(frozen=True)
class Layer:
    """What is never cut.

    Args:
        name: Unique in its model: the path of the module that it calls ("features.0"), or what fx
            calls it; of several joined ones the first's and the last's: "encoder..decoder".
        nodes: Its calls, in the order of forward.
        description: What it is, for people.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    description: str = ""


@dataclass(frozen=True)
class Traced:
    """A model that can be cut.

    Args:
        graph_module: Its calls; has the modules, parameters and buffers of the model itself.
        layers: In an order of forward.
        edges: (from, to) names of layers, the second uses a tensor of the first.
        parameters: Of each layer, by their keys in the model's state dict; each tensor once.
        unused: Keys of the model's state dict that forward never uses.
        names: What each node's result is called, in messages and in what is planned.
        model: The plain model.
    """

    graph_module: fx.GraphModule
    layers: tuple[Layer, ...]
    edges: tuple[tuple[str, str], ...]
    parameters: Mapping[str, Mapping[str, nn.Parameter]]
    unused: tuple[str, ...]
    names: Mapping[fx.Node, str]
    model: nn.Module

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What the model is called with."""
        return tuple(n for n in self.graph_module.graph.nodes if n.op == "placeholder")

    @property
    def output(self) -> fx.Node:
        """The node with what the model returns."""
        (node,) = (n for n in self.graph_module.graph.nodes if n.op == "output")
        assert isinstance(node, fx.Node)
        return node


def trace(model: nn.Module | Sequence[nn.Module], inputs: int | None = None) -> Traced:
    """Find the layers of a model.

    Args:
        model: Any module; or modules in a row, of which each is one layer, named as
            ``nn.Sequential`` names them; or a ``GraphModule``, which is taken as it is.
        inputs: How many positional arguments the model is called with; None for those that have
            no default.

    Raises:
        HvdPipeError: The forward pass of the model itself depends on data, or has no layer; names
            the line. Submodules whose forward does so are one layer each.
        TypeError: No model, or forward does not take that many inputs.

    Example:
        >>> traced = trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
        >>> [layer.name for layer in traced.layers], traced.edges
        (['0', '1', '2'], (('0', '1'), ('1', '2')))
        >>> list(traced.parameters["2"])
        ['2.weight', '2.bias']
    """
    chain = not isinstance(model, nn.Module)
    if not isinstance(model, nn.Module):
        if isinstance(model, str) or not isinstance(model, Sequence) or not model:
            raise TypeError(f"model must be a module or a list of modules, got {model!r}")
        wrong = [stage for stage in model if not isinstance(stage, nn.Module)]
        if wrong:
            raise TypeError(f"a stage must be a module, got {wrong[0]!r}")
        model = nn.Sequential(*model)
    if isinstance(model, fx.GraphModule):
        graph = _plain(model, inputs)
        made = assemble(model, _pruned(graph), model)
    else:
        mine = set(vars(model))
        whole = {name for name, _ in model.named_children()} if chain else set()
        try:
            made = assemble(model, _pruned(graph_of(model, inputs, whole)), model)
        finally:
            for key in set(vars(model)) - mine:  # constants, which the graph has now
                delattr(model, key)
    return _traced(made, model, chain)


def assemble(
    root: nn.Module, graph: fx.Graph, model: nn.Module, name: str = "Traced"
) -> fx.GraphModule:
    """Return a module that runs a graph with the very modules and tensors of another one."""
    made = fx.GraphModule(root, graph, name)
    made.training = model.training
    for path, module in made.named_modules():
        if path and type(module) is nn.Module:  # it only holds others
            module.training = model.get_submodule(path).training
    kept = set(model.state_dict(keep_vars=True))
    for path, module in made.named_modules():
        for key, buffer in module._buffers.items():
            if f"{path}.{key}".lstrip(".") not in kept and buffer is not None:
                module._non_persistent_buffers_set.add(key)
    _add_aliases(made, model)
    return made


def _add_aliases(made: nn.Module, model: nn.Module) -> None:
    """Let a module have a tensor under all keys that the model has it under."""
    mine = {id(t) for t in (*made.parameters(), *made.buffers())}
    have = set(made.state_dict(keep_vars=True))
    for key, tensor in model.state_dict(keep_vars=True).items():
        if key in have or id(tensor) not in mine:
            continue
        *path, name = key.split(".")
        holder: nn.Module = made
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = cast(nn.Module, holder._modules[part])
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(name, tensor)
        else:
            holder.register_buffer(name, tensor)


def _plain(model: fx.GraphModule, inputs: int | None) -> fx.Graph:
    """Copy a graph: only calls that compute, inputs by place, results in their own structure."""
    graph, env = fx.Graph(), {}
    info = getattr(model.graph._codegen, "pytree_info", None)
    count = 0
    # fx puts inputs first, torch.export attributes.
    for node in sorted(model.graph.nodes, key=lambda node: node.op != "placeholder"):
        if node.op == "placeholder":
            count += 1
            if node.args and (inputs is None or count > inputs):
                env[node] = node.args[0]
                continue
        elif node.op == "output":
            result = node.args[0]
            if info is not None and info.out_spec is not None:
                flat = result if isinstance(result, tuple | list) else [result]
                result = pytree.tree_unflatten(list(flat), info.out_spec)
            graph.output(fx.node.map_arg(result, lambda n: env[n]))
            continue
        elif _checks(node):
            continue
        env[node] = graph.node_copy(node, lambda n: env[n])
    given = sum(node.op == "placeholder" for node in graph.nodes)
    if inputs is not None and inputs != given:
        raise TypeError(f"the graph takes {given} to {count} inputs, but the sample has {inputs}")
    return graph


def _pruned(graph: fx.Graph) -> fx.Graph:
    """Take off attributes that nothing reads: what only they have is not used."""
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return graph


def _checks(node: fx.Node) -> bool:
    return not node.users and (
        node.name.startswith("_guards_fn") or called(node).startswith(("_assert", "assert"))
    )


def _traced(made: fx.GraphModule, model: nn.Module, chain: bool) -> Traced:
    joined = Joined(made, chain)
    if not joined.calls:
        raise HvdPipeError(f"{type(model).__name__} has no layer: its forward pass calls nothing")
    names: dict[fx.Node, str] = {}
    taken: set[str] = set()
    for node in made.graph.nodes:
        own = node.op in ("call_module", "placeholder")
        names[node] = _unique(str(node.target).lstrip("*") if own else node.name, taken)
    layers: dict[fx.Node, Layer] = {}
    taken = set()
    for first, nodes in joined.groups().items():
        layers[first] = _layer(nodes, names, made, taken)
    at = {first: number for number, first in enumerate(layers)}
    edges = sorted(joined.edges(), key=lambda edge: (at[edge[0]], at[edge[1]]))
    used = set(made.state_dict(keep_vars=True))
    return Traced(
        graph_module=made,
        layers=tuple(layers.values()),
        edges=tuple((layers[source].name, layers[first].name) for source, first in edges),
        parameters=_parameters(made, joined, layers.values()),
        unused=tuple(key for key in model.state_dict() if key not in used),
        names=names,
        model=model,
    )


def _parameters(
    made: nn.Module, joined: Joined, layers: Iterable[Layer]
) -> dict[str, dict[str, nn.Parameter]]:
    keys: dict[int, str] = {}
    for key, tensor in made.named_parameters(remove_duplicate=False):
        keys.setdefault(id(tensor), key)
    by_id = {id(tensor): tensor for tensor in made.parameters()}
    return {
        layer.name: {
            keys[number]: by_id[number]
            for number in dict.fromkeys(n for node in layer.nodes for n in joined.tensors(node))
            if number in by_id
        }
        for layer in layers
    }


def _unique(name: str, taken: set[str]) -> str:
    found, number = name, 0
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    taken.add(found)
    return found


def _layer(
    nodes: list[fx.Node], names: Mapping[fx.Node, str], made: fx.GraphModule, taken: set[str]
) -> Layer:
    main = [node for node in nodes if not takes_part(node)] or nodes
    name = names[main[0]] if len(main) == 1 else f"{names[main[0]]}..{names[main[-1]]}"
    said = [
        " ".join(repr(made.get_submodule(str(node.target))).split())
        if node.op == "call_module"
        else called(node)
        for node in main
    ]
    counts = Counter(said)
    text = ", ".join(f"{n} x {what}" if n > 1 else what for what, n in counts.items())
    return Layer(_unique(name, taken), tuple(nodes), text)
