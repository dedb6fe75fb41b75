"""Checks on a GPU, of one rank or of several: each rank is a pytest that runs the same tests.

    horovodrun -np 2 --gloo python -m pytest -m cuda tests/gpu

``docker/gpu_check.sh`` runs them on a machine without a network. ``GPU_CHECK_DEVICE=cpu``
rehearses them without a GPU, with small sizes. ``GPU_CHECK_RESULTS`` names the files that get a
line of JSON a test.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
NUMBER = os.environ.get("HOROVOD_RANK", "0")
# Before CUDA and NCCL start: NCCL refuses two ranks on a GPU unless they seem to be of two hosts.
if os.environ.get("GPU_CHECK_SHARING") == "host-id":
    os.environ["NCCL_HOSTID"] = f"rank-{NUMBER}"


@pytest.fixture(scope="session")
def device() -> Iterator[object]:
    """The device of this rank, with Horovod initialised."""
    import torch  # noqa: PLC0415 - other runs only collect what is here

    import hvd_pipe.torch as hvd  # noqa: PLC0415

    if os.environ.get("GPU_CHECK_DEVICE") == "cpu":
        chosen = torch.device("cpu")
        torch.set_num_threads(1)
    elif torch.cuda.is_available():
        chosen = torch.device("cuda", int(NUMBER) % torch.cuda.device_count())
        torch.cuda.set_device(chosen)
    else:
        pytest.skip("torch sees no GPU; GPU_CHECK_DEVICE=cpu rehearses this")
    hvd.init()
    yield chosen
    hvd.shutdown()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append what a test has found: ``good`` is None where it judges nothing."""
    path = os.environ.get("GPU_CHECK_RESULTS")
    if path is None or report.skipped or not (report.when == "call" or report.failed):
        return
    found = {"text": "", **dict(report.user_properties)}
    good = report.passed if found.pop("judged", True) else None
    if report.failed:
        good = False
        errors = [line[1:] for line in report.longreprtext.splitlines() if line[:2] == "E "]
        found["text"] = " ".join(f"{found['text']} {' '.join(errors)}".split())[:400]
    row = {"name": report.nodeid.partition("::")[2], "good": good, **found}
    with Path(f"{path}.{NUMBER}").open("a") as results:
        results.write(json.dumps(row) + "\n")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A rank that fails would have horovodrun end the others before they have written."""
    if "GPU_CHECK_RESULTS" in os.environ and exitstatus == pytest.ExitCode.TESTS_FAILED:
        session.exitstatus = pytest.ExitCode.OK
