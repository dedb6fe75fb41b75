"""The kill loop carries its faults out, restarts, and finds the weights of a whole run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly  # a benchmark
ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400.0


def test_a_rank_raises(tmp_path: Path) -> None:
    """Silence plays no part in that: a rank may be slow on a busy machine."""
    words = "--local --ranks 2 --faults 1 --seed 3 --pause 0.2 0.5 --watch 1000 --json out.json"
    words += " --launchers gloo --strategies pipe-sgd:bucket_bytes=1024"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HVD_PIPE_")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "kill_loop.py"), *words.split()],
        cwd=tmp_path,
        env={**inherited, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"].values()
    (outcome,) = run["outcomes"]
    assert outcome["kind"] == "raise"
    assert outcome["by_ranks"] == outcome["victims"]
    assert run["compared"] > 0
    assert "| all |  |  | 1 |" in done.stdout
