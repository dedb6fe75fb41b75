"""The GPU check's script: its archive, its sections, its page.

Nothing is built here and no rank is started: `docker/gpu_check.sh --cpu` runs all of it.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent

sys.path.insert(0, str(ROOT / "docker"))
kit = importlib.import_module("gpu_kit")


def row(name: str, good: bool | None, **more: float) -> dict[str, Any]:
    return {"name": name, "good": good, "text": f"about {name}", **more}


@pytest.mark.nightly  # a rank that imports all again, for a check that is made for a release
def test_the_archive_has_what_its_tests_import(tmp_path: Path) -> None:
    kit.write_archive(tmp_path / "b.tar.gz", tmp_path / "none")
    with tarfile.open(tmp_path / "b.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "hvd_pipe").symlink_to(ROOT / "hvd_pipe")  # as its wheel would be installed
    subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "cuda", "tests/gpu", "-k", "test_probe"],
        cwd=tmp_path / kit.TOP,
        env={
            **os.environ,
            "PYTHONPATH": os.fspath(tmp_path),
            "GPU_CHECK_DEVICE": "cpu",
            "GPU_CHECK_RESULTS": os.fspath(tmp_path / "results"),
        },
        check=True,
        timeout=200,
    )
    found = json.loads((tmp_path / "results.0").read_text())
    assert found == {"name": "test_probe", "good": True, "text": "the sum of 1 ranks"}


def test_a_section_that_fails_stops_only_what_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def fails(_: object, limit_s: float) -> list[dict[str, Any]]:
        limits.append(limit_s)
        raise kit.SectionError("nvcc is away")

    def breaks(_: object, limit_s: float) -> list[dict[str, Any]]:
        limits.append(limit_s)
        raise KeyError("gone")

    sections = (
        kit.Section("Build", 200, fails, None),
        kit.Section("Speed", 200, lambda *_: [row("a", True)], "Build"),
        kit.Section("Odd", 200, breaks, None),
        kit.Section("Last", 200, lambda *_: [row("b", True), row("c", False)], None),
    )
    monkeypatch.setattr(kit, "SECTIONS", sections)
    done = kit.carry_out(kit.Kit(tmp_path, True), 10)
    assert [found["state"] for found in done] == ["failed", "not run", "failed", "not all good"]
    assert [found["why"] for found in done] == ["nvcc is away", "Build did not work", "'gone'", ""]
    assert [round(limit, -2) for limit in limits] == [200, 600]  # with what others have left
    assert json.loads((tmp_path / "gpu-check.json").read_text())["sections"] == done
    assert "nvcc is away" in (tmp_path / "gpu-check.md").read_text()
    (first, *_) = kit.carry_out(kit.Kit(tmp_path, True), 0.01)
    assert (first["state"], first["why"]) == ("not run", "no time was left")


def test_a_result_is_good_only_if_it_is_on_every_rank() -> None:
    first = [row("a", True), row("b", True), row("c", None), row("d", True)]
    second = [row("a", True), row("b", False), row("c", None)]
    rows = {found["name"]: found for found in kit.joined([first, second])}
    goods = {name: found["good"] for name, found in rows.items()}
    assert goods == {"a": True, "b": False, "c": None, "d": False}
    assert rows["d"]["text"] == "only 1 of 2 ranks finished it"
