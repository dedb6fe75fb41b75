"""The tests of torch's strategies again, with the carrier that is not the default.

That is torch's for all jobs over MPI, and Horovod's for the files that have jobs over Gloo.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = [
    "auto",
    "check_mode",
    "class_alone",
    "cocod",
    "cocod_options",
    "copies",
    "differing_ranks",
    "elastic",
    "equations",
    "faults",
    "fields",
    "going_ahead",
    "growth",
    "guards",
    "measuring",
    "merged_gradient",
    "overlap_forward",
    "own_states",
    "own_strategy",
    "pending_gradients",
    "pending_parameters",
    "pipe_sgd",
    "plans",
    "prediction",
    "public_optimizers",
    "public_patterns",
    "regressions",
    "resume",
    "running_timeline",
    "saved",
    "sync_batch_norm",
    "uses",
    "waiting",
]
OVER_GLOO = ["clients", "elastic", "faults", "waiting"]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("carrier", "file"),
    [*(("torch", file) for file in FILES), *(("horovod", file) for file in OVER_GLOO)],
)
def test_all_tests_pass_by_this_carrier(carrier: str, file: str) -> None:
    path = Path(__file__).with_name(f"test_{file}.py")
    words = ["-q", "-p", "no:cacheprovider", "-m", "not nightly and not cluster and not cuda"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(path)],
        env={**os.environ, "HVD_PIPE_CARRIER": carrier},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
