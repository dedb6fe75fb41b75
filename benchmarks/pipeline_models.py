"""Models for the pipeline benchmark: chains of layers that take time, with outputs of a size.

Like `emulated.EmulatedModel`, a layer takes its time without using the processor, and its gradient
is real. Its output has the profile's size, too, so that what crosses between two stages is what
would cross there. Its memory is one number, repeated: only a message holds all of it.

`on_cpu` has small networks of the same kinds, which one torch thread computes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from emulated import LEAST_SLEEP_S
from torch import nn

from hvd_pipe.planning.profile import LayerProfile, ModelProfile

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
MODELS = {"vgg16": "vgg16.graph.txt", "language-model": "gnmt.graph.txt"}
"""PipeDream's own profiles; the second is GNMT's, of 8 LSTM layers a side."""


def profile(name: str, batch: int) -> ModelProfile:
    """Return a model as a chain, for minibatches of this many samples."""
    return replace(chain(ModelProfile.read(DATA / MODELS[name])), batch=batch, name=name)


def chain(profile: ModelProfile) -> ModelProfile:
    """Return the layers in order, each with all the outputs that layers after it still use.

    A model with branches so becomes one that can be cut after each layer, at its true traffic.
    """
    place = {layer.name: at for at, layer in enumerate(profile.layers)}
    last_use = list(range(len(place)))
    if profile.edges is None:
        return profile
    for source, target in profile.edges:
        last_use[place[source]] = max(last_use[place[source]], place[target])
    sizes = [layer.activation_bytes for layer in profile.layers]
    end = len(sizes) - 1
    layers = []
    for at, layer in enumerate(profile.layers):
        crossing = sum(
            size for size, use in zip(sizes[: at + 1], last_use, strict=False) if use > at
        )
        layers.append(replace(layer, activation_bytes=sizes[at] if at == end else crossing))
    return replace(profile, layers=tuple(layers), edges=None)


def scaled(profile: ModelProfile, compute_s: float, gradient_bytes: int) -> ModelProfile:
    """Return the chain with other totals; messages shrink as its gradients do.

    Sizes are of whole float32 numbers, an output's for each sample.
    """
    profile = slowed(profile, compute_s)
    size = gradient_bytes / float(profile.gradient_bytes().sum())
    row = 4 * (profile.batch or 1)

    def layer(one: LayerProfile) -> LayerProfile:
        return replace(
            one,
            gradient_bytes=4 * max(1, round(one.gradient_bytes * size / 4))
            if one.gradient_bytes
            else 0,
            activation_bytes=row * max(1, round(one.activation_bytes * size / row)),
            saved_bytes=None,
        )

    return replace(profile, layers=tuple(layer(one) for one in profile.layers))


def slowed(profile: ModelProfile, compute_s: float) -> ModelProfile:
    """Return the model with layers that take so long together, each its share; and no update."""
    slower = compute_s / (profile.forward_s + profile.backward_s)
    layers = (
        replace(one, forward_s=one.forward_s * slower, backward_s=one.backward_s * slower)
        for one in profile.layers
    )
    return replace(profile, layers=tuple(layers), update_s=0.0)


class Device:
    """An accelerator's stream for the layers that one worker holds.

    Within a pass, a layer follows the one before without a gap, however late the host is: it
    launches ahead. A pass begins no earlier than its message has come, so no earlier than now.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now, self._sleep = now, sleep
        self._free = 0.0
        self._done: tuple[bool, int] | None = None
        self.busy_s = 0.0

    def work(self, forward: bool, index: int, seconds: float) -> None:
        """Take this long for a layer; returns when no more than a moment is left."""
        if self._done != (forward, index - 1 if forward else index + 1):
            self._free = max(self._free, self._now())
        self._done = (forward, index)
        self._free += seconds
        self.busy_s += seconds
        left = self._free - self._now()
        if left > LEAST_SLEEP_S:
            self._sleep(left)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, layer: Layer) -> Any:
        ctx.layer, ctx.shape = layer, x.shape
        layer.device.work(True, layer.index, layer.forward_s * len(x) / layer.batch)
        return x.new_zeros(1, 1).expand(len(x), layer.width)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        layer, (rows, *_) = ctx.layer, ctx.shape
        layer.device.work(False, layer.index, layer.backward_s * rows / layer.batch)
        gradient = None if layer.gradient is None else layer.gradient * (rows / layer.batch)
        return gradients[0].new_zeros(1).expand(ctx.shape), gradient, None


