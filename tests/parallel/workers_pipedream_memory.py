"""What workers of a pipeline hold, measured, beside what was predicted for their stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from cases import run_cases
from torch import nn

from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.torch import pipedream
from hvd_pipe.torch.pipedream.graph import trace
from hvd_pipe.torch.pipedream.measure import profile

BATCH = 32


def network() -> nn.Module:
    """Convolutions whose activations, and linear layers whose weights, take the memory."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 32):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)]
            layers += [nn.ReLU(inplace=True)]
            channels = width
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(2048, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 10)
    )


def measured(model: nn.Module, inputs: torch.Tensor) -> ModelProfile:
    """Return what the layers hold, with times that do not change from run to run."""
    found = profile(trace(model), (inputs,), steps=1, skip=0)
    layers = [
        replace(layer, forward_s=1e-3, backward_s=1e-3 + layer.gradient_bytes * 1e-9)
        for layer in found.layers
    ]
    return replace(found, layers=tuple(layers), update_s=0.0)


def held(plan: str, mode: str, rate: str) -> tuple[int, int, int]:
    """Return what this worker's stage was predicted to hold, what it held, and its versions."""
    engine = trained(plan, mode, rate)
    predicted = engine.partition.stages[engine.stage].memory_bytes
    return predicted, engine.memory.total, engine.memory.weights


def recomputed() -> tuple[int, int, int]:
    """Return this worker's stage, and its activations without and with recomputation."""
    kept, again = (trained("straight", "flush", "adam", recompute=x) for x in (False, True))
    return kept.stage, kept.memory.activations, again.memory.activations


def trained(plan: str, mode: str, rate: str, recompute: bool = False) -> pipedream.PipeDream:
    """Return a pipeline after an epoch."""
    pieces = 1 if mode in {"stash", "vertical-sync"} else 4
    torch.manual_seed(0)
    batch = torch.randn(BATCH * pieces, 3, 32, 32), torch.randint(0, 10, (BATCH * pieces,))
    model = network()
    engine = pipedream.PipeDream(
        model,
        nn.functional.cross_entropy,
        {
            "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, lr=0.001),
        }[rate],
        plan=plan,
        mode=mode,
        microbatches=pieces if pieces > 1 else None,
        profile=measured(model, batch[0][:BATCH]),
        bandwidth=1e8,
        recompute=recompute,
        progress=False,
    )
    engine.train_epoch([batch] * (8 if pieces == 1 else 2))
    return engine


def all_held() -> dict[Any, tuple[int, int, int]]:
    """Run all cases on this rank."""
    pipedream.init()
    cases = [
        *((plan, mode, "momentum") for plan in ("straight", "2-1") for mode in ("stash", "2bw")),
        ("straight", "vertical-sync", "momentum"),
        ("straight", "flush", "adam"),
        ("straight", "gpipe", "momentum"),
    ]
    held_by = {case: lambda case=case: held(*case) for case in cases}
    return run_cases({**held_by, "recompute": recomputed})
