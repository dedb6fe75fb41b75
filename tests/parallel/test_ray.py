"""Workers that Ray places and Horovod's RayExecutor starts: they train, and say why they fail."""

from __future__ import annotations

import re
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import run_program

pytest.importorskip("ray", reason="the extra `ray` is not installed")

pytestmark = pytest.mark.nightly  # Ray's own processes take most of a minute to start
HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "torch_examples" / "ray_digits.py"


def drive(script: Path, *arguments: str, folder: Path) -> str:
    """What a driver printed; Ray's processes and files end with it."""
    env = {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_TOKEN": secrets.token_hex(16),  # otherwise Ray writes one into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "300",  # 30 are too few where other tests run
    }
    return run_program([sys.executable, str(script), *arguments], env, timeout=400)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's: a socket's path may have 107 characters, and Ray adds about 70 to this."""
    with tempfile.TemporaryDirectory(prefix="ray-") as name:
        yield Path(name)


def test_the_workers_of_ray_train_and_agree(folder: Path) -> None:
    options = ["--strategy", "cocod:period=4", "--epochs", "2"]
    output = drive(EXAMPLE, *options, folder=folder)
    found = re.findall(r"^rank (\d)  accuracy ([\d.]+)%  weights (\w+)$", output, re.MULTILINE)
    (first, accuracy, weights), (second, _, others) = found
    assert [first, second] == ["0", "1"]
    assert float(accuracy) > 70  # guessing gets 10
    assert weights == others
    assert "epoch 1  loss" in output
    assert "can no longer hear of others" not in output


def test_what_a_worker_raises_reaches_the_driver(folder: Path) -> None:
    with pytest.raises(AssertionError) as caught:
        drive(HERE / "ray_driver.py", folder=folder)
    assert "exit status 1\n" in str(caught.value)
    assert "\nValueError: the data of step 5 are missing" in str(caught.value)
