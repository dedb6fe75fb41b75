"""Clipping by the norm over all stages, where each knows of the others what messages have said."""

from __future__ import annotations

import torch
from ranks import run_ranks
from workers_pipedream_clipping import piped, serial


def test_stages_clip_by_the_newest_norms_that_they_have_heard_of() -> None:
    expected, clipped = serial()
    assert clipped > 10
    for state in run_ranks(2, piped):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)
