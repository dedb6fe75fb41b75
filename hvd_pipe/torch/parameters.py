"""An optimizer's parameters and their gradients: names, dtypes, models, new gradients.

Hooks are called for gradients that backward() computes, and for no others. Users set gradients by
hand, too: ``p.grad = g`` or ``p.grad.copy_(g)``, with g from ``torch.autograd.grad``. So what
``p.grad`` is after a step is remembered, as an object and its version, and compared::

    another tensor                            new
    the same one, written to, not all zero    new
    the same one, written to, all zero        cleared: zero_grad(set_to_none=False)
    the same one, or None                     nothing new

A write by ``p.grad.data`` counts no version, and so cannot be seen. Gradients of one bucket share
their version: a write to one of them is one to all. Zeros that a user writes into all of them
count as cleared: where one rank's may all be zero, it takes ``p.grad = g``.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from horovod.torch import mpi_ops
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def owned_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all parameters of an optimizer, in the order of its groups; frozen ones, too."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def all_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[str]:
    """Return the names of the optimizer's parameters in group order, frozen ones too."""
    owned = owned_by(optimizer)
    if named_parameters is None:
        return [
            f"param.noname.{i}.{j}"
            for i, group in enumerate(optimizer.param_groups)
            for j in range(len(group["params"]))
        ]
    try:
        pairs = list(named_parameters)
    except TypeError:
        raise TypeError(
            "named_parameters must be (name, parameter) tuples, as model.named_parameters() "
            f"gives them; got {type(named_parameters).__name__}."
        ) from None
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            "named_parameters must be (name, parameter) tuples: pass "
            "model.named_parameters(), not model.parameters()."
        )
    given = [name for name, _ in pairs]
    strange = [name for name in given if not isinstance(name, str)]
    if strange:
        raise TypeError(
            f"named_parameters has a name that is no string, {strange[0]!r}: write (name, "
            "parameter), not (parameter, name)."
        )
    twice = sorted(name for name, count in Counter(given).items() if count > 1)
    if twice:
        raise ValueError(
            f"named_parameters has {twice[0]!r} twice: give each model a prefix, as in "
            "model.named_parameters(prefix='generator')."
        )
    names = {id(parameter): name for name, parameter in reversed(pairs)}
    unnamed = [parameter for parameter in owned if id(parameter) not in names]
    if unnamed:
        raise ValueError(
            f"named_parameters lacks {len(unnamed)} of the optimizer's {len(owned)} "
            f"parameters (the first has shape {tuple(unnamed[0].shape)}): pass the names of "
            "every model that this optimizer updates."
        )
    return [names[id(parameter)] for parameter in owned]


