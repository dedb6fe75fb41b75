"""What the planner predicts of others' measurements. `docs/tables.py` writes the tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import published_models


@pytest.mark.parametrize(
    ("name", "tensors", "millions"),
    [  # MG-WFBP, arXiv 1912.09268, table 4
        ("resnet152", 467, 60.1),
        ("densenet161", 484, 28.6),
        ("densenet201", 604, 20.0),
        ("inception-v4", 449, 42.6),
    ],
)
def test_a_network_has_as_many_tensors_as_is_published(
    name: str, tensors: int, millions: float
) -> None:
    net = published_models.NETWORKS[name]()
    assert len(net.tensors) == tensors
    assert net.parameters / 1e6 == pytest.approx(millions, abs=0.1)
    profile = net.profile(step_s=0.3, value_bytes=2)
    assert profile.compute_s == pytest.approx(0.3)
    assert profile.backward_s == pytest.approx(0.2)
    assert sum(profile.gradient_bytes()) == 2 * net.parameters
