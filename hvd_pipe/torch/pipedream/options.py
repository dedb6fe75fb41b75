"""What the user asks `PipeDream` for, checked before anything is sent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hvd_pipe.pipeline.checks import check_microbatches, check_positive
from hvd_pipe.pipeline.plans import read_plan
from hvd_pipe.pipeline.transport import check_transport
from hvd_pipe.planning.modes import Mode, mode_named
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.planning.stages import Partition
from hvd_pipe.torch.agree import Description

__all__ = ["Options"]


@dataclass
class Options:
    """The arguments of :class:`hvd_pipe.torch.pipedream.PipeDream`, by their names."""

    model: nn.Module | Sequence[nn.Module]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    optimizer_fn: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    plan: str | os.PathLike[str] | Partition
    mode: str
    microbatches: int | None
    transport: str
    recompute: bool
    wire_dtype: str | None
    scale_lr: bool
    max_grad_norm: float | None
    scheduler_fn: Callable[[torch.optim.Optimizer], Any] | None
    schedule_by: str
    metric_fn: Callable[[Any, Any], Any] | None
    profile: ModelProfile | str | os.PathLike[str] | None
    bandwidth: float | None
    memory_bytes: float | None
    progress: bool

    @property
    def modes(self) -> Mode:
        """What ``mode`` names."""
        return mode_named(self.mode)

    def modules(self) -> list[nn.Module]:
        """Return the model, or the modules that were given in its place."""
        return [self.model] if isinstance(self.model, nn.Module) else list(self.model)

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the model's parameters and buffers by their names in its ``state_dict()``."""
        whole = self.model if isinstance(self.model, nn.Module) else nn.Sequential(*self.model)
        yield from whole.state_dict(keep_vars=True).items()

    def check(self, workers: int) -> Description:
        """Check all arguments, and return what ranks must have alike.

        Raises:
            TypeError, ValueError: One of them cannot be; says what can.
        """
        self._check_model()
        mode = mode_named(self.mode)
        request = read_plan(self.plan, workers)
        for name in ("loss_fn", "optimizer_fn"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} must be a function, got {getattr(self, name)!r}")
        if isinstance(self.optimizer_fn, torch.optim.Optimizer):
            raise TypeError(
                "optimizer_fn makes the optimizer of a stage from its parameters: "
                "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
            )
        for name in ("scheduler_fn", "metric_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be a function or None, got {value!r}")
        if self.schedule_by not in {"epoch", "minibatch"}:
            raise ValueError(
                f"schedule_by must be 'epoch' or 'minibatch', got {self.schedule_by!r}"
            )
        check_transport(self.transport)
        if self.wire_dtype not in {None, "bfloat16"}:
            raise ValueError(f"wire_dtype must be None or 'bfloat16', got {self.wire_dtype!r}")
        for name in ("max_grad_norm", "bandwidth", "memory_bytes"):
            check_positive(name, getattr(self, name))
        check_microbatches(self.microbatches, mode)
        if self.profile is not None and not isinstance(self.profile, ModelProfile):
            self.profile = ModelProfile.read(self.profile)
        return [
            ("the mode of the pipeline", self.mode),
            ("the plan of the pipeline", str(request)),
            ("microbatches", str(self.microbatches)),
            ("the pipeline's options", self._alike()),
            *((f"{name} of the model", _shape(value)) for name, value in self.state()),
        ]

    def _check_model(self) -> None:
        modules = self.modules()
        wrong = [type(one).__name__ for one in modules if not isinstance(one, nn.Module)]
        if wrong or not modules:
            raise TypeError(
                "model must be an nn.Module, or a list of modules that are called one after the "
                f"other, got {', '.join(wrong) or 'an empty list'}"
            )
        if not any(p.requires_grad for one in modules for p in one.parameters()):
            raise ValueError("the model has no parameters that require gradients")

    def _alike(self) -> str:
        names = ("transport", "recompute", "wire_dtype", "scale_lr", "max_grad_norm")
        shown = [f"{name}={getattr(self, name)}" for name in names]
        shown += [f"bandwidth={self.bandwidth}", f"profile={self.profile is not None}"]
        shown += [f"scheduler_fn={self.scheduler_fn is not None}, by {self.schedule_by}"]
        return f"{', '.join(shown)}, metric_fn={self.metric_fn is not None}"


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    trained = ", trained" if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{trained}"
