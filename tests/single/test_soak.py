"""The soak's verdict: what has grown, or is not alike, is named."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from soak import Moment, Run

FLAT = [Moment(100 * i, 300.0, 80, 9, 20, 0, 0.0, True, 1.0 / i) for i in range(1, 11)]


def faults(moments: list[Moment]) -> list[str]:
    return Run("pipe-sgd", 4, 1.0, moments).faults()


def test_a_flat_run_has_no_faults() -> None:
    assert faults(FLAT) == []


@pytest.mark.parametrize("count", ["tensors", "threads", "files", "handles"])
def test_whatever_grows_is_named(count: str) -> None:
    before = getattr(FLAT[-1], count)
    grown = [*FLAT[:-1], replace(FLAT[-1], **{count: before + 1})]
    assert faults(grown) == [f"pipe-sgd: {count} grew from {before} to {before + 1}"]


def test_unlike_replicas_are_named_with_their_step_from_the_start() -> None:
    unlike = [replace(FLAT[0], alike=False, spread=1e-7), *FLAT[1:]]
    assert faults(unlike) == ["pipe-sgd: replicas were unlike at step 100"]