class Layer(nn.Module):
    """One layer: it takes its share of its times by the samples that it is given."""

    def __init__(self, device: Device, index: int, one: LayerProfile, batch: int) -> None:
        super().__init__()
        self.device, self.index, self.batch = device, index, batch
        self.forward_s, self.backward_s = one.forward_s, one.backward_s
        self.width = one.activation_bytes // (4 * batch)
        count = one.gradient_bytes // 4
        self.weight = nn.Parameter(torch.zeros(count)) if count else None
        self.gradient = torch.full((count,), 1e-3) if count else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Pass.apply(x, self.weight, self)  # type: ignore[no-any-return]


class EmulatedPipeline(nn.Sequential):
    """The layers of a chain that `scaled` made; inputs are (samples, 1)."""

    def __init__(self, profile: ModelProfile) -> None:
        device = Device()
        batch = profile.batch or 1
        layers = (
            (one.name, Layer(device, at, one, batch)) for at, one in enumerate(profile.layers)
        )
        super().__init__(OrderedDict(layers))
        self.device, self.batch = device, batch

    def minibatch(self, batches: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of so many workers' batches."""
        return torch.zeros(self.batch * batches, 1), torch.zeros(self.batch * batches, 1)

    @staticmethod
    def loss_fn(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """A loss without work of its own."""
        return output.sum()

    def loss(self) -> torch.Tensor:
        """One forward pass, as data parallelism has it."""
        return self(torch.zeros(self.batch, 1, requires_grad=True)).sum()  # type: ignore[no-any-return]


class SmallNetwork(nn.Sequential):
    """A small network that is computed, not emulated."""

    def __init__(
        self, layers: list[nn.Module], sample: torch.Tensor, classes: int, batch: int
    ) -> None:
        super().__init__(*layers)
        self._sample, self._classes, self.batch = sample, classes, batch

    def minibatch(self, batches: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of so many workers' batches."""
        rows = self.batch * batches
        inputs = self._sample.expand(rows, *self._sample.shape).clone()
        words = self._sample.shape if self._sample.dtype == torch.long else ()
        return inputs, torch.zeros(rows, *words, dtype=torch.long)

    def loss_fn(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy over all targets."""
        return nn.functional.cross_entropy(output.reshape(-1, self._classes), targets.reshape(-1))

    def loss(self) -> torch.Tensor:
        """One forward pass, as data parallelism has it."""
        inputs, targets = self.minibatch()
        return self.loss_fn(self(inputs), targets)


class _Recurrent(nn.Module):
    """An LSTM layer that gives its outputs alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


def on_cpu(name: str) -> SmallNetwork:
    """Return a small network of a model's kind.

    VGG's has convolutions that take nearly all of the time, and two layers with nearly all bytes;
    the language model's is GNMT's as far as a chain can be: embedding, LSTM layers, softmax.
    """
    if name == "vgg16":
        layers: list[nn.Module] = []
        for inward, outward in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(inward, outward, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(outward, outward, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU()]
        return SmallNetwork([*layers, nn.Linear(512, 10)], torch.randn(3, 32, 32), 10, 96)
    width, words = 256, 1000
    cells = [_Recurrent(width) for _ in range(6)]
    ends = nn.Embedding(words, width), nn.Linear(width, words)
    sentence = torch.zeros(10, dtype=torch.long)
    return SmallNetwork([ends[0], *cells, ends[1]], sentence, words, 32)
