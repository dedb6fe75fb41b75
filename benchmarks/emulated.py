"""A model whose layers take the times of a profile without using the processor.

Two cores cannot compute for several workers, so a benchmark of communication lets each layer sleep
for as long as it took on the machine that was profiled. Its gradients are real: they have the
profile's sizes, and everything after them (buckets, all-reduces, updates) is what a job does.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from torch import nn

from hvd_pipe.planning.profile import ModelProfile

LEAST_SLEEP_S = 3e-4
"""Shorter debts are carried on to the next layer: a sleep overshoots by about 0.1 ms."""


class Device:
    """Takes time, one piece of work after another, as an accelerator's stream does.

    Work is launched ahead of time there: a host that is late for a moment, as others need its
    cores, does not delay it. So all work of a step follows that before without a gap; the host
    sees the end of a piece no more than `LEAST_SLEEP_S` early.
    """

    def __init__(self) -> None:
        self._free = 0.0

    def begin(self) -> None:
        """Begin a step: its work cannot have been launched before now."""
        self._free = max(self._free, time.perf_counter())

    def work(self, seconds: float) -> None:
        """Take this long after the work before; returns when no more than a moment is left."""
        self._free += seconds
        left = self._free - time.perf_counter()
        if left > LEAST_SLEEP_S:
            time.sleep(left)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, layer: Layer) -> Any:
        ctx.layer = layer
        layer.device.work(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.layer.device.work(ctx.layer.backward_s)
        return gradients[0], ctx.layer.gradient, None


class Layer(nn.Module):
    """One layer of the profile: it takes its times, and has a gradient of its size."""

    def __init__(self, device: Device, forward_s: float, backward_s: float, count: int) -> None:
        super().__init__()
        self.device, self.forward_s, self.backward_s = device, forward_s, backward_s
        self.weight = nn.Parameter(torch.zeros(count)) if count else None
        # No buffer: PyTorch's DDP would broadcast it in every step.
        self.gradient = torch.full((count,), 1e-3) if count else None

    def __call__(self, x: torch.Tensor) -> Any:
        self._called = time.perf_counter()
        return super().__call__(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if time.perf_counter() - self._called > LEAST_SLEEP_S:
            self.device.begin()  # a hook has waited for a message, and nothing was launched before
        return _Layer.apply(x, self.weight, self)  # type: ignore[no-any-return]


def scaled(
    profile: ModelProfile, compute_s: float | None = None, gradient_bytes: int = 0
) -> ModelProfile:
    """Return a profile with times and sizes scaled, and whole float32 numbers."""
    whole = profile.forward_s + profile.backward_s
    speed = 1.0 if compute_s is None else compute_s / whole
    size = gradient_bytes / float(profile.gradient_bytes().sum()) if gradient_bytes else 1.0
    layers = (
        dataclasses.replace(
            layer,
            forward_s=layer.forward_s * speed,
            backward_s=layer.backward_s * speed,
            gradient_bytes=4 * max(1, round(layer.gradient_bytes * size / 4))
            if layer.gradient_bytes
            else 0,
        )
        for layer in profile.layers
    )
    return dataclasses.replace(profile, layers=tuple(layers))


class EmulatedModel(nn.Sequential):
    """The layers of a profile, as float32 parameters."""

    def __init__(
        self, profile: ModelProfile, compute_s: float | None = None, gradient_bytes: int = 0
    ) -> None:
        device = Device()
        super().__init__(
            *(
                Layer(device, layer.forward_s, layer.backward_s, layer.gradient_bytes // 4)
                for layer in scaled(profile, compute_s, gradient_bytes).layers
            )
        )
        self.device = device

    def loss(self) -> torch.Tensor:
        """One forward pass."""
        self.device.begin()
        return self(torch.zeros(1, requires_grad=True)).sum()  # type: ignore[no-any-return]

    def step(self) -> None:
        """One forward and backward pass."""
        self.loss().backward()
