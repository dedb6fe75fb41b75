"""A worker of a pipeline holds what the planner says, within 10%."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from on_ranks import on_ranks
from torch import nn

from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.torch import pipedream
from hvd_pipe.torch.pipedream.graph import trace
from hvd_pipe.torch.pipedream.measure import profile

BATCH = 32
three = on_ranks(3, init=pipedream.init)


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


@functools.cache
def measured() -> ModelProfile:
    """Return what the layers hold, with times that do not change from run to run."""
    sample = (torch.randn(BATCH, 3, 32, 32),)
    found = profile(trace(network(), sample), sample, steps=1, skip=0)
    layers = [
        replace(layer, forward_s=1e-3, backward_s=1e-3 + layer.gradient_bytes * 1e-9)
        for layer in found.layers
    ]
    return replace(found, layers=tuple(layers), update_s=0.0)


def trained(plan: str, mode: str, rate: str, recompute: bool = False) -> pipedream.PipeDream:
    """Return a pipeline after an epoch."""
    pieces = 1 if mode in {"stash", "vertical-sync"} else 4
    torch.manual_seed(0)
    batch = torch.randn(BATCH * pieces, 3, 32, 32), torch.randint(0, 10, (BATCH * pieces,))
    engine = pipedream.PipeDream(
        network(),
        nn.functional.cross_entropy,
        {
            "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, lr=0.001),
        }[rate],
        plan=plan,
        mode=mode,
        microbatches=pieces if pieces > 1 else None,
        profile=measured(),
        bandwidth=1e8,
        recompute=recompute,
        progress=False,
    )
    engine.train_epoch([batch] * (8 if pieces == 1 else 2))
    return engine


@three
@pytest.mark.parametrize(
    ("plan", "mode", "rate"),
    [
        ("straight", "stash", "momentum"),
        ("2-1", "2bw", "momentum"),
        ("straight", "vertical-sync", "momentum"),
        ("straight", "flush", "adam"),
        # nightly: these modes with other plans, and one that holds what "flush" does
        pytest.param("straight", "2bw", "momentum", marks=pytest.mark.nightly),
        pytest.param("2-1", "stash", "momentum", marks=pytest.mark.nightly),
        pytest.param("straight", "gpipe", "momentum", marks=pytest.mark.nightly),
    ],
)
def test_memory_is_as_predicted(plan: str, mode: str, rate: str) -> None:
    engine = trained(plan, mode, rate)
    predicted = engine.partition.stages[engine.stage].memory_bytes
    assert engine.memory.total == pytest.approx(predicted, rel=0.10)
    assert 0 < engine.memory.weights < engine.memory.total


@three
def test_recomputing_keeps_what_came_in_alone() -> None:
    kept, again = (trained("straight", "flush", "adam", recompute=x) for x in (False, True))
    # The last stage's forward and backward follow each other.
    assert again.memory.activations < kept.memory.activations / 2 or kept.stage == 2
