"""What a model's layers take and keep for backward, and what a stage holds in memory: measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, fx

from hvd_pipe.pipeline.messages import TensorSpec
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.torch.pipedream.cut import part, parts_of
from hvd_pipe.torch.pipedream.graph import Layer, Traced
from hvd_pipe.torch.pipedream.joined import questions, tensors_of
from hvd_pipe.torch.pipedream.shapes import as_before, flat, named_tensors, specs, users_of

__all__ = ["ActivationMeter", "StageMemory", "profile"]


def profile(
    traced: Traced,
    sample: Sequence[Tensor],
    steps: int = 5,
    skip: int = 2,
    progress: bool = False,
    name: str = "",
) -> ModelProfile:
    """Measure each layer alone, in training mode: medians of its forward and backward pass.

    A layer's ``saved_bytes`` are those of the tensors made by it that autograd keeps for backward
    on anyone's behalf, its own or of layers that use them: a tensor counts for the layer that made
    it, once, its views included. So what a stage keeps is what it received, and the sum over its
    layers. Parameters and buffers do not count. The model's own inputs count for the first layer
    that keeps them.

    Args:
        traced: The model.
        sample: Its inputs.
        steps: How often each layer is measured.
        skip: How often each is run before.
        progress: Show a bar where it takes more than seconds.
        name: Of the model; its class's if left out.

    Raises:
        ValueError: No step, or as :func:`specs`.
        TypeError: As :func:`specs`.
    """
    if steps < 1 or skip < 0:
        raise ValueError(f"steps is at least 1 and skip at least 0, got {steps} and {skip}")
    values = specs(traced, sample)
    measured = []
    with as_before(traced, sample, training=True), torch.enable_grad():
        run = _Run(traced, values, sample, steps, skip)
        for layer in track(
            traced.layers,
            "measuring layers",
            transient=True,
            disable=not (progress and sys.stderr.isatty()),
        ):
            measured.append(run.measure(layer))
    layers = [
        LayerProfile(
            layer.name,
            gradient_bytes=sum(
                p.nbytes for p in traced.parameters[layer.name].values() if p.requires_grad
            ),
            backward_s=cost.backward_s,
            forward_s=cost.forward_s,
            activation_bytes=cost.sent_bytes,
            description=layer.description,
            saved_bytes=run.saved[layer.name],
        )
        for layer, cost in zip(traced.layers, measured, strict=True)
    ]
    return ModelProfile(
        tuple(layers),
        edges=traced.edges,
        batch=sample[0].shape[0],
        name=name or type(traced.model).__name__,
    )


@dataclass
class _Cost:
    forward_s: float
    backward_s: float
    sent_bytes: int


@dataclass
class _Held:
    """A storage that values of the run have; it is kept, so that its address stays its own."""

    storage: torch.UntypedStorage
    owner: str | None
    counted: bool = False
    users: int = 0


@dataclass
class _Run:
    """One pass over the layers in order, each of them measured with what those before made."""

    traced: Traced
    values: Mapping[str, TensorSpec]
    sample: Sequence[Tensor]
    steps: int
    skip: int
    saved: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.asks = questions(self.traced.graph_module.graph)
        self.home = {node: layer.name for layer in self.traced.layers for node in layer.nodes}
        self.users = {node: set(users) for node, users in users_of(self.traced).items()}
        self.env: dict[fx.Node, Any] = {}
        self.held: dict[int, _Held] = {}
        state = [*self.traced.model.parameters(), *self.traced.model.buffers()]
        state += [*self.traced.graph_module.buffers()]
        self.state = {tensor.untyped_storage().data_ptr() for tensor in state}
        self.cuda = any(x.is_cuda for x in [*self.sample, *state])
        for node, tensor in zip(self.traced.inputs, self.sample, strict=True):
            self._keep(node, tensor.detach().clone(), None)
        self.saved = {layer.name: 0 for layer in self.traced.layers}

    def measure(self, layer: Layer) -> _Cost:
        received: dict[fx.Node, tuple[tuple[int, ...], ...]] = {}
        for node in layer.nodes:
            for source in tensors_of(node, self.asks):
                if source.op != "get_attr" and self.home.get(source) != layer.name:
                    received[source] = parts_of(self.traced, source, self.values)
        sent = {
            node: parts_of(self.traced, node, self.values)
            for node in layer.nodes
            if self.users.get(node)
        }
        # What is no tensor cannot be a flat result: it is given on as it is.
        module = part(self.traced, layer.nodes, received, dict.fromkeys(sent, ()), True, self.asks)
        inputs = self._inputs(received)
        parameters = [p for p in self.traced.parameters[layer.name].values() if p.requires_grad]
        forward, backward = [], []
        for step in range(self.skip + self.steps):
            last = step == self.skip + self.steps - 1
            kept: dict[int, torch.UntypedStorage] = {}
            with _noting(kept) if last else nullcontext():
                start = self._now()
                results = module(*inputs)
                middle = self._now()
            if last:
                self._count(layer.name, kept, dict(zip(sent, results, strict=True)))
            outputs = [t for t in flat(results) if t.requires_grad]
            wanted = [t for t in [*flat(inputs), *parameters] if t.requires_grad]
            seconds = 0.0
            if outputs and wanted:
                gradients = [torch.ones_like(t) for t in outputs]
                begun = self._now()
                torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)
                seconds = self._now() - begun
            if step >= self.skip:
                forward.append(middle - start)
                backward.append(seconds)
        for node in received:
            self.users[node].discard(layer.name)
            if not self.users[node]:
                self._drop(node)
        crossing = [
            (self.traced.names[node], result)
            for node, result in zip(sent, results, strict=True)
            if self.users[node] - {""}
        ]
        size = sum(t.nbytes for name, r in crossing for t in named_tensors(name, r).values())
        return _Cost(median(forward), median(backward), size)

    def _inputs(self, received: Mapping[fx.Node, Any]) -> list[Any]:
        inputs = []
        for node, places in received.items():
            value, name = self.env[node], self.traced.names[node]
            if not places:
                inputs.append(self._leaf(value, name))
                continue
            for at in places:
                each = value
                for index in at:
                    each = each[index]
                inputs.append(self._leaf(each, name + "".join(f"[{index}]" for index in at)))
        return inputs

    def _leaf(self, value: Any, name: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        spec = self.values.get(name)
        return value.detach().requires_grad_(spec is not None and spec.gradient)

    def _count(
        self, name: str, kept: Mapping[int, torch.UntypedStorage], results: Mapping[fx.Node, Any]
    ) -> None:
        """Count what autograd keeps for a layer, and take its results over."""
        for node, value in results.items():
            self._keep(node, value, name)
        for address, storage in kept.items():
            if address in self.state or not storage.nbytes():
                continue
            held = self.held.get(address)
            if held is None:
                self.saved[name] += storage.nbytes()
            elif not held.counted:
                held.counted = True
                self.saved[held.owner or name] += storage.nbytes()

    def _keep(self, node: fx.Node, value: Any, owner: str | None) -> None:
        self.env[node] = _detached(value)
        for tensor in flat(value):
            storage = tensor.untyped_storage()
            held = self.held.setdefault(storage.data_ptr(), _Held(storage, owner))
            held.users += 1

    def _drop(self, node: fx.Node) -> None:
        for tensor in flat(self.env.pop(node)):
            address = tensor.untyped_storage().data_ptr()
            held = self.held[address]
            held.users -= 1
            if not held.users:
                del self.held[address]

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple | list):
        return tuple(_detached(each) for each in value)
    if isinstance(value, dict):
        return {key: _detached(each) for key, each in value.items()}
    return value


@contextmanager
def _noting(kept: dict[int, torch.UntypedStorage]) -> Iterator[None]:
    """Note the storages that autograd keeps; they are held, so that no two have one address."""

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a worker holds at the most.

    Args:
        weights: Parameters, in all versions.
        gradients: As large as the parameters that are trained.
        optimizer: Its state.
        activations: What forward passes keep for backward, received inputs among it, of all
            microbatches in flight.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it.

        Example:
            >>> StageMemory(weights=8, gradients=4, optimizer=4, activations=2).total
            18
        """
        return self.weights + self.gradients + self.optimizer + self.activations


class ActivationMeter:
    """Counts what autograd keeps for microbatches in flight, each memory once.

    A pipeline holds the most before its first backward pass, so that is when it measures.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        self._kept: dict[int, torch.UntypedStorage] = {}  # which live on, so addresses are theirs
        self.is_done = False

    @contextmanager
    def noting(self, inputs: tuple[object, ...], module: torch.nn.Module) -> Iterator[None]:
        """Note what a forward pass keeps, but for its weights."""
        own = {x.untyped_storage().data_ptr() for x in module.parameters()}
        # Inputs may be parts of a message, or of a whole data set.
        for x in inputs:
            if isinstance(x, torch.Tensor):
                own.add(x.untyped_storage().data_ptr())
                self.most_bytes += x.nbytes

        def note(x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in own:
                self._count(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            yield

    def note(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Note results, which live until their gradients come."""
        for x in outputs:
            self._count(x)

    def _count(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._kept:
            self._kept[storage.data_ptr()] = storage
            self.most_bytes += storage.nbytes()

    def end(self) -> None:
        """Measure no more."""
        self.is_done = True
        self._kept.clear()
