"""A torch model on the command line, fed with made-up inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hvd_pipe.cli._model import Shape, error_text, find
from hvd_pipe.cli.output import InputError
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.torch.layer_times import measure_profile

__all__ = ["measure"]


def measure(
    model: nn.Module,
    name: str,
    shapes: Sequence[Shape],
    loss: str | None,
    device: str | None,
    steps: int,
) -> ModelProfile:
    """Measure a model's training step; see `hvd_pipe.cli.profile.measure_model`."""
    try:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {device}: {str(error).splitlines()[0]}") from error
    model = prepared(model, name, where)
    step = training_step(model, shapes, make_loss(loss), where)
    short = name.rpartition(":")[2]
    return measure_profile(model, step, batch=shapes[0].sizes[0], steps=steps, name=short)


def prepared(model: nn.Module, name: str, device: torch.device) -> nn.Module:
    """Return a model on a device, in training mode; it must have something to train."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"{name}()'s model has no parameter to train")
    return model.to(device).train()


def make(shape: Shape, device: torch.device) -> Tensor:
    """Return a tensor of this shape; see `Shape`."""
    dtype = getattr(torch, shape.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape.sizes, device=device, dtype=dtype)
    return torch.randint(0, 2, shape.sizes, device=device, dtype=dtype)


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
    """Return a forward and a backward pass as a function; tried once here, so errors are told."""
    inputs = [make(shape, device) for shape in shapes]

    def step() -> None:
        model.zero_grad()
        loss(model(*inputs)).backward()  # type: ignore[no-untyped-call]

    given = " ".join(f"--input {shape.text}" for shape in shapes)
    try:
        output = model(*inputs)
    except Exception as error:
        raise InputError(f"the model does not take {given}: {error_text(error)}") from error
    try:
        value = loss(output)
    except Exception as error:
        raise InputError(f"the loss of the model's output failed: {error_text(error)}") from error
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        what = f"{list(value.shape)} tensor" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the loss must be one number with a gradient, got a {what}")
    try:
        value.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise InputError(f"the backward pass failed: {error_text(error)}") from error
    model.zero_grad()
    return step


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [tensor for part in output for tensor in _tensors(part)]
    return []
