"""When a step first uses its parameters and computes its gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hvd_pipe.measuring.clock import Stopwatch
from hvd_pipe.measuring.step_times import FirstUses


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> FirstUses:
    """Each look at the clock is a second later."""
    seconds: Iterator[float] = map(float, range(1000))
    monkeypatch.setattr(Stopwatch, "now", lambda self: next(seconds))
    return FirstUses([torch.zeros(1) for _ in range(3)])


def step(seen: FirstUses, *uses: int, gradients: tuple[int, ...] = (1, 0)) -> None:
    seen.begin()
    for index in uses:
        seen.use([index])
    for index in gradients:
        seen.mark(index)
    seen.end_step()


def test_first_uses_and_gradients(seen: FirstUses) -> None:
    """0 is used first, 2 never, which counts as at the end of the forward pass."""
    step(seen, 0, 1, 0)
    found = seen.uses()
    assert found.needed_s == [1.0, 2.0, 3.0]
    assert (found.forward_s, found.backward_s) == (3.0, 2.0)
    assert found.ready_s == [1.0, 0.0, 2.0]


def test_the_earliest_need_and_the_median_of_the_rest(seen: FirstUses) -> None:
    step(seen, 0, 1)
    step(seen, 1, 0)
    step(seen, 2, 0, 1)
    assert seen.steps == 3
    assert seen.uses().needed_s == [1.0, 1.0, 1.0]
    assert seen.uses().forward_s == 3.0


def test_a_use_within_the_backward_pass_counts_for_nothing(seen: FirstUses) -> None:
    seen.begin()
    seen.mark(1)
    seen.use([0])
    seen.end_step()
    assert seen.uses().needed_s == [1.0] * 3


def test_a_step_without_a_gradient_is_none(seen: FirstUses) -> None:
    step(seen, 0, gradients=())
    assert seen.steps == 0
