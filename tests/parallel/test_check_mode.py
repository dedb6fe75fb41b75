"""HVD_PIPE_CHECK: 20 seeds of delays change no bit, and planted faults show."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from branching import Heads, heads_loss
from on_ranks import gather, on_ranks
from problem import OPTIMIZERS, Loss, Weights, loss_of, make_model, train
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.runtime import check_mode
from hvd_pipe.torch.messages.buckets import BucketSet
from hvd_pipe.torch.strategies import base, model_average

two = on_ranks(2, init=hvd.init)
checked = pytest.mark.usefixtures("checks")

STEPS = 11
PLANNED = 16  # merged-gradient has made its plan by then
FAULTY = 3  # the step in which faults are planted


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the job had been started with the variable."""
    monkeypatch.setattr(check_mode, "active", check_mode.from_environment({check_mode.CHECK: "1"}))


def test_the_variable_is_read() -> None:
    code = "from hvd_pipe.runtime import check_mode; assert check_mode.active.on"
    environment = os.environ | {check_mode.CHECK: "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


INT8 = hvd.Int8(chunk=16, error_feedback=True)
BATTERY: dict[str, tuple[str, int, dict[str, Any]]] = {
    "merged-gradient": ("merged-gradient", PLANNED, {}),
    "merged-gradient, small buckets": ("merged-gradient:bucket_bytes=64", STEPS, {}),
    "merged-gradient, forward": ("merged-gradient:bucket_bytes=64,overlap=forward", STEPS, {}),
    "pipe-sgd": ("pipe-sgd:bucket_bytes=64", STEPS, {}),
    "pipe-sgd, prediction": ("pipe-sgd:prediction=local,warmup_steps=2", STEPS, {}),
    "pipe-sgd, int8": ("pipe-sgd:bucket_bytes=64", STEPS, {"compression": INT8}),
    "cocod": ("cocod:period=2", STEPS, {}),
    "cocod, momenta": ("cocod:period=3,momentum=average,pull_back=0.6", STEPS, {}),
}


def trajectory(
    strategy: str,
    steps: int = STEPS,
    arguments: dict[str, Any] | None = None,
    make: Callable[[], nn.Module] = make_model,
    loss: Loss = loss_of,
) -> Weights:
    """The weights after every step, and after ``synchronize()`` in the middle and at the end."""
    torch.manual_seed(1)
    model = make()
    optimizer = distributed(model, strategy, **(arguments or {}))
    drains = {steps // 2, steps - 1}
    return train(model, optimizer, hvd.rank(), loss=loss, steps=steps, drains=drains)


def distributed(model: nn.Module, strategy: str, **arguments: Any) -> Any:
    return hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy, **arguments
    )


@two
@pytest.mark.parametrize("name", BATTERY)
def test_delays_and_spoiled_buffers_change_no_bit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_mode, "active", check_mode.OFF)
    plain = trajectory(*BATTERY[name])
    assert np.isfinite(plain).all()
    assert not np.array_equal(plain[0], plain[-1])  # it did learn something
    for seed in range(6):
        # As if the job had been started with these delays.
        monkeypatch.setattr(check_mode, "active", check_mode.Check(seed, hvd.rank()))
        assert np.array_equal(trajectory(*BATTERY[name]), plain), f"seed {seed}"


@two
def test_ranks_of_which_only_some_check_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    if hvd.rank() == 1:
        monkeypatch.setattr(check_mode, "active", check_mode.Check(0, 1))
    words = "ranks disagree on HVD_PIPE_CHECK: rank 0 has 0; rank 1 has 1"
    with pytest.raises(hvd.HvdPipeError, match=words):
        distributed(make_model(), "merged-gradient")


