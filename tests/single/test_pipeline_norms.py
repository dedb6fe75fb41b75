"""Clipping by the norm over all stages, by what one worker knows of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from horovod.common.process_sets import ProcessSet

from hvd_pipe.pipeline.stage import Clipping, Norms

RANKS = ProcessSet([0, 1])  # of which no rank asks anything here
RANKS.size = lambda: 2  # type: ignore[method-assign]


def clipping(
    most: float | None,
    together: bool = False,
    replicas: ProcessSet | None = None,
    others: Sequence[float] = (),
    stages: int = 2,
) -> Clipping:
    """Of stage 0, where the other ranks that take part bring these numbers to each sum."""

    def add(value: float, _: str, ranks: ProcessSet) -> float:
        assert ranks is RANKS
        return value + sum(others)

    return Clipping(most, together, Norms(0, stages), replicas, RANKS, add)


def never() -> float:
    raise AssertionError("nobody asks for the norm where nothing is clipped")


def test_nothing_is_asked_where_nothing_is_clipped() -> None:
    found = clipping(None)
    assert found.factor(never) == 1.0
    assert math.isnan(found.norms.squared[0])


@pytest.mark.parametrize("most", [0.5, 5.0, 6.0])
def test_it_is_pytorch_s_rule(most: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([parameter], most)
    factor = clipping(most).factor(lambda: 25.0)
    assert factor == pytest.approx(float(parameter.grad[0]) / 3.0, rel=1e-12)


def test_what_is_not_known_counts_as_nothing() -> None:
    found = clipping(1.0, stages=3)
    found.norms.heard([math.nan, 11.0, math.nan], from_before=False)
    assert found.factor(lambda: 25.0) == pytest.approx(1.0 / 6.0, rel=1e-6)
    assert found.norms.squared[:2] == (25.0, 11.0)


def test_stages_that_update_together_add_up() -> None:
    """Each replica brings its share of the own norm, so that the sum has it once."""
    found = clipping(1.0, together=True, replicas=RANKS, others=(12.5, 11.0))
    assert found.factor(lambda: 25.0) == pytest.approx(1.0 / 6.0, rel=1e-6)


def test_replicas_take_the_mean_of_what_they_were_told() -> None:
    found = clipping(1.0, replicas=RANKS, others=(4.0,))
    found.norms.heard([math.nan, 18.0], from_before=False)
    assert found.factor(lambda: 25.0) == pytest.approx(1.0 / 6.0, rel=1e-6)
