"""A worker of a pipeline holds what the planner says, within 10%."""

from __future__ import annotations

import pytest
from cases import of_case
from ranks import once, run_ranks
from workers_pipedream_memory import all_held


@once
def job() -> list[dict]:
    return run_ranks(3, all_held)


@pytest.mark.parametrize(
    ("plan", "mode", "rate"),
    [
        ("straight", "stash", "momentum"),
        ("straight", "2bw", "momentum"),
        ("2-1", "stash", "momentum"),
        ("2-1", "2bw", "momentum"),
        ("straight", "vertical-sync", "momentum"),
        ("straight", "flush", "adam"),
        ("straight", "gpipe", "momentum"),
    ],
)
def test_memory_is_as_predicted(plan: str, mode: str, rate: str) -> None:
    for predicted, measured, weights in of_case(job(), (plan, mode, rate)):
        assert measured == pytest.approx(predicted, rel=0.10)
        assert 0 < weights < measured


def test_recomputing_keeps_what_came_in_alone() -> None:
    for stage, kept, again in of_case(job(), "recompute"):
        assert again < kept / 2 or stage == 2  # whose forward and backward follow each other