@two
@checked
@pytest.mark.parametrize(
    "strategy",
    [
        "merged-gradient:bucket_bytes=64",
        "merged-gradient:bucket_bytes=64,overlap=forward",
        "pipe-sgd:bucket_bytes=64",
    ],
)
def test_ranks_compare_in_the_same_steps_after_a_join(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has made three steps more, which must not bring its next comparison forward.

    First: an optimizer that a fault has left with a pending update would have to join, too.
    """
    model = make_model()
    optimizer = distributed(model, strategy)
    plain, compared = base.compare_replicas, []

    def compare_replicas(*arguments: Any) -> None:
        compared.append(arguments)
        plain(*arguments)

    def steps(count: int) -> None:
        for number in range(count):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), number).backward()
            optimizer.step()

    monkeypatch.setattr(base, "compare_replicas", compare_replicas)
    steps(6 if hvd.rank() else 9)
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=last)
    hvd.broadcast_optimizer_state(optimizer, root_rank=last)
    steps(2 * check_mode.COMPARE_STEPS + 4)
    optimizer.synchronize()
    assert gather(len(compared)) == [2, 2]


def told(
    strategy: str,
    after_backward: Callable[[nn.Module, int], None] = lambda model, number: None,
    after_update: Callable[[nn.Module, int], None] = lambda model, number: None,
) -> str:
    """Return what training ends with."""
    model = make_model()
    optimizer = distributed(model, strategy)
    number = 0
    optimizer.register_step_post_hook(lambda *_: after_update(model, number))

    def trained() -> None:
        nonlocal number
        for number in range(2 * check_mode.COMPARE_STEPS):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), number).backward()
            after_backward(model, number)
            optimizer.step()
        optimizer.synchronize()

    with pytest.raises(hvd.HvdPipeError) as raised:
        trained()
    return f"{type(raised.value).__name__}: {raised.value}"


@two
@checked
@pytest.mark.parametrize(
    "strategy", ["merged-gradient", "merged-gradient:bucket_bytes=64", "pipe-sgd"]
)
def test_a_gradient_that_is_changed_in_flight(strategy: str) -> None:
    """Rank 1 clipped, between backward() and step(), what it had kept of earlier steps' gradients.

    They share the memory of the buffer. torch counts writes by way of ``.data`` apart, so that the
    check of versions saw none: what travelled was half clipped, as the network would have it.
    """
    kept: list[torch.Tensor] = []

    def clip(model: nn.Module, number: int) -> None:
        if (hvd.rank(), number) == (1, FAULTY):
            for gradient in kept:
                gradient.clamp_(-1e-3, 1e-3)

    def keep(model: nn.Module, number: int) -> None:
        gradient = model.get_parameter("2.weight").grad
        if gradient is not None:
            kept.append(gradient.data)

    said = told(strategy, after_backward=clip, after_update=keep)
    assert "the gradient of '2.weight' was changed on rank 1" in said


def assert_weights_differ(said: str, name: str) -> None:
    assert gather(said) == [said] * 2
    assert f"ranks disagree on the weight of '{name}': rank 0 has checksum " in said
    assert "; rank 1 has checksum " in said


@two
@checked
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd", "pipe-sgd:prediction=local"])
def test_replicas_that_differ(strategy: str) -> None:
    """Rank 1 changes one weight in its last bits, right after an update."""

    def nudge(model: nn.Module, number: int) -> None:
        if (hvd.rank(), number) == (1, FAULTY):
            model.get_parameter("2.bias").data[1] += 1e-14

    assert_weights_differ(told(strategy, after_update=nudge), "2.bias")


@two
@checked
def test_averages_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """CoCoD's last average is not the same on rank 1."""
    plain = model_average.ModelAverage.average_now

    def average_now(self: model_average.ModelAverage) -> None:
        plain(self)
        if hvd.rank() == 1:
            next(value for value in self._values() if value is not None).data.mul_(1 + 1e-14)

    monkeypatch.setattr(model_average.ModelAverage, "average_now", average_now)
    assert_weights_differ(told("cocod:period=2"), "0.weight")


# Reads of a buffer that holds nothing of use: what comes of them is NaN.


@two
@checked
def test_a_gradient_that_is_missing_is_not_sent_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room of a gradient is not set to zero."""

    def show_missing(self: BucketSet) -> dict[int, torch.Tensor]:
        missing = [i for i in self.slots if self.parameters[i].grad is None]
        for index in missing:
            self.parameters[index].grad = self.slots[index].shown
        return {index: self.slots[index].shown for index in missing}

    monkeypatch.setattr(BucketSet, "show_missing", show_missing)
    weights = trajectory("merged-gradient:bucket_bytes=64", make=Heads, loss=heads_loss)
    assert np.isnan(weights).any()


@two
@checked
def test_a_snapshot_of_an_earlier_round_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """CoCoD's progress is taken from the start of an earlier round."""
    monkeypatch.setattr(
        model_average, "_copy", lambda source, to: source.clone() if to is None else to
    )
    assert np.isnan(trajectory("cocod:period=2")).any()
