"""What a node of a graph is: a size or a tensor, a part of another, a change in place."""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn

__all__ = [
    "attribute",
    "called",
    "is_in_place",
    "may_alias",
    "questions",
    "state",
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
