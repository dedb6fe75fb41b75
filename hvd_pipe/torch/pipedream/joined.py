"""Which calls of a model's graph stay together: the rules of :mod:`.graph`, carried out.

And what each is: a size or a tensor, a part of another, a change in place.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Collection
from typing import Any

import networkx
import torch
from torch import fx, nn

__all__ = [
    "Joined",
    "attribute",
    "called",
    "questions",
    "takes_part",
    "tensors_of",
]

_ASKS = {"size", "dim", "numel", "nelement", "stride", "element_size", "is_floating_point", "item"}
_ASKS |= {"tolist", "ndimension", "get_device", "is_contiguous", "sym_size", "sym_numel", "type"}
_ATTRIBUTES = {
    "shape",
    "ndim",
    "dtype",
    "device",
    "is_cuda",
    "requires_grad",
    "layout",
    "itemsize",
}
_ATTRIBUTES |= {"nbytes", "training", "names"}
_ALIASES = {"view", "reshape", "permute", "transpose", "t", "flatten", "squeeze", "unsqueeze"}
_ALIASES |= {"expand", "narrow", "select", "slice", "chunk", "split", "unbind", "contiguous"}
_ALIASES |= {"dropout", "detach", "view_as", "unflatten", "movedim", "swapaxes", "to", "getitem"}
_ALIASES |= {
    "getattr",
    "expand_as",
    "reshape_as",
    "float",
    "double",
    "half",
    "bfloat16",
    "type_as",
}
_ALIASING_MODULES: tuple[type[nn.Module], ...] = (
    nn.Flatten,
    nn.Unflatten,
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
)
_ALIASING_MODULES += (nn.Dropout2d, nn.Dropout3d)


def tensors_of(node: fx.Node, asks: Collection[fx.Node]) -> list[fx.Node]:
    """Return the tensors that a node is computed from, through sizes asked from them."""
    found: dict[fx.Node, None] = {}
    queue = list(node.all_input_nodes)
    for each in queue:
        if each in asks:
            queue.extend(each.all_input_nodes)
        else:
            found[each] = None
    return list(found)


def questions(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of a graph that give no tensors, but sizes, dtypes, devices of them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _asks(node, found):
            found.add(node)
    return found


def _asks(node: fx.Node, asks: set[fx.Node]) -> bool:
    """Whether a node's result is no tensor, but a size, a dtype, a device or made of these."""
    name = called(node)
    if node.op == "call_method":
        # "type" and "is_contiguous" with arguments are tensors or questions of other kinds.
        return name in _ASKS and not (name == "type" and len(node.args) > 1)
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _ATTRIBUTES
    if name in ("sym_size", "sym_numel", "sym_stride", "item", "len", "numel"):
        return True
    inputs = node.all_input_nodes
    module = getattr(node.target, "__module__", "") or ""
    plain = module in ("_operator", "operator", "math", "builtins") or "sym_" in name
    plain |= node.target in vars(builtins).values() or node.target in vars(math).values()
    return bool(inputs) and plain and all(each in asks for each in inputs)


def takes_part(node: fx.Node) -> bool:
    """Whether a node takes one value out of another's result."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[1], int | str | slice)
    return node.target is getattr


def called(node: fx.Node) -> str:
    """Return the plain name of what a node calls: "relu_" of ``aten.relu_.default``."""
    target = node.target
    if node.op == "call_function":
        packet = getattr(target, "overloadpacket", target)
        return str(getattr(packet, "__name__", packet))
    return str(target)


def is_in_place(node: fx.Node, made: fx.GraphModule) -> bool:
    if node.op == "call_module":
        return bool(getattr(made.get_submodule(str(node.target)), "inplace", False))
    if node.op not in ("call_function", "call_method"):
        return False
    name = called(node)
    if node.kwargs.get("inplace") is True or "out" in node.kwargs:
        return True
    if node.target in (operator.setitem, setattr):
        return True
    if getattr(node.target, "__module__", "") in ("_operator", "operator"):
        return name.startswith("i") and hasattr(operator, f"__{name}__") and name not in _PURE
    return name.endswith("_") and not name.endswith("__")


_PURE = {"inv", "invert", "is_", "is_not", "index", "indexOf"}


def may_alias(node: fx.Node, made: fx.GraphModule) -> bool:
    """Whether a node's result may be its first argument, or a view of it."""
    if node.op == "call_module":
        module = made.get_submodule(str(node.target))
        return isinstance(module, _ALIASING_MODULES) or is_in_place(node, made)
    return called(node) in _ALIASES or is_in_place(node, made)


def attribute(module: nn.Module, target: Any) -> Any:
    value: Any = module
    for part in str(target).split("."):
        value = getattr(value, part)
    return value


