"""A model as layers and edges between them: where a pipeline may cut it, and its stages.

A list of modules, or an ``nn.Sequential``, is a row of layers. Any other model is traced by
``torch.fx``, and run once in each mode to see what must stay together. A cut lies between layers,
and only tensors travel over it. Calls are joined into one layer where

* one takes a part of another's result (``y, state = lstm(x)``),
* both use one parameter, or a buffer that the run changes,
* one changes a tensor of the other in place,
* one is computed from parameters alone (``class_token.expand(n, -1, -1)``) for the other,

and with them all that lies on a path between them. Sizes, dtypes and devices are no layers: each
stage asks its own tensors. Buffers that are only read, such as masks, may be in several stages.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import networkx
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hvd_pipe.errors import HvdPipeError
from hvd_pipe.pipeline.messages import ITEM_BYTES, TensorSpec
from hvd_pipe.torch.pipedream.tracer import graph_of


@dataclass(frozen=True)
class Layer:
    """Calls that are never cut, named by their module ("features.0"): "encoder..decoder"."""

    name: str
    nodes: tuple[fx.Node, ...]
    description: str = ""


@dataclass(frozen=True)
class Traced:
    """A model that can be cut; `names` are those of each node's result in messages and plans."""

    graph_module: fx.GraphModule
    layers: tuple[Layer, ...]
    edges: tuple[tuple[str, str], ...]
    unused: tuple[str, ...]
    names: Mapping[fx.Node, str]
    run: Run
    model: nn.Module

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        """What the model is called with."""
        return tuple(n for n in self.graph_module.graph.nodes if n.op == "placeholder")

    @property
    def output(self) -> fx.Node:
        """The node with what the model returns."""
        return self.graph_module.graph.output_node()

    def users(self) -> dict[fx.Node, set[str]]:
        """Return the other layers, by name, that use a value; "" where the model returns it."""
        home = {node: layer.name for layer in self.layers for node in layer.nodes}
        users: dict[fx.Node, set[str]] = {}
        for node in [*home, self.output]:
            for source in self.run.tensors_of(node):
                if source.op != "get_attr" and home.get(source) != home.get(node, ""):
                    users.setdefault(source, set()).add(home.get(node, ""))
        return users


def trace(model: nn.Module | Sequence[nn.Module], sample: Sequence[Tensor]) -> Traced:
    """Find the layers of a model, and run it to see which of its calls must stay together.

    A module that cannot be followed is one layer. A model that cannot be is refused with its line.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> traced = trace(model, (torch.ones(8, 4),))
        >>> [layer.name for layer in traced.layers], traced.edges
        (['0', '1', '2'], (('0', '1'), ('1', '2')))
    """
    _check_sample(sample)
    attributes = set(vars(model)) if isinstance(model, nn.Module) else set()
    try:
        whole, graph = graph_of(model, len(sample))
        for node in list(graph.nodes):
            if node.op == "get_attr" and not node.users:
                graph.erase_node(node)
        module = assemble(whole, graph, whole)
    finally:
        if isinstance(model, nn.Module):
            for key in set(vars(model)) - attributes:  # constants, which the graph has now
                delattr(model, key)
    run = Run(module)
    for training in (True, False):
        # A sample that the model cannot be trained with, as BatchNorm with one, may be evaluated.
        allowed = (Exception,) if training else ()
        with as_before(module, whole, sample, training) as buffers:
            with suppress(*allowed):
                run.watch(sample)
            run.changed |= {id(b) for b, before in buffers if not torch.equal(b, before)}
    links = _linked(run, module, chain=whole is not model)
    if not links:
        raise HvdPipeError(f"{type(whole).__name__} has no layer: its forward pass calls nothing")
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        has_target = node.op in ("call_module", "placeholder")
        names[node] = _unique(str(node.target) if has_target else node.name, names.values())
    groups = networkx.condensation(links)
    for _, group in groups.nodes(data=True):
        group["calls"] = sorted(group["members"], key=run.places.__getitem__)
    order = networkx.lexicographical_topological_sort(
        groups, key=lambda group: run.places[groups.nodes[group]["calls"][0]]
    )
    layers: dict[int, Layer] = {}
    for group in order:
        taken = {layer.name for layer in layers.values()}
        layers[group] = _layer(groups.nodes[group]["calls"], names, module, taken)
    at = {group: number for number, group in enumerate(layers)}
    edges = sorted(groups.edges, key=lambda edge: (at[edge[0]], at[edge[1]]))
    used = set(module.state_dict())
    return Traced(
        graph_module=module,
        layers=tuple(layers.values()),
        edges=tuple((layers[a].name, layers[b].name) for a, b in edges),
        unused=tuple(key for key in whole.state_dict() if key not in used),
        names=names,
        run=run,
        model=whole,
    )


