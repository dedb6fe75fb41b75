"""The pipeline benchmark: its models, its predictions and its report; the race needs root."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import pipeline_models

from hvd_pipe.planning.profile import LayerProfile, ModelProfile


class Clock:
    """A time that only sleeping passes."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_pass_begins_when_its_message_has_come() -> None:
    """Waiting for a message is not made up for; being late between two layers is."""
    clock = Clock()
    device = pipeline_models.Device(clock, clock.sleep)
    device.work(True, 3, 1.0)
    clock.now += 0.5  # the host is late, the accelerator is not
    device.work(True, 4, 1.0)
    assert clock.now == pytest.approx(102.0)
    clock.now += 5.0  # the gradient comes
    device.work(False, 4, 2.0)
    device.work(False, 3, 2.0)
    assert clock.now == pytest.approx(111.0)
    clock.now += 1.0
    device.work(True, 3, 1.0)
    assert clock.now == pytest.approx(113.0)
    assert device.busy_s == 7.0


def test_layers_take_their_share_of_a_minibatch() -> None:
    layers = (LayerProfile("a", 40, 0.04, 0.02, 64), LayerProfile("b", 0, 0.02, 0.02, 32))
    model = pipeline_models.EmulatedPipeline(ModelProfile(layers, batch=4))
    clock = Clock()
    device = pipeline_models.Device(clock, clock.sleep)
    for layer in model:
        layer.device = device
    x = torch.zeros(2, 1, requires_grad=True)
    output = model(x)
    assert output.shape == (2, 2)
    assert model[0](x).shape == (2, 4)
    device.busy_s = 0.0
    model(x).sum().backward()
    assert device.busy_s == pytest.approx(0.05)
    assert x.grad is not None
    assert x.grad.shape == x.shape
    [weight] = model.parameters()
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([0.0005] * 10)
    whole = pipeline_models.EmulatedPipeline(ModelProfile(layers, batch=4))
    whole.loss().backward()
    [weight] = whole.parameters()
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([0.001] * 10)
