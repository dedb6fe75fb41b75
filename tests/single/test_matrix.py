"""`make matrix`: which environments it makes, where it goes on, and the table that it writes.

Its cells build Horovod for minutes, so they are stand-ins here.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

sys.path.insert(0, os.fspath(ROOT / "docker" / "matrix"))
try:
    matrix = importlib.import_module("matrix")
finally:
    sys.path.remove(os.fspath(ROOT / "docker" / "matrix"))

HAD = {"python": "3.11.7", "torch": "2.4.1", "tensorflow": "", "keras": "", "numpy": "2.2.6"}
FIRST, SECOND = matrix.CELLS[:2]


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the cells that were carried out; those in `FAILING` fail."""
    names: list[str] = []

    def try_cell(cell: object, wheel: Path, work: Path) -> dict[str, str]:
        names.append(cell.name)  # type: ignore[attr-defined]
        if cell == SECOND:
            raise matrix.SetupError("Horovod failed: no compiler. Its log says more.")
        return HAD

    monkeypatch.setattr(matrix, "try_cell", try_cell)
    monkeypatch.setattr(matrix, "build", lambda out: (out / "wheel", out / "sdist"))
    return names


def test_it_goes_on_where_it_stopped_and_begins_anew_for_other_sources(
    tried: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not matrix.carry_out([FIRST, SECOND], tmp_path)
    assert tried == [FIRST.name, SECOND.name]
    kept = json.loads((tmp_path / f"{SECOND.name}.json").read_text())
    assert kept["state"] == "failed: Horovod failed: no compiler. Its log says more."
    assert not matrix.carry_out([FIRST, SECOND], tmp_path)
    assert tried[2:] == [SECOND.name]  # the other one has passed
    monkeypatch.setattr(matrix, "sources", lambda: "others")
    assert matrix.carry_out([FIRST], tmp_path)
    assert tried[3:] == [FIRST.name]
