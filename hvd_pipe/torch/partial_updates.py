"""Updates of some parameters by the user's optimizer, at options that were taken down before.

Most optimizers treat each parameter by itself: SGD, Adam and most others of torch. To update some
parameters is then to show the optimizer those alone. `is_separable` tries it where that is not
known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = ["is_separable", "options_of", "update_quietly", "updates_quietly"]

LARGE = 1e6
"""What gradients are multiplied by, to see whether an optimizer clips all of them together."""

Step = Callable[[], object]
"""The user's ``step()``, beneath torch's wrapper for hooks."""


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group as they are now."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


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
    step: Step,
    parameters: Sequence[torch.Tensor],
    options: Sequence[Mapping[str, Any]],
) -> None:
    """Let an optimizer update some of its parameters, wherever this is called.

    A forward pass may run in inference mode, or with autocast: an update there makes the same
    state, in the same dtypes, as one outside.

    Args:
        optimizer: Whose parameters.
        step: Makes its update.
        parameters: What to update, by their ``.grad``.
        options: As `options_of` has returned them.
    """
    due, groups = set(map(id, parameters)), optimizer.param_groups
    shown = [
        {**group, **taken, "params": [p for p in group["params"] if id(p) in due]}
        for group, taken in zip(groups, options, strict=False)
    ]
    optimizer.param_groups = [group for group in shown if group["params"]]
    kind = parameters[0].device.type
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(kind, enabled=False):
            step()
    finally:
        optimizer.param_groups = groups


def is_separable(optimizer: torch.optim.Optimizer, step: Step) -> bool:
    """Return whether updates of some parameters at a time equal one update of all, bit for bit.

    Optimizers of torch are known. Another one makes an update of all parameters, and one of two
    halves, by the gradients that are there and by very large ones, which it may clip. Weights,
    state and attributes are compared, and put back.

    Args:
        optimizer: Whose ``p.grad`` hold gradients.
        step: Makes its update.
    """
    kind = type(optimizer).__bases__[-1]
    if kind.__module__.startswith("torch.optim"):
        return kind is not torch.optim.LBFGS
    owned = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    options = options_of(optimizer)
    halves = [half for half in (owned[::2], owned[1::2]) if half]

    def in_halves() -> None:
        for half in halves:
            update_quietly(optimizer, step, half, options)

    try:
        for scale in (1.0, LARGE):
            whole, parts = (_tried(optimizer, owned, each, scale) for each in (step, in_halves))
            if len(whole) != len(parts) or not all(map(_same_bits, whole, parts)):
                return False
        return True
    except Exception:  # what cannot be copied, has no half, or cannot be compared
        return False


def _tried(
    optimizer: torch.optim.Optimizer, owned: Sequence[torch.Tensor], update: Step, scale: float
) -> list[Any]:
    """What an update by scaled gradients makes of weights, state, options and attributes.

    All of it is put back.
    """
    weights = [p.detach().clone() for p in owned]
    gradients = [p.grad.clone() for p in owned if p.grad is not None]
    state, held = dict(optimizer.state), dict(vars(optimizer))
    groups = [dict(group) for group in optimizer.param_groups]
    # A list of parameters that the optimizer keeps beside its groups is of the same parameters.
    memo: dict[int, Any] = {id(p): p for group in groups for p in group["params"]}
    memo[id(optimizer)] = optimizer
    copies = {key: copy.deepcopy(held[key], memo) for key in held if _is_users(key)}
    devices = sorted({p.get_device() for p in owned if p.is_cuda})
    try:
        with torch.random.fork_rng(devices):
            for parameter, values in state.items():
                optimizer.state[parameter] = copy.deepcopy(values)
            vars(optimizer).update(copies, param_groups=groups)
            for parameter in owned:
                assert parameter.grad is not None
                parameter.grad.data.mul_(scale)
            update()
        found: list[Any] = [p.detach().clone() for p in owned]
        for parameter in owned:
            found += [value for _, value in sorted(optimizer.state[parameter].items(), key=str)]
        for group in optimizer.param_groups:
            found += [value for key, value in group.items() if key != "params"]
        own = sorted(key for key in vars(optimizer) if _is_users(key))
        return [*found, *([key, vars(optimizer)[key]] for key in own)]
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(held)
        optimizer.state.clear()
        optimizer.state.update(state)
        for parameter, weight, gradient in zip(owned, weights, gradients, strict=True):
            parameter.data.copy_(weight)
            assert parameter.grad is not None
            parameter.grad.data.copy_(gradient)


def _is_users(attribute: str) -> bool:
    """Whether an optimizer's attribute is no part of torch's bookkeeping, or of ours."""
    kept = attribute in ("state", "param_groups") or attribute.endswith("_hooks")
    return not (kept or attribute.startswith("_hvd_pipe"))


def _same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same_bits, one, other))
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one == other)
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
