"""What a model costs, layer by layer: times of the passes, bytes of gradients and activations."""

from __future__ import annotations

import csv
import heapq
import json
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from hvd_pipe.planning._checks import Document, check_keys, load_text, read_object

__all__ = ["LayerProfile", "ModelProfile"]


FORWARD = "(forward)"
"""The first layer of a running job's profile: it stands for the whole forward pass."""

SCHEMA = "hvd_pipe.profile/1"
_MOST = 2**50  # bytes; sums of thousands of them still fit into 64 bits
_CSV_COLUMNS = ["layer", "parameter_bytes", "backward_us"]
_MODEL_KEYS = {"edges", "batch", "update_s", "name"}
_CSV_OPTIONAL = ["forward_us", "activation_bytes"]


@dataclass(frozen=True)
class LayerProfile:
    """One layer, or one parameter tensor where times are known that finely.

    Args:
        name: unique in its model.
        gradient_bytes: bytes of its gradient; 0 for a layer without parameters.
        backward_s: seconds from the previous gradient being ready to this one being ready.
        forward_s: seconds of its forward pass.
        activation_bytes: bytes of its output for one minibatch.
        description: what it is, for people: "Conv2d(3, 64, kernel_size=(3, 3))".
        saved_bytes: bytes kept from forward to backward, of tensors that it makes, its output
            among them, by whichever layer they are needed; None: its activation_bytes.

    Raises:
        ValueError: an empty name, a description that is no string, or a negative or non-finite
            number.
    """

    name: str
    gradient_bytes: int
    backward_s: float
    forward_s: float = 0.0
    activation_bytes: int = 0
    description: str = ""
    saved_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a layer needs a non-empty string as its name, got {self.name!r}")
        if not isinstance(self.description, str):
            raise ValueError(
                f"layer {self.name!r}: description must be a string, got {self.description!r}"
            )
        for field in ("gradient_bytes", "activation_bytes", "saved_bytes"):
            value = getattr(self, field)
            if field == "saved_bytes" and value is None:
                continue
            try:
                count = operator.index(value)
            except TypeError:
                count = -1
            if not 0 <= count < _MOST:
                raise ValueError(
                    f"layer {self.name!r}: {field} must be an integer from 0 to {_MOST}, "
                    f"got {value!r}"
                )
            object.__setattr__(self, field, count)
        for field in ("backward_s", "forward_s"):
            value = getattr(self, field)
            try:
                seconds = float(value)
            except (TypeError, ValueError):
                seconds = math.nan
            if not (math.isfinite(seconds) and seconds >= 0.0):
                raise ValueError(
                    f"layer {self.name!r}: {field} must be finite and at least 0 seconds, "
                    f"got {value!r}; measure it again"
                )
            object.__setattr__(self, field, seconds)

    @property
    def held_bytes(self) -> int:
        """Bytes that it keeps from forward to backward, as far as is known."""
        return self.activation_bytes if self.saved_bytes is None else self.saved_bytes


