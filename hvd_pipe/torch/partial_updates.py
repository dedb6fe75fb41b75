"""Updates of some parameters by the user's optimizer, as ``step()`` would have made them.

Most optimizers treat each parameter by itself: SGD, Adam and most others of torch. To update some
parameters is then to show the optimizer those alone. Torch's are known; another one says that it
does so, and draws no random numbers, by ``updates_each_parameter = True``, an attribute of its
class or of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True)
class Options:
    """What an update depends on beside gradients and state, as it was in ``step()``."""

    groups: Sequence[Mapping[str, Any]]
    device: torch.device
    """Torch's default device."""
    streams: Sequence[torch.cuda.Stream]
    """The current CUDA stream of each device with parameters."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Options:
        """Return the options as they are now."""
        groups = [
            {key: _copied(value) for key, value in group.items()}
            for group in optimizer.param_groups
        ]
        parameters = (p for group in groups for p in group["params"])
        on_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = {p.device for p in parameters if p.is_cuda} if on_gpus else ()
        streams = [torch.cuda.current_stream(device) for device in devices]
        return cls(groups, torch.get_default_device(), streams)

    @contextmanager
    def context(self) -> Iterator[None]:
        """Be where ``step()`` was called: mode, stream and default device may be others by now."""
        with ExitStack() as stack:
            if torch._C._functorch.peek_interpreter_stack() is not None:
                stack.enter_context(temporarily_clear_interpreter_stack())
            if torch._C._len_torch_dispatch_stack() > 0:
                stack.enter_context(_disable_current_modes())
            if torch.get_default_device() != self.device:
                stack.enter_context(self.device)
            for stream in self.streams:
                current = torch.cuda.current_stream(stream.device)
                if current != stream:
                    stack.callback(current.wait_stream, stream)
                    stream.wait_stream(current)
                    stack.enter_context(torch.cuda.stream(stream))
            yield


def _copied(option: Any) -> Any:
    if isinstance(option, torch.Tensor):
        return option.clone()
    return list(option) if isinstance(option, list) else option


def updates_quietly(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether no hook and no scaler takes part in an update."""
    return not (
        "found_inf" in optimizer.__dict__
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


# Architecture: F8
def update_quietly(
    optimizer: torch.optim.Optimizer,
    step: Callable[[], object],
    parameters: Sequence[torch.Tensor],
    options: Options,
) -> None:
    """Update some parameters by the user's ``step()``, which runs beneath torch's hooks."""
    updated, groups = set(map(id, parameters)), optimizer.param_groups
    shown = [
        {**group, "params": [p for p in group["params"] if id(p) in updated]}
        for group in options.groups
    ]
    optimizer.param_groups = [group for group in shown if group["params"]]
    kind = parameters[0].device.type
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(kind, enabled=False):
            step()
    finally:
        optimizer.param_groups = groups
    for group, before in zip(shown, options.groups, strict=True):
        written = [key for key in group if group[key] is not before.get(key) and key != "params"]
        if written:
            raise ValueError(
                f"{type(optimizer).__name__}.step() writes {written[0]!r} of its param_groups, "
                "which overlap='forward' would lose, as it updates some parameters at a time: "
                "leave updates_each_parameter = True out, or keep this in optimizer.state."
            )


def updates_each_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether updates of some parameters at a time equal one update of all."""
    declared = getattr(optimizer, "updates_each_parameter", None)
    if declared is not None:
        return bool(declared)
    kind = type(optimizer).__bases__[-1]
    return kind.__module__.startswith("torch.optim") and kind is not torch.optim.LBFGS
