"""What the planner predicts of others' measurements: the tables of docs/scale.md, from code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import pages

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import published
import published_models

PAGE = pages.ROOT / "docs" / "scale.md"


def test_the_page_has_the_tables() -> None:
    text = PAGE.read_text()
    for table in published.tables(published.studies(), published.markdown):
        assert table in text


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


def test_every_study_has_its_sources() -> None:
    file = pages.ROOT / "benchmarks" / "results" / "published.json"
    for study in json.loads(file.read_text()):
        assert all(study[key] for key in ("source", "constants", "profile", "cluster"))
        text = PAGE.read_text()
        assert all(study[key] in text for key in ("source", "constants", "profile", "cluster"))


def test_an_error_is_signed() -> None:
    row = published.Row("vgg16", 2, "net", "wfbp", 32, 1.0, measured_s=2.0, predicted_s=1.5)
    assert row.error == -0.25
