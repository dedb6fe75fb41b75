"""Small runs of benchmarks on emulated hosts, from their command lines to their files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hosts import as_root

pytestmark = as_root

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, arguments: list[str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_cell_is_raced_and_written(tmp_path: Path) -> None:
    arguments = ["--workers", "2", "--models", "vgg16", "--ratios", "2", "--no-sweep"]
    arguments += ["--only", "horovod", "engine:buckets=3", "pipe-sgd", "pipe-sgd+int8"]
    arguments += ["--compute-ms", "60", "--busy", "0.1"]
    arguments += ["--rounds", "1", "--seconds", "0.3", "--json", "grid.json"]
    run("throughput.py", arguments, tmp_path)
    (cell,) = json.loads((tmp_path / "grid.json").read_text())
    seconds = {row["contestant"]: row["seconds"] for row in cell["rows"]}
    assert list(seconds) == [
        "horovod",
        "engine:buckets=3",
        "pipe-sgd",
        "pipe-sgd+int8",
        "single",
    ]
    # The link is slow enough for what is sent to show, however busy this machine is.
    assert seconds["single"] >= 0.059
    assert seconds["horovod"] > seconds["single"]
    assert seconds["engine:buckets=3"] > seconds["single"]
    assert 0.0 < cell["others"] < 1.0
    sent = {row["contestant"]: row["sent_bytes"] for row in cell["rows"]}
    assert sent["engine:buckets=3"] > cell["gradient_bytes"]
    # Messages of pipe-sgd are on their way when the bytes are counted, first and last.
    half = cell["gradient_bytes"] / 2
    assert sent["pipe-sgd"] > half > sent["pipe-sgd+int8"] > sent["single"]