def state(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


class Joined:
    """The calls of a graph in groups that are never cut; a group goes by its first call.

    One directed graph has an edge from what is used to what uses it, and edges both ways between
    calls that stay together. Its strongly connected components are the groups, with all that lies
    on a path within one of them.
    """

    def __init__(self, made: fx.GraphModule, chain: bool) -> None:
        self.made = made
        nodes = list(made.graph.nodes)
        self.place = {node: at for at, node in enumerate(nodes)}
        self.asks = questions(made.graph)
        self.calls = [n for n in nodes if n.op.startswith("call_") and n not in self.asks]
        self.chain = chain
        self._links = networkx.DiGraph()
        self._links.add_nodes_from(self.calls)
        self._links.add_edges_from((s, node) for node in self.calls for s in self._sources(node))
        self._join_parts()
        self._join_weights()
        if not chain:
            self._join_in_place()
        self._groups = networkx.condensation(self._links)
        self._calls: dict[int, list[fx.Node]] = {
            group: sorted(members, key=self.place.__getitem__)
            for group, members in self._groups.nodes(data="members")
        }

    def groups(self) -> dict[fx.Node, list[fx.Node]]:
        """Return the calls of each group, in an order of forward."""
        order = networkx.lexicographical_topological_sort(
            self._groups, key=lambda group: self.place[self._calls[group][0]]
        )
        return {self._calls[group][0]: self._calls[group] for group in order}

    def edges(self) -> list[tuple[fx.Node, fx.Node]]:
        """Return (from, to) groups, the second uses a tensor of the first."""
        return [(self._calls[a][0], self._calls[b][0]) for a, b in self._groups.edges]

    def _join(self, a: fx.Node, b: fx.Node) -> None:
        self._links.add_edges_from([(a, b), (b, a)])

    # What is joined.

    def _join_parts(self) -> None:
        for node in self.calls:
            if takes_part(node):
                for source in self._sources(node):
                    self._join(source, node)
            if not node.users and not self._sources(node) and not self._placeholders(node):
                # It only counts a buffer up (torch.export's BatchNorm): no layer of its own.
                later = [n for n in self.calls if self.place[n] > self.place[node]]
                self._join(node, later[0] if later else self.calls[0])

    def _join_weights(self) -> None:
        users: dict[int, list[fx.Node]] = {}
        changed: set[int] = set()
        fixed: set[fx.Node] = set()  # from no input of the model
        weights: set[fx.Node] = set()  # those from parameters
        for node in self.calls:
            tensors = self.tensors(node)
            for tensor, changes in tensors.items():
                users.setdefault(tensor, []).append(node)
                if changes:
                    changed.add(tensor)
            inputs = [each for each in node.all_input_nodes if each not in self.asks]
            if not all(n in fixed or n.op == "get_attr" for n in inputs):
                continue
            fixed.add(node)
            if any(n in weights or self._is_parameter(n) for n in inputs):
                weights.add(node)
            if node in weights or (len(node.users) == 1 and not self.chain):
                for user in node.users:
                    if user in self._links:
                        self._join(node, user)
        for tensor, nodes in users.items():
            if tensor in changed:
                for node in nodes:
                    self._join(nodes[0], node)

    def _join_in_place(self) -> None:
        for node in self.calls:
            if not is_in_place(node, self.made):
                continue
            root = self._changed(node)
            if root is None:
                continue
            aliases, queue = {root}, [root]
            for alias in queue:
                for user in alias.users:
                    if user in self._links and self.place[user] <= self.place[node]:
                        self._join(node, user)
                        if may_alias(user, self.made) and user not in aliases:
                            aliases.add(user)
                            queue.append(user)
            if root in self._links:
                self._join(node, root)

    def _changed(self, node: fx.Node) -> fx.Node | None:
        """Return what a call in place changes, behind all views of it."""
        root = node.args[0] if node.args else next(iter(node.all_input_nodes), None)
        while (
            isinstance(root, fx.Node)
            and root in self._links
            and may_alias(root, self.made)
            and root.args
            and isinstance(root.args[0], fx.Node)
        ):
            root = root.args[0]
        return root if isinstance(root, fx.Node) else None

    # What a node uses.

    def _uses(self, node: fx.Node) -> list[fx.Node]:
        """Return the tensors behind a node's arguments, sizes asked from them included."""
        return tensors_of(node, self.asks)

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        return [found for found in self._uses(node) if found in self._links]

    def _placeholders(self, node: fx.Node) -> list[fx.Node]:
        return [found for found in self._uses(node) if found.op == "placeholder"]

    def _is_parameter(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and isinstance(
            attribute(self.made, node.target), nn.Parameter
        )

    def tensors(self, node: fx.Node) -> dict[int, bool]:
        """Return the parameters and buffers that a node uses, and which may not be in two stages.

        Those are parameters, and buffers that it may change.
        """
        found: dict[int, bool] = {}
        if node.op == "call_module":
            module = self.made.get_submodule(str(node.target))
            found.update((id(tensor), True) for tensor in state(module))
        changes = node.op == "call_function" and "norm" in called(node)
        target = self._changed(node) if is_in_place(node, self.made) else None
        for each in dict.fromkeys([*self._uses(node), *([] if target is None else [target])]):
            if each.op == "get_attr":
                value = attribute(self.made, each.target)
                if isinstance(value, nn.Module):
                    found.update((id(tensor), True) for tensor in state(value))
                elif isinstance(value, torch.Tensor):
                    single = changes or each is target or isinstance(value, nn.Parameter)
                    found[id(value)] = found.get(id(value), False) or single
        return found
