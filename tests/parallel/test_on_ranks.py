"""Tests that run on ranks: a launch is shared, all ranks must pass, and none outlives its test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run_file(folder: Path, body: str, *options: str) -> str:
    """Return what pytest prints for a file of tests that have this body."""
    head = "import os, signal, time, pytest\nfrom on_ranks import gather, on_ranks, place\n"
    (folder / "test_it.py").write_text(head + body)
    (folder / "conftest.py").write_text((HERE / "conftest.py").read_text())
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}"}
    command = [sys.executable, "-m", "pytest", "-rA", "--tb=short", *options, str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return ended.stdout


def outcomes(said: str) -> dict[str, str]:
    found = re.findall(r"^(PASSED|FAILED|SKIPPED|ERROR) \S*?::(\S+)", said, re.MULTILINE)
    return {name: outcome for outcome, name in found}


def test_tests_share_a_launch_with_fixtures_parameters_and_marks(tmp_path: Path) -> None:
    said = run_file(
        tmp_path,
        "pids = []\n"
        "@pytest.fixture\n"
        "def twice(n):\n"
        "    return 2 * n\n"
        "@on_ranks(2)\n"
        "@pytest.mark.parametrize('n', [1, 2, pytest.param(7, marks=pytest.mark.skip('odd'))])\n"
        "def test_twice(n, twice, tmp_path):\n"
        "    assert twice == n + n\n"
        "    pids.append(os.getpid())\n"
        "    assert len(pids) == n\n"
        "def test_beside():\n"
        "    assert not pids\n"
        "@on_ranks(2)\n"
        "def test_last():\n"
        "    assert pids == [os.getpid()] * 2\n"
        "    assert len(set(gather(os.getpid()))) == 2\n",
    )
    assert "4 passed, 1 skipped" in said, said


def test_a_failure_on_one_rank_fails_that_test_alone(tmp_path: Path) -> None:
    """Also where the other rank waits for it, and where it ends."""
    said = run_file(
        tmp_path,
        "@on_ranks(2)\n"
        "def test_before():\n"
        "    gather(1)\n"
        "@on_ranks(2)\n"
        "def test_wrong():\n"
        "    rank = place()[1]\n"
        "    assert rank + 1 != 2, 'only here'\n"
        "    gather(rank)\n"
        "@on_ranks(2)\n"
        "def test_ends():\n"
        "    if place()[1] == 0:\n"
        "        print('last words', flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    time.sleep(100)\n"
        "@on_ranks(2)\n"
        "def test_after():\n"
        "    assert gather(place()[1]) == [0, 1]\n",
    )
    assert outcomes(said) == {
        "test_before": "PASSED",
        "test_wrong": "FAILED",
        "test_ends": "FAILED",
        "test_after": "PASSED",
    }, said
    assert "test_wrong did not pass on 2 ranks. Rank 1: AssertionError: only here" in said
    assert "last words" in said
