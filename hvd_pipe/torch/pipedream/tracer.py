"""From a model to a graph of calls: a row of modules as it is, all else by ``torch.fx``."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from hvd_pipe.errors import HvdPipeError

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_WAYS_OUT = (
    "Make this line independent of the data, or move it into a submodule, which is then kept "
    "whole; or give the stages yourself, PipeDream([stage0, stage1, ...], ...); or write the "
    "model as nn.Sequential."
)


def graph_of(model: nn.Module | Sequence[nn.Module], inputs: int) -> tuple[nn.Module, fx.Graph]:
    """Return the model as one module, and the calls that its forward pass makes."""
    row: list[nn.Module] | None = None
    if isinstance(model, nn.Sequential):
        row = _row(model)
    elif not isinstance(model, nn.Module):
        if isinstance(model, str) or not isinstance(model, Sequence) or not model:
            raise TypeError(f"model must be a module or a list of modules, got {model!r}")
        wrong = [stage for stage in model if not isinstance(stage, nn.Module)]
        if wrong:
            raise TypeError(f"a stage must be a module, got {wrong[0]!r}")
        row = list(model)
        model = nn.Sequential(*model)
    names = _names(model, inputs)
    if row is None:
        if isinstance(model, fx.GraphModule):
            return model, _copied(model, inputs)
        return model, _traced(model, names)
    graph, paths = fx.Graph(), {module: path for path, module in model.named_modules()}
    value = graph.placeholder(names[0])
    for module in row:
        value = graph.call_module(paths[module], (value,))
    graph.output(value)
    return model, graph


def _row(model: nn.Module) -> list[nn.Module] | None:
    """Return the modules of an nn.Sequential, if torch has made them all."""
    if not isinstance(model, nn.Sequential):
        return [model] if type(model).__module__.startswith("torch.nn") else None
    rows = [_row(module) for module in model]
    if type(model).forward is not nn.Sequential.forward or None in rows or _has_hooks(model):
        return None
    return [module for row in rows if row is not None for module in row]


def _has_hooks(module: nn.Module) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name) for name in hooks)


def _copied(model: fx.GraphModule, inputs: int) -> fx.Graph:
    """Return the graph of a model that was traced before, with the inputs of the sample."""
    try:
        model.train(model.training)
    except NotImplementedError as error:
        raise TypeError(
            "a model of torch.export keeps the mode that it was exported in, so it cannot be "
            "trained: give the plain model, or its stages, PipeDream([stage0, stage1, ...])"
        ) from error
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for number, node in enumerate(model.graph.nodes):
        if node.op == "placeholder" and number >= inputs:  # inputs come first
            copies[node] = node.args[0]
        elif node.op == "output":
            graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph


def _traced(model: nn.Module, names: Sequence[str]) -> fx.Graph:
    whole: set[str] = set()
    while True:
        with _unchanged(model):
            try:
                return _Tracer(names, whole).trace(model)
            except _InsideError as failure:
                whole.add(failure.path)
            except Exception as error:
                lines = str(error).splitlines()
                message = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
                raise HvdPipeError(
                    f"{type(model).__name__} cannot be cut into layers: {_place(error)} fails "
                    f"when forward is traced, with {message}. {_WAYS_OUT}"
                ) from error


class _InsideError(Exception):
    """Tracing failed inside of a submodule."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class _Tracer(fx.Tracer):
    """Follows calls as fx does, with these differences.

    * ``self.training`` and buffers are read when the graph runs, not when it is traced: train()
      and eval() work on ``F.dropout(x, training=self.training)``.
    * Where tracing fails, the innermost submodule is recorded, and kept whole the next time.
    * Operations under no_grad, autocast and the like fail: the graph would not keep that.
    """

    def __init__(self, names: Sequence[str], whole: set[str]) -> None:
        super().__init__()
        self._names, self._whole = names, whole
        self._modes = _modes()

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._names]
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
        except _InsideError:
            raise
        except Exception as error:
            raise _InsideError(path) from error

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if not isinstance(attr_val, torch.Tensor):
            return attr_val
        for name, tensor in [*self.root.named_parameters(), *self.root.named_buffers()]:
            if tensor is attr_val:
                if name not in parameter_proxy_cache:
                    node = self.create_node("get_attr", name, (), {})
                    parameter_proxy_cache[name] = _Attribute(node, self, attr_val)
                return parameter_proxy_cache[name]
        return attr_val

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if kind.startswith("call_") and _modes() != self._modes:
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

    def __getattr__(self, k: str) -> Any:
        if k in ("shape", "ndim", "size", "dim", "numel"):
            return getattr(self._tensor, k)
        return super().__getattr__(k)

    def __len__(self) -> int:
        return len(self._tensor)


def _modes() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *map(torch.is_autocast_enabled, ("cpu", "cuda"))


def _names(module: nn.Module, inputs: int) -> list[str]:
    """Return a name for each argument that forward gets."""
    names, required, rest, model = [], 0, None, type(module).__name__
    for argument in inspect.signature(module.forward).parameters.values():
        if argument.kind is argument.VAR_POSITIONAL:
            rest = argument.name
        elif argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD):
            names.append(argument.name)
            required += argument.default is argument.empty
        elif argument.kind is argument.KEYWORD_ONLY and argument.default is argument.empty:
            raise TypeError(
                f"{model}.forward needs {argument.name!r} by keyword, but a minibatch gives its "
                "inputs by position: give the argument a place or a default"
            )
    if rest is not None:
        names += [f"{rest}_{number}" for number in range(inputs - len(names))]
    if not required <= inputs <= len(names):
        raise TypeError(
            f"{model}.forward takes {required} to {len(names)} inputs, but the sample has {inputs}"
        )
    return names[:inputs]


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of modules that forward and tracing set (such as proxies)."""
    modules = list(model.modules())
    before = [dict(vars(module)) for module in modules]
    try:
        yield
    finally:
        for module, attributes in zip(modules, before, strict=True):
            now = vars(module)
            for key in [key for key in now if key not in attributes]:
                if module is not model or not key.startswith("_"):  # constants of the graph
                    del now[key]
            now.update(attributes)


def _place(error: BaseException) -> str:
    """Return where the user's code was when it failed: its innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    if not user_frames:
        return "a call"
    last = user_frames[-1]
    return f"{last.filename}:{last.lineno} ({(last.line or last.name).strip()})"
