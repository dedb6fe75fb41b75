"""What the user asks `PipeDream` for, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hvd_pipe.pipeline import options
from hvd_pipe.pipeline.options import check_function
from hvd_pipe.torch.agree import Description

__all__ = ["Options"]


@dataclass
class Options(options.Options):
    """The arguments of :class:`hvd_pipe.torch.pipedream.PipeDream`, by their names."""

    scheduler_fn: Callable[[torch.optim.Optimizer], Any] | None
    schedule_by: str

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
        if isinstance(self.optimizer_fn, torch.optim.Optimizer):
            raise TypeError(
                "optimizer_fn makes the optimizer of a stage from its parameters: "
                "lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
            )
        alike = super().check(workers)
        check_function("scheduler_fn", self.scheduler_fn)
        if self.schedule_by not in {"epoch", "minibatch"}:
            raise ValueError(
                f"schedule_by must be 'epoch' or 'minibatch', got {self.schedule_by!r}"
            )
        return [
            *alike,
            ("the scheduler", f"{self.scheduler_fn is not None}, by {self.schedule_by}"),
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
        if any(p.is_meta for one in modules for p in one.parameters()):
            raise ValueError(
                "the model has layers on the meta device, which have no values; a pipeline leaves "
                "those of other workers so: build the model anew, and load() a checkpoint into "
                "its pipeline, or load_state_dict(engine.state_dict()) before"
            )
        if not any(p.requires_grad for one in modules for p in one.parameters()):
            raise ValueError("the model has no parameters that require gradients")


def _shape(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    trained = ", trained" if value.requires_grad else ""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{trained}"
