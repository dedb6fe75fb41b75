"""What a model's layers take, and what passes between them: measured on a sample minibatch."""

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
from torch import Tensor, fx, nn

from hvd_pipe.pipeline.spec import ITEM_BYTES, TensorSpec
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.torch.pipedream.cut import part, parts_of
from hvd_pipe.torch.pipedream.graph import Layer, Traced
from hvd_pipe.torch.pipedream.nodes import attribute, questions, tensors_of

__all__ = ["profile", "specs"]


def specs(traced: Traced, sample: Sequence[Tensor]) -> dict[str, TensorSpec]:
    """Run a model on a sample, and on half of it, to see what may pass between stages.

    The batch size is the first dimension of the first input; inputs with the same first dimension
    are halved with it. A model that does not take the half has no dynamic dimension. Buffers,
    random numbers and training flags are as before.

    Args:
        traced: The model.
        sample: Its inputs, of the largest minibatch.

    Returns:
        By name, every input and every tensor that layers after its own use; "name[1]" is part 1
        of a tuple.

    Raises:
        ValueError: Not as many inputs as the model takes, or one without a batch.
        TypeError: An input is no tensor.

    Example:
        >>> from hvd_pipe.torch.pipedream.graph import trace
        >>> found = specs(trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU())), (torch.ones(8, 4),))
        >>> found["0"]
        TensorSpec(name='0', shape=(8, 3), dtype='float32', dynamic=(0,), gradient=True)
        >>> found["input"].gradient
        False
    """
    check_sample(traced, sample)
    batch = sample[0].shape[0]
    fewer = max(1, batch // 2)
    smaller = [x[:fewer] if x.ndim and x.shape[0] == batch else x for x in sample]
    with _as_before(traced, sample, training=False), torch.no_grad():
        shapes = _Shapes(traced)
        planned = shapes.see(sample)
        try:
            found = _Shapes(traced).see(smaller)
        except Exception:  # as it would do with a smaller last minibatch
            found = planned
    differentiable = _differentiable(traced, shapes.discrete)
    made = {}
    for name, (node, shape, dtype) in planned.items():
        other = found[name][1] if name in found else shape
        alike = len(other) == len(shape)
        dynamic = [at for at in range(len(shape)) if alike and other[at] != shape[at]]
        gradient = node in differentiable and _is_continuous(dtype)
        made[name] = TensorSpec(name, shape, dtype_name(dtype, name), tuple(dynamic), gradient)
    return made


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
    with _as_before(traced, sample, training=True), torch.enable_grad():
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


def check_sample(traced: Traced, sample: Sequence[Tensor]) -> None:
    """Check that a sample is inputs of a model."""
    if not isinstance(sample, tuple | list):
        raise TypeError(f"sample is a tuple of the model's inputs, got {type(sample).__name__}")
    wanted = [traced.names[node] for node in traced.inputs]
    if len(sample) != len(wanted):
        raise ValueError(
            f"the model takes {len(wanted)} inputs ({', '.join(wanted)}), but the sample has "
            f"{len(sample)}: give one tensor for each"
        )
    for key, value in zip(wanted, sample, strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(f"input {key!r} must be a tensor, got {type(value).__name__}")
    if sample and (sample[0].ndim == 0 or sample[0].shape[0] < 1):
        raise ValueError(
            f"the first dimension of the first input is the batch, which has at least 1 sample; "
            f"got the shape {tuple(sample[0].shape)}"
        )


def dtype_name(dtype: torch.dtype, name: str = "") -> str:
    """Return a dtype's plain name: "float32".

    Raises:
        ValueError: Tensors of it cannot travel.
    """
    found = str(dtype).removeprefix("torch.")
    if found not in ITEM_BYTES:
        raise ValueError(
            f"tensor {name!r} is of dtype {found}, which cannot travel between stages; those that "
            f"can: {', '.join(ITEM_BYTES)}"
        )
    return found


# Shapes.


class _Shapes(fx.Interpreter):
    """Runs a model, and notes the tensors that layers after their own use."""

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced.graph_module)
        self._traced = traced
        self._crossing = _users(traced)
        self.discrete: set[fx.Node] = set()  # integers and booleans carry no gradient
        self._seen: dict[str, tuple[fx.Node, tuple[int, ...], torch.dtype]] = {}

    def see(
        self, sample: Sequence[Tensor]
    ) -> dict[str, tuple[fx.Node, tuple[int, ...], torch.dtype]]:
        # Clones: the model may change its inputs in place.
        self.run(*(x.detach().clone() for x in sample))
        return self._seen

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        found = _flat(result)
        if found and not any(_is_continuous(tensor.dtype) for tensor in found):
            self.discrete.add(n)
        if n.op == "placeholder" or n in self._crossing:
            for name, tensor in _tensors(self._traced.names[n], result).items():
                self._seen[name] = n, tuple(tensor.shape), tensor.dtype
        return result


def _tensors(name: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors of a result by name; none where anything in it is not one."""
    if isinstance(value, Tensor):
        return {name: value}
    if not isinstance(value, tuple | list):
        return {}
    found: dict[str, Tensor] = {}
    for index, each in enumerate(value):
        inside = _tensors(f"{name}[{index}]", each)
        if not inside:
            return {}
        found.update(inside)
    return found


def _users(traced: Traced) -> dict[fx.Node, set[str]]:
    """Return the values that other layers than their own use, or that the model returns."""
    asks = questions(traced.graph_module.graph)
    home = {node: layer.name for layer in traced.layers for node in layer.nodes}
    found: dict[fx.Node, set[str]] = {}
    for node in [*home, traced.output]:
        mine = home.get(node, "")
        for source in tensors_of(node, asks):
            if source.op != "get_attr" and home.get(source) != mine:
                found.setdefault(source, set()).add(mine)
    return found


def _is_continuous(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _differentiable(traced: Traced, discrete: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose results depend on a parameter that is trained."""
    found: set[fx.Node] = set()
    made = traced.graph_module
    for node in made.graph.nodes:
        detached = str(node.target).startswith("detach") or ".detach" in str(node.target)
        if detached or node in discrete:
            continue
        trained = any(source in found for source in node.all_input_nodes)
        if node.op == "call_module":
            trained |= any(p.requires_grad for p in made.get_submodule(node.target).parameters())
        elif node.op == "get_attr":
            value = attribute(made, node.target)
            if isinstance(value, nn.Module):
                trained |= any(p.requires_grad for p in value.parameters())
            trained |= isinstance(value, Tensor) and value.requires_grad
        if trained:
            found.add(node)
    return found


# Times and bytes.


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
        self.users = {node: set(users) for node, users in _users(self.traced).items()}
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
            outputs = [t for t in _flat(results) if t.requires_grad]
            wanted = [t for t in [*_flat(inputs), *parameters] if t.requires_grad]
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
        size = sum(t.nbytes for name, r in crossing for t in _tensors(name, r).values())
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
        for tensor in _flat(value):
            storage = tensor.untyped_storage()
            held = self.held.setdefault(storage.data_ptr(), _Held(storage, owner))
            held.users += 1

    def _drop(self, node: fx.Node) -> None:
        for tensor in _flat(self.env.pop(node)):
            address = tensor.untyped_storage().data_ptr()
            held = self.held[address]
            held.users -= 1
            if not held.users:
                del self.held[address]

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in _flat(each)]
    return []


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


@contextmanager
def _as_before(traced: Traced, sample: Sequence[Tensor], training: bool) -> Iterator[None]:
    """Put training flags, buffers and random numbers back."""
    modules = {id(m): m for root in (traced.graph_module, traced.model) for m in root.modules()}
    flags = [(module, module.training) for module in modules.values()]
    tensors = {id(b): b for module in modules.values() for b in module.buffers(recurse=False)}
    buffers = [(buffer, buffer.detach().clone()) for buffer in tensors.values()]
    devices = sorted({t.device.index for t in [*sample, *tensors.values()] if t.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            for module, _ in flags:
                # Not train(): a module may do other things there, such as keep a part in eval.
                module.training = training
            yield
        finally:
            for module, flag in flags:
                module.training = flag
            with torch.no_grad():
                for buffer, value in buffers:
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)
