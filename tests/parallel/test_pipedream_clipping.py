"""Clipping by the norm over all stages, where each knows of the others what messages have said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import of_case
from ranks import once, run_ranks
from workers_pipedream_clipping import Run, all_resumed, piped, serial

PLANS = {2: ["1-1"], 3: ["2-1", "1-2"]}
CASES = [
    (plan, mode)
    for plans in PLANS.values()
    for plan in plans
    for mode in ("stash", "vertical-sync", "2bw")
]


def test_stages_clip_by_the_newest_norms_that_they_have_heard_of() -> None:
    expected, clipped = serial()
    assert clipped > 10
    for state in run_ranks(2, piped):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@once
def runs(workers: int, folder: Path) -> list[dict[tuple[str, str], Run]]:
    return run_ranks(workers, all_resumed, PLANS[workers], folder)


def runs_of(plan: str, mode: str, folder: Path) -> list[Run]:
    found: list[Run] = of_case(runs(sum(map(int, plan.split("-"))), folder), (plan, mode))
    return found


@pytest.mark.parametrize(("plan", "mode"), CASES)
def test_replicas_clip_alike(plan: str, mode: str, folder: Path) -> None:
    """Neighbours may have told them of unlike norms."""
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for stage, own, _, _ in runs_of(plan, mode, folder):
        for name, value in layers.setdefault(stage, own).items():
            assert torch.equal(own[name], value)
    assert len(layers) == 2


@pytest.mark.parametrize(("plan", "mode"), CASES)
def test_what_is_known_of_norms_is_in_checkpoints(plan: str, mode: str, folder: Path) -> None:
    for _, _, kept, again in runs_of(plan, mode, folder):
        for name, value in kept.items():
            assert torch.equal(again[name], value), name