def trainable(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the parameters that require a gradient, by name, in group order."""
    owned = owned_by(optimizer)
    training = {name: p for name, p in zip(names, owned, strict=True) if p.requires_grad}
    if not owned:
        raise ValueError(
            "this optimizer has no parameters: give it model.parameters() (a generator that was "
            "read before is empty)."
        )
    if not training:
        raise ValueError(
            f"none of this optimizer's {len(owned)} parameters requires a gradient: call "
            "requires_grad_(True) on what shall train before DistributedOptimizer."
        )
    for name, parameter in training.items():
        check_parameter(name, parameter)
    return training


def check_parameter(name: str, parameter: torch.Tensor) -> None:
    """Raise unless gradients of this dtype and device can be sent."""
    check_has_shape(name, parameter)
    if is_traceable_wrapper_subclass(parameter):
        raise ValueError(
            f"{name!r} is a {type(parameter).__name__}: only plain tensors can be averaged. "
            "FSDP and tensor parallelism average theirs; use the optimizer without "
            "DistributedOptimizer."
        )
    dtype, device = parameter.dtype, parameter.device.type
    sendable = device == "cpu" or (device == "cuda" and mpi_ops.cuda_built())
    if dtype in _DTYPES and sendable and parameter.layout == torch.strided:
        return
    fix = "keep parameters in float32, float64, float16 or bfloat16"
    if dtype.is_complex:
        fix = "keep its real and imaginary parts as two parameters, and join them in forward()"
    elif device == "meta":
        fix = "give the model memory first (model.to_empty(device=...), then load its weights)"
    elif device == "cuda" and not mpi_ops.cuda_built():
        fix = (
            "build Horovod for CUDA (hvd-pipe build-horovod --cuda), or move the model to the CPU"
        )
    elif device not in ("cpu", "cuda"):
        fix = "move the model to the CPU or to a CUDA device"
    raise ValueError(
        f"Horovod cannot all-reduce {name!r}, {dtype} ({parameter.layout}) on "
        f"{parameter.device}: {fix}."
    )


def check_has_shape(name: str | None, tensor: torch.Tensor) -> None:
    """Raise where a LazyModule has not made its parameter yet."""
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(
            f"{name!r} has no shape yet: run one batch through the model, on all ranks, before "
            "hvd.broadcast_parameters and DistributedOptimizer."
        )


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient; ``p.grad_dtype`` sets it (torch 2.10 on)."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


class NewGradients:
    """Distinguishes gradients that wait to be applied from those that were applied or dropped."""

    def __init__(self) -> None:
        self._parameters: Sequence[torch.Tensor] = ()
        self._gradients: list[weakref.ref[torch.Tensor] | None] = []
        self._versions: list[int] = []

    def note_old(self, parameters: Sequence[torch.Tensor]) -> None:
        """Mark the current gradients as consumed; every step does, in about 0.2 us a parameter."""
        with torch._C.DisableTorchFunctionSubclass():  # some may be pending
            gradients = [parameter.grad for parameter in parameters]
            self._versions = [0 if g is None else g._version for g in gradients]
        self._parameters = parameters
        self._gradients = [None if g is None else weakref.ref(g) for g in gradients]

    def note_none(self) -> None:
        """Register that no parameter has a gradient: whatever comes is new."""
        self._parameters, self._gradients, self._versions = (), [], []

    def note_written(self, parameters: Sequence[torch.Tensor]) -> None:
        """Keep gradients that an update has written into marked as consumed (nesterov does)."""
        places = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        for parameter in parameters:
            place = places.get(id(parameter))
            if place is not None and parameter.grad is not None:
                self._versions[place] = parameter.grad._version

    def any_new(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether any gradient is new."""
        consumed = zip(self._gradients, self._versions, strict=True)
        old = dict(zip(map(id, self._parameters), consumed, strict=True))
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            reference, version = old.get(id(parameter), (None, 0))
            if reference is None or reference() is not gradient:
                return True
            if gradient._version != version and not is_zero(gradient):
                return True
        return False


def is_zero(gradient: torch.Tensor) -> bool:
    """Return whether all elements are zero."""
    return not bool(_dense(gradient).any())


def unscale(parameters: Sequence[torch.Tensor], scale: float) -> None:
    """Divide all gradients by ``scale``, in place."""
    gradients = [_dense(p.grad) for p in parameters if p.grad is not None]
    if scale != 1.0 and gradients:
        torch._foreach_mul_(gradients, 1.0 / scale)


def are_finite(gradients: Iterable[torch.Tensor]) -> bool:
    """Return whether no element is infinite or NaN; the host waits once for each device."""
    answers: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        answers.setdefault(gradient.device, []).append(torch.isfinite(_dense(gradient)).all())
    return all(bool(torch.stack(flags).all()) for flags in answers.values())


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the gradient's numbers."""
    return gradient._values() if gradient.is_sparse else gradient


class ModelFinder:
    """Finds the models of an optimizer's parameters, by a hook on all modules, for some steps.

    ``visit`` is called with the outermost module that holds some, before its forward pass, and
    their identities; ``through_graph``, also where `torch.func.functional_call` replaced them.
    """

    def __init__(
        self, visit: Callable[[torch.nn.Module, set[int]], object], steps: int, through_graph: bool
    ) -> None:
        self._visit, self._most_steps = weakref.WeakMethod(visit), steps
        self._through_graph = through_graph
        self._wanted: set[int] = set()
        self._hook: RemovableHandle | None = None
        self._steps = 0

    def look_for(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look for the models of these parameters as well."""
        self._wanted |= set(map(id, parameters))
        self._steps = 0
        if self._hook is not None or not self._wanted:
            return
        reference = weakref.ref(self)

        def look(module: torch.nn.Module, _: object) -> None:
            if torch.compiler.is_compiling():
                return
            finder = reference()
            if finder is None:
                hook.remove()
            else:
                finder._look_at(module)

        hook = self._hook = torch.nn.modules.module.register_module_forward_pre_hook(look)

    def end_step(self) -> None:
        """Count a step; after some, look for no further models."""
        self._steps += 1
        if self._steps > self._most_steps:
            self._stop()

    def _look_at(self, module: torch.nn.Module) -> None:
        held = self._wanted.intersection(map(id, module.parameters()))
        if not held and self._through_graph:
            held = self._wanted.intersection(map(id, _computed_from(module.parameters())))
        visit = self._visit()
        if held and visit is not None:
            self._wanted -= held
            visit(module, held)
        if not self._wanted:
            self._stop()

    def _stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


_MOST_NODES = 100_000  # of autograd's graph: fast weights lead through whole inner steps


def _computed_from(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the leaves of autograd's graph that these tensors were computed from."""
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(nodes)
    while nodes and len(seen) < _MOST_NODES:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        nodes += following
