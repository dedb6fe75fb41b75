"""Pending tensors: their values are still to come, and the first use settles them.

A gradient that is on its way, or a parameter whose update waits for one, is *pending*: an instance
of a subclass of its own class with ``__torch_function__``. The first function, method or attribute
of torch that may read or change its values has them settled first::

    backward          hold(p.grad, settle)    the gradient is being averaged
    clip_grad_norm_   settle()                waits, and leaves the average in this very tensor
    step()            release(p.grad)         no code has read it, so none has waited

Metadata (the shape, the dtype, whether it has a gradient) may be read without settling. Code in
C++ that Python does not see (an extension's kernels, a scripted function) settles nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._pytree import register_pytree_node

Settle = Callable[[torch.Tensor, Any, tuple[Any, ...]], None]
"""Called with the tensor, the function of torch that needs its values, and the arguments.

It sets the values and calls `release`; then the function runs. A tensor that it has not released
is shown as it is, for this call.
"""

_ATTRIBUTES = (
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "_version",
    "device",
    "dtype",
    "grad",
    "grad_dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "itemsize",
    "layout",
    "names",
    "nbytes",
    "ndim",
    "output_nr",
    "requires_grad",
    "retains_grad",
    "shape",
)

_METHODS = (
    "__len__",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_floating_point",
    "ndimension",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
)

_SET = ("grad", "requires_grad")


def _metadata() -> frozenset[Any]:
    tensor = torch.Tensor
    functions = [getattr(tensor, name).__get__ for name in _ATTRIBUTES if hasattr(tensor, name)]
    functions += [getattr(tensor, name) for name in _METHODS]
    functions += [getattr(tensor, name).__set__ for name in _SET]
    functions += [getattr(tensor, name).__delete__ for name in _SET]
    return frozenset([*functions, torch.numel, torch.is_floating_point, torch.is_complex])


METADATA = _metadata()
"""The functions of torch that do not depend on a tensor's values."""

_SETTLE = "_hvd_pipe_settle"


class _Pending:
    """What the class of a pending tensor has beside the tensor's own."""

    _plain: type[torch.Tensor]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in METADATA:
            for tensor in list(_pending_in((args, kwargs))):
                settle = tensor.__dict__.get(_SETTLE)
                if settle is not None:  # settling one may have settled others
                    settle(tensor, func, args)
            if next(_pending_in((args, kwargs)), None) is None:
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # Python's own protocols, some of which the class of a parameter overrides.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _shown(self) as tensor:
            return tensor.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _shown(self) as tensor:
            return tensor.__reduce_ex__(protocol)


def hold(tensor: torch.Tensor, settle: Settle) -> None:
    """Make a tensor pending, until `release`."""
    tensor.__class__ = _pending_class(type(tensor))
    tensor.__dict__[_SETTLE] = settle


def release(tensor: torch.Tensor) -> None:
    """Undo `hold`; a tensor that is not pending is left as it is."""
    if tensor.__dict__.pop(_SETTLE, None) is not None:
        tensor.__class__ = type(tensor)._plain  # type: ignore[attr-defined]


def is_pending(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's values are still to come."""
    return _SETTLE in tensor.__dict__


@functools.cache
def _pending_class(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    pending_class = type(f"Pending{kind.__name__}", (_Pending, kind), {"_plain": kind})
    if issubclass(kind, torch.nn.Parameter):  # optimizers check this before they use foreach
        _foreach_supported_types.append(pending_class)  # type: ignore[arg-type]
    from torch._dynamo import config  # noqa: PLC0415 - slow; optimizers import it in step()

    # A compiled function would change if its arguments were settled while it is traced.
    not_traced: set[type] = getattr(config, "nontraceable_tensor_subclasses", set())
    not_traced.add(pending_class)
    globals()[pending_class.__name__] = pending_class  # where pickle looks for it
    # torch.func wraps the leaves of its arguments in C++, and takes the arguments apart before.
    register_pytree_node(pending_class, _taken_apart, lambda parts, _: next(iter(parts)))
    return pending_class


def _taken_apart(tensor: torch.Tensor) -> tuple[list[torch.Tensor], None]:
    with _shown(tensor):
        alias = tensor.detach()
    return [alias if is_pending(tensor) else tensor], None


@contextmanager
def _shown(tensor: Any) -> Iterator[Any]:
    """Settle a tensor; one that stays pending has its own class within this."""
    settle = tensor.__dict__.get(_SETTLE)
    if settle is not None:  # another thread may have settled it
        settle(tensor, type(tensor).__reduce_ex__, (tensor,))
    stays = is_pending(tensor)
    if stays:
        release(tensor)
    try:
        yield tensor
    finally:
        if stays:
            hold(tensor, settle)


def _pending_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if is_pending(value):
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _pending_in(item)
    elif isinstance(value, dict):
        yield from _pending_in(list(value.values()))
