"""One small cell of the throughput benchmark, from its command line to its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hosts import as_root

pytestmark = as_root

ROOT = Path(__file__).resolve().parents[2]


def test_a_cell_is_raced_and_written(tmp_path: Path) -> None:
    arguments = ["--workers", "2", "--models", "vgg16", "--ratios", "2", "--no-sweep"]
    arguments += ["--only", "horovod", "engine:buckets=3", "pipe-sgd", "pipe-sgd+int8"]
    arguments += ["--compute-ms", "60", "--busy", "0.1"]
    arguments += ["--rounds", "1", "--seconds", "0.3", "--json", "grid.json", "--page", "grid.md"]
    script = ROOT / "benchmarks" / "throughput.py"
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
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
    assert sent["pipe-sgd"] > cell["gradient_bytes"] > sent["pipe-sgd+int8"] > sent["single"]
    page = (tmp_path / "grid.md").read_text()
    assert "| pipe-sgd " in page
    assert "![" not in page  # one point is no curve
