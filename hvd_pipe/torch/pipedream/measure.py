"""Measures layers (times, memory kept for backward) and the memory of a stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.torch.pipedream.graph import Layer, Traced, as_before, flat, part, specs


def profile(
    traced: Traced,
    sample: Sequence[Tensor],
    steps: int = 5,
    skip: int = 2,
    progress: bool = False,
    name: str = "",
) -> ModelProfile:
    """Measure each layer alone, in training mode: medians of its forward and backward pass."""
    if steps < 1 or skip < 0:
        raise ValueError(f"steps is at least 1 and skip at least 0, got {steps} and {skip}")
    run = _Run(traced, sample, steps, skip)
    shown = progress and sys.stderr.isatty()
    layers = track(traced.layers, "measuring layers", transient=True, disable=not shown)
    with as_before(traced.graph_module, traced.model, sample, training=True), torch.enable_grad():
        measured = [run.measure(layer) for layer in layers]
    return ModelProfile(
        tuple(replace(x, saved_bytes=run.saved[x.name]) for x in measured),
        edges=traced.edges,
        batch=sample[0].shape[0],
        name=name or type(traced.model).__name__,
    )


@dataclass
class _StorageUse:
    """A storage of values of the run; it is kept alive, so that its address is not used again."""

    storage: torch.UntypedStorage
    owner: str
    counted: bool = False
    users: int = 0


class _Run:
    """One pass over the layers in order; each is measured on the results of those before."""

    def __init__(self, traced: Traced, sample: Sequence[Tensor], steps: int, skip: int) -> None:
        self._traced, self._steps, self._skip = traced, steps, skip
        values = specs(traced, sample)
        self._gradients = {n: [x.gradient for x in node_specs] for n, node_specs in values.items()}
        self._home = {node: layer.name for layer in traced.layers for node in layer.nodes}
        self._users = traced.users()
        self._env: dict[fx.Node, list[Any]] = {}
        self._storages: dict[int, _StorageUse] = {}
        self.saved = dict.fromkeys(self._home.values(), 0)
        state = [*traced.model.parameters(), *traced.model.buffers()]
        state += traced.graph_module.buffers()
        self._state = {tensor.untyped_storage().data_ptr() for tensor in state}
        self._cuda = any(x.is_cuda for x in [*sample, *state])
        for node, tensor in zip(traced.inputs, sample, strict=True):
            self._keep(node, [tensor.detach().clone()], "")

    def measure(self, layer: Layer) -> LayerProfile:
        sources = [s for node in layer.nodes for s in self._traced.run.tensors_of(node)]
        received = [
            source
            for source in dict.fromkeys(sources)
            if source.op != "get_attr" and self._home.get(source) != layer.name
        ]
        sent = [node for node in layer.nodes if self._users.get(node)]
        module = part(self._traced, layer.nodes, received, sent, copies=True)
        inputs = [x for node in received for x in self._inputs(node)]
        parameters = [p for p in module.parameters() if p.requires_grad]
        wanted = [t for t in [*flat(inputs), *parameters] if t.requires_grad]
        forward, backward = [], []
        saved: dict[int, torch.UntypedStorage] = {}
        for step in range(self._skip + self._steps):
            last = step == self._skip + self._steps - 1
            with _on_saved(lambda x: saved.update({x.data_ptr(): x})) if last else nullcontext():
                start = self._now()
                results = module(*inputs)
                forward.append(self._now() - start)
            if last:
                self._store_results(layer.name, sent, list(results), saved)
            outputs = [t for t in flat(results) if t.requires_grad]
            backward.append(0.0)
            if outputs and wanted:
                ones = [torch.ones_like(t) for t in outputs]
                start = self._now()
                torch.autograd.grad(outputs, wanted, ones, allow_unused=True)
                backward[-1] = self._now() - start
        for node in received:
            self._users[node].discard(layer.name)
            if not self._users[node]:
                self._drop(node)
        crossing = [n for n in sent if self._users[n] - {""} and self._gradients[n]]
        return LayerProfile(
            layer.name,
            gradient_bytes=sum(p.nbytes for p in parameters),
            backward_s=median(backward[self._skip :]),
            forward_s=median(forward[self._skip :]),
            activation_bytes=sum(t.nbytes for n in crossing for t in self._env[n]),
            description=layer.description,
        )

    def _inputs(self, node: fx.Node) -> list[Any]:
        gradients = self._gradients[node]
        if not gradients:  # not tensors: passed on as it is
            return self._env[node]
        pairs = zip(self._env[node], gradients, strict=True)
        return [x.detach().requires_grad_(gradient) for x, gradient in pairs]

    def _store_results(
        self,
        name: str,
        sent: Sequence[fx.Node],
        results: Sequence[Any],
        saved: Mapping[int, torch.UntypedStorage],
    ) -> None:
        """Store a layer's results, and count what autograd keeps for it."""
        at = 0
        for node in sent:
            count = self._traced.run.structures[node].num_leaves
            self._keep(node, results[at : at + count], name)
            at += count
        for address, storage in saved.items():
            known = self._storages.get(address)
            if address in self._state or (known is not None and known.counted):
                continue
            if known is not None:
                known.counted = True
            self.saved[name if known is None else known.owner or name] += storage.nbytes()

    def _keep(self, node: fx.Node, values: Sequence[Any], owner: str) -> None:
        self._env[node] = [pytree.tree_map_only(Tensor, Tensor.detach, x) for x in values]
        for tensor in flat(values):
            storage = tensor.untyped_storage()
            known = self._storages.setdefault(storage.data_ptr(), _StorageUse(storage, owner))
            known.users += 1

    def _drop(self, node: fx.Node) -> None:
        for tensor in flat(self._env.pop(node)):
            address = tensor.untyped_storage().data_ptr()
            self._storages[address].users -= 1
            if not self._storages[address].users:
                del self._storages[address]

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


@contextmanager
def _on_saved(visit: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Call ``visit`` with each storage that autograd keeps."""

    def pack(tensor: Tensor) -> Tensor:
        visit(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


@dataclass(frozen=True)
class StageMemory:
    """Bytes that a worker holds at the most: weights in all versions, gradients, optimizer state.

    Activations are what forward passes keep, received inputs among it, of all in flight.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All bytes of the stage.

        Example:
            >>> StageMemory(weights=8, gradients=4, optimizer=4, activations=2).total
            18
        """
        return self.weights + self.gradients + self.optimizer + self.activations


class ActivationMeter:
    """Counts what autograd keeps for microbatches in flight, each memory once."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._storages: dict[
            int, torch.UntypedStorage
        ] = {}  # kept alive: no address is used twice
        self.is_done = False

    @contextmanager
    def measuring(self, inputs: tuple[object, ...], module: torch.nn.Module) -> Iterator[None]:
        """Count what a forward pass keeps, except its weights."""
        excluded = {x.untyped_storage().data_ptr() for x in module.parameters()}
        # Inputs may be parts of a message, or of a whole data set.
        for x in inputs:
            if isinstance(x, torch.Tensor):
                excluded.add(x.untyped_storage().data_ptr())
                self.most_bytes += x.nbytes

        with _on_saved(lambda x: None if x.data_ptr() in excluded else self._count(x)):
            yield

    def add_outputs(self, outputs: tuple[torch.Tensor, ...]) -> None:
        """Count results, which live until their gradients come."""
        for x in outputs:
            self._count(x.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.data_ptr() not in self._storages:
            self._storages[storage.data_ptr()] = storage
            self.most_bytes += storage.nbytes()

    def end(self) -> None:
        """Measure no more."""
        self.is_done = True
        self._storages.clear()
