"""The serial reference of pipelines is right itself: plain training, and sums made by hand."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

PARALLEL = Path(__file__).parent.parent / "parallel"

sys.path.insert(0, os.fspath(PARALLEL))
try:
    from pipeline_problem import (
        OPTIMIZERS,
        SKIPPING_CUTS,
        Batch,
        MakeOptimizer,
        epoch,
        make_mixed,
        make_skipping,
        plan,
        squared,
    )
    from pipeline_reference import Reference
    from pipeline_versions import COALESCING, METHODS, straight_version
    from pipeline_versions import scheduled_versions as scheduled
finally:
    sys.path.remove(os.fspath(PARALLEL))

LR, CURVATURE = 0.25, 0.5


class Valleys(nn.Module):
    """A stage is one number w_s; the loss is the sum of those parts of it that touch one stage."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        for s in range(stages):
            self.register_parameter(f"w{s}", nn.Parameter(torch.ones((), dtype=torch.float64)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(w - x).square().mean() for w in self.parameters()]).sum()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def half(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return CURVATURE / 2 * output


def trajectories(
    replicas: tuple[int, ...], mode: str, xs: list[float], **options: Any
) -> list[list[float]]:
    """The versions of each stage's w, for minibatches of one number each."""
    reference = Reference(
        Valleys(len(replicas)), lambda name: int(name[1:]), replicas, mode, half, sgd, **options
    )
    inputs = [torch.full((4,), x, dtype=torch.float64) for x in xs]
    reference.train_epoch([(x, x) for x in inputs])
    return [
        [float(w) for version in history for w in version.values()]
        for history in reference.history
    ]


def plain(
    model: nn.Module, make: MakeOptimizer, epochs: list[list[Batch]], microbatches: int
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Single-worker training as scripts write it."""
    optimizer = make(list(model.parameters()))
    losses = []
    for batches in epochs:
        total = 0.0
        for x, target in batches:
            optimizer.zero_grad()
            parts = zip(
                torch.tensor_split(x, microbatches),
                torch.tensor_split(target, microbatches),
                strict=True,
            )
            for x_part, target_part in parts:
                loss = squared(model(x_part), target_part) * len(x_part) / len(x)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
            optimizer.step()
        losses.append(total / len(batches))
    return model.state_dict(), losses


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-13, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("mode", ["flush", "gpipe"])
def test_flushing_is_training_on_one_worker(mode: str, microbatches: int, optimizer: str) -> None:
    made, make = plan("1-1-1"), OPTIMIZERS[optimizer]
    model = make_mixed()
    reference = Reference(
        copy.deepcopy(model),
        made.stage_of(model),
        made.replicas,
        mode,
        squared,
        make,
        microbatches=microbatches,
    )
    epochs = [epoch(0), epoch(1)]
    losses = [reference.train_epoch(batches) for batches in epochs]
    state, expected = plain(model, make, epochs, microbatches)
    np.testing.assert_allclose(losses, expected, rtol=1e-13)
    assert_equal(reference.state_dict(), state)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", METHODS)
def test_a_parabola_descends_by_late_gradients(mode: str, stages: int) -> None:
    """w[t+1] = w[t] - lr * lambda * w[t - delay], with delay n - 1 for the input stage."""
    for s, versions in enumerate(trajectories((1,) * stages, mode, [0.0] * 12)):
        delay = {"stash": stages - 1 - s, "vertical-sync": stages - 1, "2bw": 1}.get(mode, 0)
        expected = [1.0]
        for t in range(12):
            expected.append(expected[t] - LR * CURVATURE * expected[max(0, t - delay)])
        np.testing.assert_allclose(versions, expected, rtol=1e-14)


def test_rounds_of_replicas_by_hand() -> None:
    """2-1, five minibatches: the input stage has rounds (0, 1), (2, 3) and (4) alone.

    Its two workers have two minibatches each in flight, so rounds 0 and 1 are both at version 0.
    The output stage takes R_1 / R_0 = 1/2 of the learning rate.
    """
    xs = [1.0, 3.0, 5.0, 9.0, -1.0]
    first, second = trajectories((2, 1), "stash", xs)
    step = LR * CURVATURE
    one = 1 - step * (1 - 2)
    two = one - step * (1 - 7)
    np.testing.assert_allclose(first, [1, one, two, two - step * (one - -1)], rtol=1e-14)
    expected = [1.0]
    for x in xs:
        expected.append(expected[-1] - step / 2 * (expected[-1] - x))
    np.testing.assert_allclose(second, expected, rtol=1e-14)
    unscaled = trajectories((2, 1), "stash", xs, scale_lr=False)
    np.testing.assert_allclose(unscaled[0], first, rtol=1e-14)
    np.testing.assert_allclose(unscaled[1][1], 1 - step * (1 - 1), rtol=1e-14)
    np.testing.assert_allclose(unscaled[1][2], 1 - step * (1 - 3), rtol=1e-14)


def test_vertical_sync_of_replicas_by_hand() -> None:
    """2-1: minibatches 0 to 3 at the start, 4 at what two minibatches have made of each stage."""
    xs = [1.0, 3.0, 5.0, 9.0, -1.0]
    first, second = trajectories((2, 1), "vertical-sync", xs)
    step = LR * CURVATURE
    one = 1 - step * (1 - 2)
    two = one - step * (1 - 7)
    np.testing.assert_allclose(first, [1, one, two, two - step * (one - -1)], rtol=1e-14)
    made = [1.0]
    for x in xs[:4]:
        made.append(made[-1] - step / 2 * (1 - x))
    made.append(made[-1] - step / 2 * (made[2] - -1))
    np.testing.assert_allclose(second, made, rtol=1e-14)


@pytest.mark.parametrize("mode", COALESCING)
def test_coalescing_modes_do_not_scale(mode: str) -> None:
    """And microbatches make no difference where nothing looks at a whole batch but the mean."""
    straight = trajectories((1, 1), mode, [1.0, 3.0, 5.0], microbatches=1)
    replicated = trajectories((2, 1), mode, [1.0, 3.0, 5.0], microbatches=4)
    np.testing.assert_allclose(replicated, straight, rtol=1e-14)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", METHODS)
def test_closed_forms_are_the_schedules(mode: str, stages: int) -> None:
    found = scheduled(mode, (1,) * stages, 9, stages if mode in COALESCING else 1)
    assert found == [
        {b: straight_version(mode, stages, s, b) for b in range(9)} for s in range(stages)
    ]


def test_microbatches_weigh_as_many_samples_as_they_have() -> None:
    """Seven numbers in two microbatches, of four and of three: the mean of all seven."""
    reference = Reference(Valleys(1), lambda _: 0, (1,), "flush", half, sgd, microbatches=2)
    x = torch.tensor([1, 2, 3, 4, 5, 6, 7], dtype=torch.float64)
    assert reference.train_epoch([(x, x)]) == pytest.approx(CURVATURE / 2 * 13, rel=1e-14)
    assert float(reference.state_dict()["w0"]) == pytest.approx(1 - LR * CURVATURE * (1 - 4))


def test_replicas_have_running_statistics_of_their_own() -> None:
    """Two workers hold BatchNorm, and see minibatches 0, 2 and 1, 3; their mean is saved."""
    reference = Reference(
        nn.BatchNorm1d(1, momentum=0.5, affine=False).double(),
        lambda _: 0,
        (2,),
        "stash",
        lambda output, _: output.sum() * torch.zeros((), requires_grad=True),
        sgd,
    )
    xs = [torch.tensor([[x], [x]], dtype=torch.float64) for x in (8.0, 16.0, 24.0, 32.0)]
    reference.train_epoch([(x, x) for x in xs])
    workers = [4 / 2 + 12, 8 / 2 + 16]
    assert float(reference.state_dict()["running_mean"]) == sum(workers) / 2
    assert int(reference.state_dict()["num_batches_tracked"]) == 2


def test_the_norm_is_that_of_all_stages() -> None:
    model, make = make_skipping(), OPTIMIZERS["sgd"]
    made = plan("1-1-1", SKIPPING_CUTS)
    reference = Reference(
        copy.deepcopy(model),
        made.stage_of(model),
        made.replicas,
        "flush",
        squared,
        make,
        max_grad_norm=0.1,
    )
    reference.train_epoch(epoch(0))
    optimizer = make(list(model.parameters()))
    for x, target in epoch(0):
        optimizer.zero_grad()
        squared(model(x), target).backward()  # type: ignore[no-untyped-call]
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        optimizer.step()
    assert_equal(reference.state_dict(), model.state_dict())


def test_stale_weights_make_a_difference() -> None:
    """Else no test against the reference could fail: every mode ends somewhere else."""
    ends = {}
    for mode in METHODS:
        model, made = make_mixed(), plan("1-1-1")
        reference = Reference(
            model, made.stage_of(model), made.replicas, mode, squared, OPTIMIZERS["momentum"]
        )
        reference.train_epoch(epoch(0))
        ends[mode] = reference.state_dict()
    for name in make_mixed().state_dict():
        if not name.endswith("num_batches_tracked"):
            # flush and gpipe are alike
            assert len({state[name].numpy().tobytes() for state in ends.values()}) == 4, name