@dataclass(frozen=True)
class ModelProfile(Document):
    """The layers of a model in forward order; the backward pass takes them in reverse.

    :meth:`gradient_order`, :meth:`ready_times` and :meth:`gradient_bytes` agree entry by entry,
    and leave out layers without a gradient, whose time still delays what comes after them.

    Args:
        layers: at least one, in forward order; where ``edges`` are given, in a topological one.
        edges: (from, to) names of layers, the second uses the output of the first; None for a
            chain, in which each layer uses the one before it.
        batch: samples in a minibatch of one worker, which all times are for; None if not known.
        update_s: seconds of the optimizer's update of all parameters.
        name: of the model, for people.

    Raises:
        ValueError: no layers, two of one name, an edge that is unknown, given twice or against the
            order of the layers, or a number out of its range.

    Example:
        >>> model = ModelProfile((
        ...     LayerProfile("conv", gradient_bytes=8, backward_s=0.5),
        ...     LayerProfile("relu", gradient_bytes=0, backward_s=0.25),
        ...     LayerProfile("fc", gradient_bytes=64, backward_s=1.0),
        ... ))
        >>> model.gradient_order(), model.ready_times().tolist(), model.gradient_bytes().tolist()
        (('fc', 'conv'), [1.0, 1.75], [64, 8])

    Source: MG-WFBP, arXiv 1912.09268 (its tau_b + t_b is the ready time).
    """

    _BINARY = "this is no profile, but binary data"

    layers: tuple[LayerProfile, ...]
    edges: tuple[tuple[str, str], ...] | None = None
    batch: int | None = None
    update_s: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ValueError("a model needs at least one layer, got none")
        twice = [n for n, count in Counter(x.name for x in self.layers).items() if count > 1]
        if twice:
            raise ValueError(f"layer names must be unique, but these occur twice: {twice}")
        if self.edges is not None:
            object.__setattr__(self, "edges", tuple((a, b) for a, b in self.edges))
            self._check_edges(self.edges)
        if self.batch is not None:
            batch = operator.index(self.batch) if isinstance(self.batch, SupportsIndex) else 0
            if batch < 1:
                raise ValueError(f"batch is an integer of at least 1, or None, got {self.batch!r}")
            object.__setattr__(self, "batch", batch)
        if not (
            isinstance(self.update_s, int | float)
            and math.isfinite(self.update_s)
            and self.update_s >= 0.0
        ):
            raise ValueError(
                f"update_s must be finite and at least 0 seconds, got {self.update_s!r}"
            )
        if not isinstance(self.name, str):
            raise ValueError(f"the name of a model must be a string, got {self.name!r}")

    def _check_edges(self, edges: tuple[tuple[str, str], ...]) -> None:
        place = {layer.name: at for at, layer in enumerate(self.layers)}
        for edge in edges:
            unknown = [name for name in edge if name not in place]
            if unknown:
                raise ValueError(f"the edge {edge} names an unknown layer {unknown[0]!r}")
            if place[edge[0]] >= place[edge[1]]:
                raise ValueError(
                    f"the edge {edge} leads from layer {place[edge[0]]} to layer "
                    f"{place[edge[1]]}: list the layers so that each comes after those it uses; "
                    "hvd_pipe.planning.profile.forward_order finds such an order"
                )
        twice = [edge for edge, count in Counter(edges).items() if count > 1]
        if twice:
            raise ValueError(f"edges must be unique, but these occur twice: {twice}")

    @property
    def forward_s(self) -> float:
        """Seconds of the forward pass: the sum over the layers."""
        return math.fsum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        """Seconds of the backward pass: the sum over the layers."""
        return math.fsum(layer.backward_s for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Seconds of a minibatch on one worker: forward, backward and update."""
        return self.forward_s + self.backward_s + self.update_s

    def gradient_order(self) -> tuple[str, ...]:
        """Names of the layers with a gradient, in the order in which backward makes them ready."""
        return tuple(layer.name for layer in reversed(self.layers) if layer.gradient_bytes)

    def ready_times(self) -> npt.NDArray[np.float64]:
        """Seconds from the start of backward to each gradient, in gradient order; float64."""
        ready = np.cumsum([layer.backward_s for layer in reversed(self.layers)])
        sends = [layer.gradient_bytes > 0 for layer in reversed(self.layers)]
        return np.asarray(ready[sends], dtype=np.float64)

    def gradient_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of each gradient, in gradient order; int64."""
        sizes = [layer.gradient_bytes for layer in reversed(self.layers) if layer.gradient_bytes]
        return np.array(sizes, dtype=np.int64)

    def to_json(self) -> str:
        """A JSON document; :meth:`from_json` reads it back exactly."""
        data: dict[str, Any] = {"schema": SCHEMA}
        for field in ("name", "batch", "update_s"):
            if getattr(self, field):
                data[field] = getattr(self, field)
        data["layers"] = [
            {key: value for key, value in asdict(layer).items() if value is not None}
            for layer in self.layers
        ]
        if self.edges is not None:
            data["edges"] = self.edges
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ModelProfile:
        """The model in ``{"schema": "hvd_pipe.profile/1", "layers": [{"name": ...}, ...]}``.

        What has a default in the classes may be left out.

        Raises:
            ValueError: no such document; says which key or layer is wrong.

        Example:
            >>> model = ModelProfile((LayerProfile("fc", 64, 0.1),), batch=32)
            >>> ModelProfile.from_json(model.to_json()) == model
            True
        """
        data = read_object(text, SCHEMA, {"layers"}, optional=_MODEL_KEYS)
        layers, edges = data["layers"], data.get("edges")
        if not isinstance(layers, list):
            raise ValueError(f'"layers" is a list, got {type(layers).__name__}')
        for number, layer in enumerate(layers):
            check_keys(
                layer,
                {"name", "gradient_bytes", "backward_s"},
                f"layer {number}",
                optional={"forward_s", "activation_bytes", "description", "saved_bytes"},
            )
        if edges is not None and not (
            isinstance(edges, list)
            and all(isinstance(edge, list) and len(edge) == 2 for edge in edges)
            and all(isinstance(name, str) for edge in edges for name in edge)
        ):
            raise ValueError('"edges" is a list of pairs of layer names, or null for a chain')
        return cls(
            tuple(LayerProfile(**layer) for layer in layers),
            None if edges is None else tuple(map(tuple, edges)),
            **{key: data[key] for key in _MODEL_KEYS - {"edges"} if key in data},
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ModelProfile:
        """The model in a file of any kind, known by its suffix.

        ``.json`` is :meth:`load`, ``.csv`` :meth:`from_csv`, and ``.txt`` :meth:`from_graph`.

        Raises:
            ValueError: another suffix, or malformed contents; names the file.
        """
        readers = {".json": cls.load, ".csv": cls.from_csv, ".txt": cls.from_graph}
        suffix = Path(path).suffix.lower()
        if suffix not in readers:
            raise ValueError(
                f"{os.fspath(path)}: the name of a profile ends in .json (hvd_pipe's own), .csv "
                f"(a trace of backward) or .txt (PipeDream's graph), got {suffix or 'none'!r}"
            )
        return readers[suffix](path)

    @classmethod
    def from_graph(cls, path: str | os.PathLike[str]) -> ModelProfile:
        """The model in a profile of PipeDream (``graph.txt``).

        Its nodes become layers in forward order, without those that do no work
        (:meth:`Graph.pruned`). The name is that of the file, or of its folder where the file is a
        bare ``graph.txt``.

        Raises:
            ValueError: malformed, or a cycle; names the file and the line.
        """
        file = Path(path)
        name = file.name.removesuffix(file.suffix).removesuffix(".graph")
        name = file.absolute().parent.name if name == "graph" else name

        def parse(text: str) -> ModelProfile:
            graph = parse_graph(text).pruned()
            return cls(graph.nodes, graph.edges, name=name)

        return load_text(path, parse, "this is no graph, but binary data")

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> ModelProfile:
        """The model in a trace of its backward pass.

        Args:
            path: CSV with the header ``layer,parameter_bytes,backward_us`` and one row a layer in
                forward order, times in microseconds. Columns ``forward_us`` and
                ``activation_bytes`` may follow. Lines that begin with ``#`` are comments.

        Raises:
            ValueError: another header or a malformed row; names the file and the row.
        """
        return load_text(path, cls._from_trace, "this is no trace, but binary data")

    @classmethod
    def _from_trace(cls, text: str) -> ModelProfile:
        lines = text.splitlines()
        rows = list(csv.reader(line for line in lines if line and not line.startswith("#")))
        header = rows[0] if rows else []
        more = header[len(_CSV_COLUMNS) :]
        if header[: len(_CSV_COLUMNS)] != _CSV_COLUMNS or (
            more not in ([], *([column] for column in _CSV_OPTIONAL), _CSV_OPTIONAL)
        ):
            raise ValueError(
                f"the header must be {','.join(_CSV_COLUMNS)!r}, "
                f"got {','.join(header) if rows else 'an empty file'!r}; "
                f"{' and '.join(_CSV_OPTIONAL)} may follow"
            )
        layers = []
        for row in rows[1:]:
            try:
                name, size, microseconds, *rest = row
                extra = dict(zip(more, rest, strict=True))
                forward_s = float(extra.get("forward_us", 0.0)) * 1e-6
                activation = int(extra.get("activation_bytes", 0))
                backward_s = float(microseconds) * 1e-6
                layers.append(LayerProfile(name, int(size), backward_s, forward_s, activation))
            except ValueError as error:
                raise ValueError(f"row {','.join(row)!r}: {error}") from error
        return cls(tuple(layers))


_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True)
class Graph:
    """All nodes and edges of a file, in its order."""

    nodes: tuple[LayerProfile, ...]
    edges: tuple[tuple[str, str], ...]

    def pruned(self) -> Graph:
        """The graph as a planner wants it, its nodes in forward order.

        Nodes that do no work go: ``Input``, whose time is that of loading data, and sinks
        ``__getitem__``, which nothing uses. What led into one leads to what followed it.
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

    Example:
        >>> forward_order(["n10", "n9", "n1"], [("n1", "n10"), ("n1", "n9")])
        ['n1', 'n9', 'n10']
    """
    numbers = [re.search(r"\d+$", name) for name in names]
    known = [int(number[0]) for number in numbers if number]
    keys = known if len(known) == len(names) else list(range(len(names)))
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


def parse_graph(text: str) -> Graph:
    """The graph in a text; ValueError names the line that is wrong."""
    nodes: dict[str, LayerProfile] = {}
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


def _node(line: str) -> LayerProfile:
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
    name, description, _ = parts
    seconds = backward / 1e3, forward / 1e3
    return LayerProfile(name, int(parameters), *seconds, int(activation), description)


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
