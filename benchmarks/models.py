"""The models of the benchmarks, with two kinds of compute.

Emulated: each parameter takes its share of a fixed time without using the processor, as on an
accelerator (`emulated.EmulatedModel`); names, sizes and order are the real model's.
CPU: a small real network of the same kind, computed by one torch thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from emulated import EmulatedModel
from torch import nn

from hvd_pipe.planning.profile import LayerProfile, ModelProfile

sys.path.append(str(Path(__file__).resolve().parent.parent))
from torch_examples import models as zoo

ELEMENTWISE = 5.0  # operations an output element of a layer that only scales and shifts
BACKWARD = 2.0  # of the forward pass: two products for one


class Transformer(nn.Module):
    """An encoder over token embeddings, with an output layer of the vocabulary's size."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.output(self.encoder(self.embedding(x)))
        return hidden


def _images(name: str) -> Callable[[], tuple[nn.Module, torch.Tensor]]:
    return lambda: (zoo.build(name), torch.empty(32, 3, 224, 224))


def _words() -> tuple[nn.Module, torch.Tensor]:
    return Transformer(512, 6, 8192), torch.zeros(16, 128, dtype=torch.long)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "vgg16": _images("vgg16"),
    "resnet50": _images("resnet50"),
    "densenet121": _images("densenet121"),
    "transformer": _words,
}
"""The models, and a minibatch of one worker; to be built on torch's meta device."""


def profile(name: str) -> ModelProfile:
    """Return a layer for each parameter, in the order of the forward pass.

    Its time stands for operations (2 an element of a matrix and output position): only ratios of
    times mean something until `EmulatedModel` scales them.
    """
    with torch.device("meta"):
        model, minibatch = MODELS[name]()
    layers: dict[str, LayerProfile] = {}
    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_hook(_noting(path, layers)))
    model(minibatch.to("meta"))
    for hook in hooks:
        hook.remove()
    return ModelProfile(tuple(layers.values()), batch=len(minibatch), name=name)


def _noting(path: str, layers: dict[str, LayerProfile]) -> Callable[..., None]:
    def hook(module: nn.Module, _: Any, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        channels = out.shape[1] if out.dim() == 4 else out.shape[-1]
        # Those of modules inside, too, which attention uses without calling them.
        for name, parameter in module.named_parameters():
            full = f"{path}.{name}" if path else name
            if full in layers:
                continue
            if parameter.dim() > 1 and not isinstance(module, nn.Embedding):
                work = 2.0 * parameter.numel() * out.numel() / channels
            else:
                work = ELEMENTWISE * out.numel()
            layers[full] = LayerProfile(full, 4 * parameter.numel(), BACKWARD * work, work)

    return hook


def emulated(name: str, compute_s: float, gradient_bytes: int) -> EmulatedModel:
    """Return the emulated model: so many seconds a step, so many bytes of gradients."""
    return EmulatedModel(profile(name), compute_s, gradient_bytes)


def on_cpu(name: str) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Return a small real network of the same kind, and the loss of its minibatch.

    For VGG-16 that is an MLP: few tensors, nearly all bytes in two of them.
    """
    images = torch.randn(2, 3, 32, 32)
    small: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
        "vgg16": (lambda: zoo.build("mlp", 10, (3, 32, 32)), torch.randn(64, 3, 32, 32)),
        "resnet50": (lambda: zoo.build("resnet50", 10, (3, 32, 32)), images),
        "densenet121": (lambda: zoo.build("densenet121", 10, (3, 32, 32)), images),
        "transformer": (lambda: Transformer(256, 4, 2048), torch.zeros(4, 64, dtype=torch.long)),
    }
    build, minibatch = small[name]
    model = build()
    return model, lambda: model(minibatch).square().mean()
