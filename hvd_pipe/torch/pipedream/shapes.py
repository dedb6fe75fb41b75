"""What may pass between a model's layers: shapes and dtypes, found by running it on a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from hvd_pipe.pipeline.messages import ITEM_BYTES, TensorSpec
from hvd_pipe.torch.pipedream.graph import Traced
from hvd_pipe.torch.pipedream.joined import attribute, questions, tensors_of

__all__ = ["as_before", "dtype_name", "flat", "named_tensors", "specs", "users_of"]


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
    _check_sample(traced, sample)
    batch = sample[0].shape[0]
    fewer = max(1, batch // 2)
    smaller = [x[:fewer] if x.ndim and x.shape[0] == batch else x for x in sample]
    with as_before(traced, sample, training=False), torch.no_grad():
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


def _check_sample(traced: Traced, sample: Sequence[Tensor]) -> None:
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
    """Return a dtype's plain name: "float32"."""
    found = str(dtype).removeprefix("torch.")
    if found not in ITEM_BYTES:
        raise ValueError(
            f"tensor {name!r} is of dtype {found}, which cannot travel between stages; those that "
            f"can: {', '.join(ITEM_BYTES)}"
        )
    return found


class _Shapes(fx.Interpreter):
    """Runs a model, and notes the tensors that layers after their own use."""

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced.graph_module)
        self._traced = traced
        self._crossing = users_of(traced)
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
        found = flat(result)
        if found and not any(_is_continuous(tensor.dtype) for tensor in found):
            self.discrete.add(n)
        if n.op == "placeholder" or n in self._crossing:
            for name, tensor in named_tensors(self._traced.names[n], result).items():
                self._seen[name] = n, tuple(tensor.shape), tensor.dtype
        return result


def named_tensors(name: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors of a result by name; none where anything in it is not one."""
    if isinstance(value, Tensor):
        return {name: value}
    if not isinstance(value, tuple | list):
        return {}
    found: dict[str, Tensor] = {}
    for index, each in enumerate(value):
        inside = named_tensors(f"{name}[{index}]", each)
        if not inside:
            return {}
        found.update(inside)
    return found


def users_of(traced: Traced) -> dict[fx.Node, set[str]]:
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


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in flat(each)]
    return []


@contextmanager
def as_before(traced: Traced, sample: Sequence[Tensor], training: bool) -> Iterator[None]:
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
