"""PipeDream's profile format: a text file of nodes, then edges, that describes a model as a DAG.

A node is ``<id> -- <description> -- forward_compute_time=<ms>, backward_compute_time=<ms>,
activation_size=<bytes>, parameter_size=<bytes>``, on one line, where a size may be a list
``[<bytes>; <bytes>]`` and `` -- stage_id=<int>`` may follow. An edge is a tab and
``<id> -- <id>``. The nodes of a file have no particular order; :func:`forward_order` finds one.

Source: https://github.com/msr-fiddle/pipedream, ``graph/graph.py``.
"""

from __future__ import annotations

import heapq
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from hvd_pipe.planning._checks import load_text

__all__ = ["Graph", "Node", "forward_order", "parse", "read"]

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True)
class Node:
    """One node of a file: seconds of its passes, bytes of its outputs and parameters."""

    name: str
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    parameter_bytes: int


@dataclass(frozen=True)
class Graph:
    r"""All nodes and edges of a file, in its order.

    Example:
        >>> sizes = "activation_size=8.0, parameter_size=[4; 4]"
        >>> times = "forward_compute_time=1.5, backward_compute_time=2"
        >>> text = f"node2 -- ReLU() -- {times}, {sizes}\nnode1 -- Input -- {times}, {sizes}"
        >>> graph = parse(text + "\n\tnode1 -- node2")
        >>> graph.nodes[0].forward_s, graph.nodes[0].parameter_bytes, graph.edges
        (0.0015, 8, (('node1', 'node2'),))
        >>> [node.name for node in graph.pruned().nodes]
        ['node2']
    """

    nodes: tuple[Node, ...]
    edges: tuple[tuple[str, str], ...]

    def pruned(self) -> Graph:
        """The graph as a planner wants it, its nodes in forward order.

        Nodes that do no work go: ``Input``, whose time is that of loading data, and sinks
        ``__getitem__``, which nothing uses. What led into a node that goes leads to what followed
        it. ValueError where the edges form a cycle.
        """
        order = forward_order([node.name for node in self.nodes], self.edges)
        inputs: dict[str, list[str]] = {node.name: [] for node in self.nodes}
        for source, target in self.edges:
            inputs[target].append(source)
        nodes = {node.name: node for node in self.nodes}
        used: set[str] = set()
        kept: list[str] = []
        for name in reversed(order):  # consumers first, so that "nothing uses it" is known
            if name in used or not nodes[name].description.startswith("__getitem__"):
                kept.append(name)
                used.update(inputs[name])
        gone = {name for name in kept if nodes[name].description.startswith("Input")}
        for name in order:
            around = [y for x in inputs[name] for y in (inputs[x] if x in gone else [x])]
            inputs[name] = list(dict.fromkeys(around))
        stay = [name for name in reversed(kept) if name not in gone]
        edges = tuple((source, target) for target in stay for source in inputs[target])
        return Graph(tuple(nodes[name] for name in stay), edges)


def forward_order(names: Sequence[str], edges: Iterable[tuple[str, str]]) -> list[str]:
    """The names in a topological order: each after all that lead to it.

    Of those that may come next, the one with the smallest number at the end of its name does, as
    profilers number layers as they run; where a name has no number, the first of ``names`` does.

    Args:
        names: all nodes, each once.
        edges: pairs of names (from, to).

    Raises:
        ValueError: the edges form a cycle; names it.

    Example:
        >>> forward_order(["n10", "n9", "n1"], [("n1", "n10"), ("n1", "n9")])
        ['n1', 'n9', 'n10']
    """
    numbers = [re.search(r"\d+$", name) for name in names]
    found = [int(number[0]) for number in numbers if number]
    keys = found if len(found) == len(names) else list(range(len(names)))
    rank = {name: (key, at) for at, (name, key) in enumerate(zip(names, keys, strict=True))}
    sorter = TopologicalSorter(dict.fromkeys(names, ()))
    for source, target in edges:
        sorter.add(target, source)
    try:
        sorter.prepare()
    except CycleError as error:
        *cycle, _ = error.args[1]
        first = cycle.index(min(cycle))
        cycle = [*cycle[first:], *cycle[: first + 1]]
        raise ValueError(
            f"a model's graph has no cycles, but this one has {' -> '.join(cycle)}; "
            "unroll the loop, or profile it as one layer"
        ) from error
    free: list[tuple[tuple[int, int], str]] = []
    order: list[str] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(free, (rank[name], name))
        _, name = heapq.heappop(free)
        order.append(name)
        sorter.done(name)
    return order


def read(path: str | os.PathLike[str]) -> Graph:
    """The graph in a file.

    Raises:
        ValueError: no such graph; names the file and the line.
    """
    return load_text(path, parse, "this is no graph, but binary data")


def parse(text: str) -> Graph:
    """The graph in a text; ValueError names the line that is wrong."""
    nodes: dict[str, Node] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            if line.startswith("\t"):
                edge = _edge(line)
                if edge in edges:
                    raise ValueError(f"this edge is already in line {edges[edge]}")
                edges[edge] = number
            else:
                node = _node(line)
                if node.name in nodes:
                    raise ValueError(f"there are two nodes {node.name!r}")
                nodes[node.name] = node
        except ValueError as error:
            raise ValueError(f"line {number}, {line.strip()[:60]!r}: {error}") from error
    for edge, number in edges.items():
        for name in edge:
            if name not in nodes:
                raise ValueError(f"line {number}: the edge names an unknown node {name!r}")
    if not nodes:
        raise ValueError("no nodes: expected lines '<id> -- <description> -- <times and sizes>'")
    return Graph(tuple(nodes.values()), tuple(edges))


def _edge(line: str) -> tuple[str, str]:
    ends = line.strip().split(" -- ")
    if len(ends) != 2:
        raise ValueError("an edge is a tab and '<id> -- <id>'")
    if ends[0] == ends[1]:
        raise ValueError("an edge from a node to itself")
    return ends[0], ends[1]


def _node(line: str) -> Node:
    parts = line.strip().split(" -- ")
    if len(parts) == 4 and re.fullmatch(r"stage_id=-?\d+", parts[3]):
        parts.pop()
    if len(parts) != 3:
        raise ValueError(
            "a node is '<id> -- <description> -- <times and sizes>[ -- stage_id=<int>]', "
            f"got {len(parts)} parts; an edge begins with a tab"
        )
    values: dict[str, float] = {}
    for field in parts[2].split(", "):
        key, equals, value = field.partition("=")
        if key not in _FIELDS or not equals or key in values:
            raise ValueError(f"expected {', '.join(_FIELDS)}, each once; got {field!r}")
        values[key] = _number(key, value)
    lacking = [key for key in _FIELDS if key not in values]
    if lacking:
        raise ValueError(f"lacks {', '.join(lacking)}")
    for key in _FIELDS[2:]:
        if not values[key].is_integer():
            raise ValueError(f"{key} is a whole number of bytes, got {values[key]}")
    forward, backward, activation, parameters = (values[key] for key in _FIELDS)
    return Node(
        parts[0], parts[1], forward / 1e3, backward / 1e3, int(activation), int(parameters)
    )


def _number(key: str, text: str) -> float:
    """A number that is finite and not negative, or the sum of a list ``[a; b]``."""
    inner = text[1:-1].split(";") if text.startswith("[") and text.endswith("]") else [text]
    total = 0.0
    for part in inner:
        try:
            value = float(part)
        except ValueError:
            raise ValueError(f"{key} is a number or a list '[a; b]', got {text!r}") from None
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{key} must be finite and at least 0, got {text!r}")
        total += value
    return total