def specs(traced: Traced, sample: Sequence[Tensor]) -> dict[fx.Node, tuple[TensorSpec, ...]]:
    """Run a model on a sample, and on half of it, to see which tensors may pass between stages.

    The first dimension of the first input is the batch, which other inputs may share. A model that
    does not take half of it has no dynamic dimension. A value with anything but tensors has none.

    Example:
        >>> traced = trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (torch.ones(8, 4),))
        >>> for name, (spec,) in zip(("input", "0"), specs(traced, (torch.ones(8, 4),)).values()):
        ...     print(spec)
        TensorSpec(name='input', shape=(8, 4), dtype='float32', dynamic=(0,), gradient=False)
        TensorSpec(name='0', shape=(8, 3), dtype='float32', dynamic=(0,), gradient=True)
    """
    _check_sample(sample, [traced.names[node] for node in traced.inputs])
    batch = sample[0].shape[0]
    fewer = max(1, batch // 2)
    half_sample = [x[:fewer] if x.ndim and x.shape[0] == batch else x for x in sample]
    module = traced.graph_module
    whole_batch, half_batch = Run(module), Run(module)
    with as_before(module, traced.model, sample, training=False):
        whole_batch.watch(sample)
        try:
            half_batch.watch(half_sample)
        except Exception:  # as it would do with a smaller last minibatch
            half_batch = whole_batch
    values = {}
    for node in dict.fromkeys([*traced.inputs, *traced.users()]):
        tensors, halves = whole_batch.tensors[node], half_batch.tensors[node]
        values[node] = tuple(
            _spec(traced.names[node] + path, x, halves.get(path, x), node in traced.run.trained)
            for path, x in tensors.items()
        )
    return values


def named_tensors(value: Any) -> dict[str, Tensor]:
    """Return the tensors of a value that is one, or nested tuples of them, by their places."""
    paths, _ = pytree.tree_flatten_with_path(value, is_leaf=_is_no_tuple)
    if not all(isinstance(x, Tensor) for _, x in paths):
        return {}
    return {pytree.keystr(path): x for path, x in paths}


def _is_no_tuple(value: Any) -> bool:
    return not isinstance(value, tuple | list)


def flatten_tuples(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the tensors of nested tuples, and their structure; any other value is one leaf."""
    whole = not named_tensors(value)
    return pytree.tree_flatten(value, is_leaf=lambda x: whole or _is_no_tuple(x))


def flat(value: Any) -> list[Tensor]:
    """Return all tensors in a value."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _spec(name: str, planned: Tensor, smaller: Tensor, trained: bool) -> TensorSpec:
    shape, other = tuple(planned.shape), tuple(smaller.shape)
    alike = len(other) == len(shape)
    dynamic = [at for at in range(len(shape)) if alike and other[at] != shape[at]]
    dtype = str(planned.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise ValueError(
            f"tensor {name!r} is of dtype {dtype}, which cannot travel between stages; those that "
            f"can: {', '.join(ITEM_BYTES)}"
        )
    return TensorSpec(name, shape, dtype, tuple(dynamic), trained and _is_continuous(planned))


def _is_continuous(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _check_sample(sample: Sequence[Tensor], wanted: Sequence[str] | None = None) -> None:
    if not isinstance(sample, tuple | list):
        raise TypeError(f"sample is a tuple of the model's inputs, got {type(sample).__name__}")
    if wanted is not None and len(sample) != len(wanted):
        raise ValueError(
            f"the model takes {len(wanted)} inputs ({', '.join(wanted)}), but the sample has "
            f"{len(sample)}: give one tensor for each"
        )
    for key, value in zip(wanted or range(len(sample)), sample, strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(f"input {key!r} must be a tensor, got {type(value).__name__}")
    if sample and (sample[0].ndim == 0 or sample[0].shape[0] < 1):
        raise ValueError(
            f"the first dimension of the first input is the batch, which has at least 1 sample; "
            f"got the shape {tuple(sample[0].shape)}"
        )


@contextmanager
def as_before(
    traced: nn.Module, model: nn.Module, sample: Sequence[Tensor], training: bool
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Restore training flags, buffers and random states; yield the buffers with their values.

    No gradients are computed within.
    """
    modules = {id(m): m for root in (traced, model) for m in root.modules()}
    flags = [(module, module.training) for module in modules.values()]
    tensors = {id(b): b for module in modules.values() for b in module.buffers(recurse=False)}
    buffers = [(buffer, buffer.detach().clone()) for buffer in tensors.values()]
    devices = sorted({t.device.index for t in [*sample, *tensors.values()] if t.is_cuda})
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        try:
            for module, _ in flags:
                # Not train(): a module may do other things there, such as keep a part in eval.
                module.training = training
            yield buffers
        finally:
            for module, flag in flags:
                module.training = flag
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


# A recorded run.


class Run(fx.Interpreter):
    """Runs a model, and records the results of its nodes, and what they change in place.

    A tensor is identified by its memory, and that by the node that has allocated it.
    """

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.places = {node: at for at, node in enumerate(traced.graph.nodes)}
        self.structures: dict[fx.Node, pytree.TreeSpec] = {}
        """How tensors nest in the results of nodes."""
        self.tensors: dict[fx.Node, dict[str, Tensor]] = {}
        """The tensors in the results of nodes, on the meta device."""
        self.metadata: set[fx.Node] = set()
        """Nodes that return sizes, dtypes or devices of tensors."""
        self.changing: set[fx.Node] = set()
        """Nodes that change a tensor in place."""
        self.joined: set[tuple[fx.Node, fx.Node]] = set()
        """Pairs of a node that changes a tensor and a node that has used it before."""
        self.changed: set[int] = set()
        """Identities of buffers that have been changed."""
        self.trained: set[fx.Node] = set()
        """Nodes whose results depend on a parameter that is trained."""
        self._memory: dict[fx.Node, dict[int, fx.Node]] = {}

    def tensors_of(self, node: fx.Node) -> list[fx.Node]:
        """Return the tensors that a node is computed from, through sizes asked from them."""
        tensors: dict[fx.Node, None] = {}
        queue = list(node.all_input_nodes)
        for source in queue:
            if source in self.metadata:
                queue.extend(source.all_input_nodes)
            else:
                tensors[source] = None
        return list(tensors)

    def watch(self, sample: Sequence[Tensor]) -> None:
        """Run the model on a sample, which stays as it is."""
        self._memory.clear()
        self.run(*(x.detach().clone() for x in sample))
        self.env.clear()

    def run_node(self, n: fx.Node) -> Any:
        inputs = [x for source in n.all_input_nodes for x in flat(self.env[source])]
        versions = [x._version for x in inputs]
        result = super().run_node(n)
        known: dict[int, fx.Node] = {}
        for source in n.all_input_nodes:
            known |= self._memory[source]
        changed = {
            known[_address(x)]
            for x, version in zip(inputs, versions, strict=True)
            if x._version != version
        }
        tensors = flat(result)
        self.structures[n] = flatten_tuples(result)[1]
        self.tensors[n] = {
            path: torch.empty(x.shape, dtype=x.dtype, device="meta")
            for path, x in named_tensors(result).items()
        }
        memory = {_address(x): known.get(_address(x), n) for x in tensors}
        self._memory[n] = memory
        if changed:
            self.changing.add(n)
            for other in self._memory:
                used = [other, *other.all_input_nodes]
                if any(not changed.isdisjoint(self._memory[u].values()) for u in used):
                    self.joined.add((n, other))
        elif not tensors and n.users and n.op in ("call_function", "call_method"):
            # What is taken out of a layer's result belongs to the layer, whatever it is.
            of_layer = n.target is operator.getitem and n.args[0] not in self.metadata
            if not of_layer:
                self.metadata.add(n)
        has_trained = any(x.requires_grad for x in state_of(n, self.module))
        depends = has_trained or not self.trained.isdisjoint(n.all_input_nodes)
        if depends and not called(n).startswith("detach"):
            if any(_is_continuous(x) for x in tensors):
                self.trained.add(n)
            # What it has written into depends on the parameter, too, under each of its names.
            self.trained |= {
                u for u, m in self._memory.items() if not changed.isdisjoint(m.values())
            }
        return result


def _address(x: Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr()
    except RuntimeError:  # sparse tensors have no storage
        return id(x)


def state_of(node: fx.Node, module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of the module that a node calls, or the one it reads."""
    if node.op not in ("call_module", "get_attr"):
        return []
    value = operator.attrgetter(str(node.target))(module)
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    return [value] if isinstance(value, Tensor) else []


def called(node: fx.Node) -> str:
    """Return the plain name of what a node calls."""
    return str(getattr(node.target, "__name__", node.target))


def takes_part(node: fx.Node) -> bool:
    """Whether a node takes one value out of another's result."""
    if node.target is operator.getitem:
        return isinstance(node.args[1], int | str | slice)
    return node.target is getattr


def _linked(run: Run, module: fx.GraphModule, chain: bool) -> networkx.DiGraph:
    """Link each call to its users, and both ways where they must stay together."""
    calls = [n for n in module.graph.nodes if n.op.startswith("call_") and n not in run.metadata]
    links = networkx.DiGraph()
    links.add_nodes_from(calls)
    joined = set() if chain else set(run.joined)
    owners: dict[int, list[fx.Node]] = {}
    fixed: set[fx.Node] = set()  # from no input of the model
    weights: set[fx.Node] = set()  # those from parameters
    for place, node in enumerate(calls):
        sources = run.tensors_of(node)
        links.add_edges_from((source, node) for source in sources if source in links)
        if takes_part(node):
            joined.update((node, source) for source in sources)
        if not node.users and all(source.op == "get_attr" for source in sources):
            # It only counts a buffer up, so it is no layer of its own.
            joined.add((node, calls[place + 1] if place + 1 < len(calls) else calls[0]))
        for tensor in _unshared_state(node, run, module):
            owners.setdefault(id(tensor), []).append(node)
        inputs = [n for n in node.all_input_nodes if n not in run.metadata]
        if all(n in fixed or n.op == "get_attr" for n in inputs):
            fixed.add(node)
            state = [tensor for n in inputs for tensor in state_of(n, module)]
            if any(n in weights for n in inputs) or any(
                isinstance(tensor, nn.Parameter) for tensor in state
            ):
                weights.add(node)
            if node in weights or len(node.users) == 1:
                joined.update((node, user) for user in node.users)
    joined.update((nodes[0], node) for nodes in owners.values() for node in nodes)
    for a, b in joined:
        if a in links and b in links:
            links.add_edges_from([(a, b), (b, a)])
    return links


def _unshared_state(node: fx.Node, run: Run, module: fx.GraphModule) -> Iterator[Tensor]:
    """Yield the parameters and changing buffers of a node, which one stage must have alone."""
    if node.op == "call_module":
        yield from state_of(node, module)
    for source in run.tensors_of(node):
        if source.op == "get_attr":
            for tensor in state_of(source, module):
                if isinstance(tensor, nn.Parameter) or id(tensor) in run.changed:
                    yield tensor


def _layer(
    nodes: list[fx.Node], names: Mapping[fx.Node, str], root: fx.GraphModule, taken: Container[str]
) -> Layer:
    main = [node for node in nodes if not takes_part(node)] or nodes
    name = names[main[0]] if len(main) == 1 else f"{names[main[0]]}..{names[main[-1]]}"
    texts = [
        " ".join(repr(root.get_submodule(str(node.target))).split())
        if node.op == "call_module"
        else called(node)
        for node in main
    ]
    counts = Counter(texts)
    text = ", ".join(f"{n} x {call}" if n > 1 else call for call, n in counts.items())
    return Layer(_unique(name, taken), tuple(nodes), text)


def _unique(name: str, taken: Container[str]) -> str:
    numbered = (f"{name}_{number}" for number in itertools.count(1))
    return next(unique for unique in itertools.chain([name], numbered) if unique not in taken)


def assemble(
    root: nn.Module, graph: fx.Graph, model: nn.Module, name: str = "Traced"
) -> fx.GraphModule:
    """Return a module that runs a graph with the very modules and tensors of another one."""
    assembled = fx.GraphModule(root, graph, name)
    state = model.state_dict(keep_vars=True)
    for path, module in assembled.named_modules():
        if path and type(module) is nn.Module:  # it only holds others
            module.training = model.get_submodule(path).training
        for key in module._buffers:
            if f"{path}.{key}".lstrip(".") not in state:
                module._non_persistent_buffers_set.add(key)
    used = {id(tensor) for tensor in (*assembled.parameters(), *assembled.buffers())}
    for key in state.keys() - assembled.state_dict().keys():
        if id(state[key]) in used:  # under another key
            *path, last = key.split(".")
            holder: nn.Module = assembled
            for part in path:
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            if isinstance(state[key], nn.Parameter):
                holder.register_parameter(last, state[key])
            else:
                holder.register_buffer(last, state[key])
    return assembled


# Stages.


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

    def copy_of(node: fx.Node) -> Any:
        if node not in env:  # a size or an attribute: each part reads it itself
            env[node] = graph.node_copy(node, copy_of)
        return env[node]

    for node in nodes:
        if copies and node in traced.run.changing:
            for source in node.all_input_nodes:
                value = env.get(source)
                if isinstance(value, fx.Node) and value.op == "placeholder":
                    env[source] = graph.call_method("clone", (value,))
        env[node] = graph.node_copy(node, copy_of)
    if sent is None:
        graph.output(fx.node.map_arg(traced.output.args[0], copy_of))
    else:
        results = []
        for node in sent:
            structure, value = traced.run.structures[node], copy_of(node)
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
    return flatten_tuples(value)[0]


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
