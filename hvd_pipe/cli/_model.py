"""A model that the command line names: made by its factory, fed with made-up inputs."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hvd_pipe.cli.output import InputError
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.torch.layer_times import measure_profile

__all__ = ["Shape", "measure"]

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.bool,
    )
}
_SHAPE = re.compile(r"(?P<sizes>[1-9][0-9]*(,[1-9][0-9]*)*)(:(?P<dtype>\w+))?")


@dataclass(frozen=True)
class Shape:
    """One input of a model: ``32,3,224,224`` or ``32,128:int64``.

    Example:
        >>> Shape.parse("32,128:int64").sizes
        (32, 128)
    """

    text: str
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read one; ValueError says what is accepted."""
        match = _SHAPE.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"--input takes sizes and perhaps a dtype, 32,3,224,224 or 32,128:int64; "
                f"got {text!r}"
            )
        name = match["dtype"] or "float32"
        if name not in DTYPES:
            raise ValueError(f"--input {text}: the dtype is one of {', '.join(DTYPES)}")
        return cls(text, tuple(map(int, match["sizes"].split(","))), DTYPES[name])

    def make(self, device: torch.device) -> Tensor:
        """Return a tensor of this shape: normal numbers, or zeros and ones where it has integers.

        Zeros and ones are indices of every embedding and classes of every task with two.
        """
        if self.dtype.is_floating_point:
            return torch.randn(self.sizes, device=device, dtype=self.dtype)
        return torch.randint(0, 2, self.sizes, device=device, dtype=self.dtype)


def measure(
    name: str, inputs: Sequence[str], loss: str | None, device: str | None, steps: int
) -> ModelProfile:
    """Measure the training step of the model that a factory makes.

    Args:
        name: ``package.module:factory`` or ``file.py:factory``.
        inputs: What the model is fed, as `Shape.parse` reads it; the batch first.
        loss: Names a function from the model's output to its loss; None for `mean_of`.
        device: Where; None for a GPU if there is one.
        steps: How many steps count.

    Raises:
        InputError: One of these is not what it should be; one line.
    """
    shapes = [Shape.parse(text) for text in inputs]
    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device}: {str(error).splitlines()[0]}") from error
    model = make_model(name, where)
    step = training_step(model, shapes, make_loss(loss), where)
    short = name.rpartition(":")[2]
    return measure_profile(model, step, batch=shapes[0].sizes[0], steps=steps, name=short)


def find(name: str) -> Callable[..., Any]:
    """Return what ``package.module:attribute`` or ``file.py:attribute`` names.

    Raises:
        InputError: There is no such module or attribute, or it cannot be called; one line.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise InputError(f"{name!r} is no module:name: write package.module:name or file.py:name")
    module = _module(where)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            callables = [
                key
                for key, value in vars(module).items()
                if callable(value) and getattr(value, "__module__", "") == module.__name__
            ]
            has = f"; it has {', '.join(callables[:8])}" if callables else ""
            raise InputError(f"{where} has no {attribute}{has}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{name} is {type(found).__name__}, not a function or class to call")
    return found  # type: ignore[no-any-return]


def make_model(name: str, device: torch.device) -> nn.Module:
    """Call the factory that ``name`` names and return its model on a device, in training mode."""
    factory = find(name)
    try:
        model = factory()
    except Exception as error:
        raise InputError(f"{name}() failed: {_said(error)}; it is called without arguments") from (
            error
        )
    if not isinstance(model, nn.Module):
        raise InputError(f"{name}() returned {type(model).__name__}, not a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"{name}()'s model has no parameter to train")
    return model.to(device).train()


def make_loss(name: str | None) -> Callable[[Any], Tensor]:
    """Return the function from a model's output to its loss: the named one, or a plain mean."""
    return mean_of if name is None else find(name)


def mean_of(output: Any) -> Tensor:
    """Return the sum of the means of all tensors in an output that carry a gradient."""
    means = [tensor.float().mean() for tensor in _tensors(output) if tensor.requires_grad]
    if not means:
        raise ValueError(
            f"the model's output ({type(output).__name__}) has no tensor with a gradient: "
            "say with --loss module:function how it becomes a loss"
        )
    return torch.stack(means).sum()


def training_step(
    model: nn.Module, shapes: Sequence[Shape], loss: Callable[[Any], Tensor], device: torch.device
) -> Callable[[], None]:
    """Return a forward and a backward pass as a function; tried once here, so errors are told.

    Raises:
        InputError: The model does not take the inputs, or its output gives no loss.
    """
    inputs = [shape.make(device) for shape in shapes]

    def step() -> None:
        model.zero_grad()
        loss(model(*inputs)).backward()  # type: ignore[no-untyped-call]

    given = " ".join(f"--input {shape.text}" for shape in shapes)
    try:
        output = model(*inputs)
    except Exception as error:
        raise InputError(f"the model does not take {given}: {_said(error)}") from error
    try:
        value = loss(output)
    except Exception as error:
        raise InputError(f"the loss of the model's output failed: {_said(error)}") from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        what = f"{list(value.shape)} tensor" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the loss must be one number with a gradient, got a {what}")
    try:
        value.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise InputError(f"the backward pass failed: {_said(error)}") from error
    model.zero_grad()
    return step


def _module(where: str) -> ModuleType:
    path = Path(where)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise InputError(f"{where}: No such file")
    # A console script does not look for modules here, as `python -m` would.
    sys.path.insert(0, str(path.parent.resolve() if is_file else Path.cwd()))
    try:
        if not is_file:
            return importlib.import_module(where)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"importing {where} failed: {_said(error)}") from error
    return module


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [tensor for part in output for tensor in _tensors(part)]
    return []


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'}"
