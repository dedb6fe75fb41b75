"""From a user's module to a graph of calls: ``torch.fx``, with submodules that fail kept whole."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from hvd_pipe.errors import HvdPipeError

__all__ = ["graph_of"]

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_WAYS_OUT = (
    "Make this line independent of the data, or move it into a submodule, which is then kept "
    "whole; or give the stages yourself, PipeDream([stage0, stage1, ...], ...); or write the "
    "model as nn.Sequential; or give torch.export.export(model, args).module() as the model."
)


def graph_of(model: nn.Module, inputs: int | None, whole: set[str]) -> fx.Graph:
    """Return the calls that a model's forward makes, with the model as it was before."""
    while True:
        with _unchanged(model):
            try:
                return _Tracer(inputs, whole).trace(model)
            except _Inside as failure:
                whole.add(failure.path)
            except _ArgumentsError as error:
                raise TypeError(str(error)) from None
            except Exception as error:
                raise HvdPipeError(
                    f"{type(model).__name__} cannot be cut into layers: {_place(error)} fails "
                    f"when forward is traced, with {_said(error)}. {_WAYS_OUT}"
                ) from error


class _Inside(Exception):  # noqa: N818
    """Tracing failed inside of a submodule."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class _ArgumentsError(Exception):
    """The model does not take so many arguments."""


class _Tracer(fx.Tracer):
    """Follows calls as fx does, with these differences.

    * ``self.training`` is read when the graph runs, not when it is traced: train() and eval()
      work on ``F.dropout(x, training=self.training)``.
    * Buffers are read when the graph runs, too.
    * What fails is known by the innermost submodule.
    * Operations under no_grad, autocast and the like fail: the graph would not keep that.
    """

    def __init__(self, inputs: int | None, whole: set[str]) -> None:
        super().__init__()
        self._inputs, self._whole = inputs, whole
        self._around = _surroundings()

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        names = _names(root_fn, self._inputs, type(self.root).__name__)
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in names]
        self._follow_training(self.root, "")
        return root_fn, [self.root, *proxies]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            module_qualified_name in self._whole
            or isinstance(m, torch.jit.ScriptModule)
            or type(m).__name__ == "OptimizedModule"  # compiled
            or parametrize.is_parametrized(m)
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        self._follow_training(m, path)
        try:
            return super().call_module(m, forward, args, kwargs)
        except _Inside:
            raise
        except Exception as error:
            raise _Inside(path) from error

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if not isinstance(attr_val, torch.Tensor):
            return attr_val
        for tensors in (self.root.named_parameters(), self.root.named_buffers()):
            for name, tensor in tensors:
                if tensor is attr_val:
                    if name not in parameter_proxy_cache:
                        node = self.create_node("get_attr", name, (), {})
                        parameter_proxy_cache[name] = _Attribute(node, self, tensor)
                    return parameter_proxy_cache[name]
        return attr_val

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if kind.startswith("call_") and _surroundings() != self._around:
            raise RuntimeError(
                "a cut does not keep torch.no_grad, torch.autocast and the like within forward"
            )
        return super().create_node(kind, *args, **kwargs)

    def _follow_training(self, module: nn.Module, path: str) -> None:
        target = f"{path}.training" if path else "training"
        # Past __setattr__, which modules may have of their own; `_unchanged` puts it back.
        module.__dict__["training"] = self.create_proxy("get_attr", target, (), {})


class _Attribute(fx.Proxy):
    """A parameter or buffer of the model: its sizes are known, and are plain numbers."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: torch.Tensor) -> None:
        super().__init__(node, tracer)
        self._tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self._tensor.shape

    @property
    def ndim(self) -> int:
        return self._tensor.ndim

    def size(self, dim: int | None = None) -> Any:
        return self._tensor.size() if dim is None else self._tensor.size(dim)

    def dim(self) -> int:
        return self._tensor.dim()

    def numel(self) -> int:
        return self._tensor.numel()

    def __len__(self) -> int:
        return len(self._tensor)


def _surroundings() -> tuple[bool, ...]:
    kinds = ("cpu", "cuda")
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(kind) for kind in kinds)


def _names(forward: Callable[..., Any], inputs: int | None, model: str) -> list[str]:
    """Return a name for each argument that forward gets."""
    first, *others = inspect.signature(forward).parameters.values()
    names, required, rest = [], 0, None
    for each in (first, *others) if first.kind is first.VAR_POSITIONAL else others:
        if each.kind is each.VAR_POSITIONAL:
            rest = each.name
        elif each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD):
            names.append(each.name)
            required += each.default is each.empty
        elif each.kind is each.KEYWORD_ONLY and each.default is each.empty:
            raise _ArgumentsError(
                f"{model}.forward needs {each.name!r} by keyword, but a minibatch gives its "
                "inputs by position: give the argument a place or a default"
            )
    if inputs is None:
        inputs = required
    if rest is not None:
        names += [f"{rest}_{number}" for number in range(inputs - len(names))]
    if not required <= inputs <= len(names):
        raise _ArgumentsError(
            f"{model}.forward takes {required} to {len(names)} inputs, but the sample has {inputs}"
        )
    return names[:inputs]


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put back what forward sets on modules (a proxy would stay there), and what tracing does."""
    modules = list(model.modules())
    before = [dict(vars(module)) for module in modules]
    try:
        yield
    finally:
        for module, found in zip(modules, before, strict=True):
            now = vars(module)
            for key in [key for key in now if key not in found]:
                if module is not model or not key.startswith("_"):
                    del now[key]
            now.update(found)


def _place(error: BaseException) -> str:
    """Return where the user's code was when it failed: its innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    if not theirs:
        return "a call"
    found = theirs[-1]
    return f"{found.filename}:{found.lineno} ({(found.line or found.name).strip()})"


def _said(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
