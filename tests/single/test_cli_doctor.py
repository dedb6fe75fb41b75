"""``hvd-pipe doctor``: the rows on this machine, and what each thing that is wrong is told as."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import frozen
import pytest
from click.testing import CliRunner, Result

from hvd_pipe.cli import doctor, options
from hvd_pipe.cli.doctor import Answer
from hvd_pipe.cli.main import main

pytestmark = pytest.mark.slow

BUILT: dict[str, Any] = {"MPI": True, "Gloo": False, "NCCL": False, "DDL": False, "CCL": False}
BUILT |= {"devices": []}
HERE = dict.fromkeys(doctor._PACKAGES, "1.0") | {"tensorflow": None, "keras": None}
RIGHT = {"right": True, "device": "cpu"}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments], prog_name="hvd-pipe")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """What processes answer: a machine that is good, without TensorFlow; tests change it."""
    given: dict[str, Answer] = {"torch": BUILT, "MPI": RIGHT, "Gloo": RIGHT}
    given["tensorflow"] = {"error": "ModuleNotFoundError: tensorflow"}

    def ask(look: str, seconds: int, launcher: Sequence[str] = ()) -> Answer:
        controller = "Gloo" if "--gloo" in launcher else "MPI"
        return given[controller if look == "self_test" else look]

    for name in [*os.environ]:
        if name.startswith(("HVD_PIPE_", "HOROVOD_", "OMPI_", "PMI")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(doctor, "ask", ask)
    monkeypatch.setattr(doctor, "_tool", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(doctor, "installed", lambda name, *_: HERE[name])
    return given


@pytest.mark.nightly  # it starts two ranks of each launcher
def test_this_machine_is_found_good() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "hvd_pipe", "doctor", "--json", "--timeout", "180"],
        capture_output=True,
        text=True,
        check=False,
        timeout=450,
        env={k: v for k, v in os.environ.items() if not k.startswith("HVD_PIPE_")},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    document = json.loads(run.stdout)
    frozen.compare_types("cli/doctor", document)
    rows = {(row["section"], row["name"]): row["good"] for row in document["rows"]}
    assert rows["Versions", "horovod"]
    assert rows["Frameworks", "PyTorch"]
    assert rows["Controllers", "MPI"]
    assert rows["Self-test", "all-reduce on 2 ranks, MPI"]


def test_the_table_looks_like_check_build(answers: dict[str, Answer]) -> None:
    result = invoke()
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert {"Tensor operations:", "[ ] NCCL"} <= set(lines)
    assert any(line.startswith("[X] PyTorch") for line in lines)
    assert any(line.startswith("[ ] TensorFlow") and "not installed" in line for line in lines)
    assert lines[-1] == "Training can run here."
    assert "->" not in result.stdout
    assert "Self-test" not in invoke("--no-self-test").stdout


HANGS = {"error": "no answer within 60 s"}


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"torch": {"error": "ended by SIGSEGV"}}, 1, ("! [ ] PyTorch", f"-> {doctor.BUILD}")),
        ({"torch": HANGS}, 1, ("! [ ] PyTorch", "python -X importtime -c")),
        ({"torch": BUILT | {"MPI": False}}, 1, ("! [ ] MPI", "apt-get install openmpi-bin")),
        ({"MPI": HANGS}, 1, ("! [ ] all-reduce", "--timeout 240")),
        ({"MPI": {"right": False, "device": "cpu"}}, 1, ("a wrong sum", "hvd-pipe bench")),
        (
            {"torch": BUILT | {"Gloo": True}, "MPI": {"error": "not enough slots available"}},
            0,
            ("[ ] all-reduce on 2 ranks, MPI", "[X] all-reduce on 2 ranks, Gloo"),
        ),
        ({"torch": BUILT | {"devices": ["H200"]}}, 0, ("H200", "without NCCL gradients go")),
    ],
    ids=["crash", "slow", "no MPI", "hang", "wrong sum", "slots", "no NCCL"],
)
def test_what_is_wrong_is_told(
    answers: dict[str, Answer], changes: dict[str, Answer], code: int, words: tuple[str, ...]
) -> None:
    answers.update(changes)
    result = invoke()
    assert result.exit_code == code, result.output
    assert all(word in result.stdout for word in words), result.stdout
    last = result.stdout.splitlines()[-1]
    assert last.startswith("Training cannot run yet" if code else "Training can run here")


def test_tensorflow_alone_is_enough(
    answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of PyTorch was required, so a machine for Keras was never good."""
    monkeypatch.setitem(HERE, "torch", None)
    monkeypatch.setitem(HERE, "tensorflow", "2.21")
    answers["torch"], answers["tensorflow"] = {"error": "ImportError"}, BUILT
    result = invoke()
    assert result.exit_code == 0, result.output
    assert "[X] TensorFlow" in result.stdout
    assert "pip install torch" not in result.stdout
    answers["tensorflow"] = {"error": "ImportError: not built"}
    result = invoke()
    assert result.exit_code == 1
    assert "! [ ] TensorFlow" in result.stdout


def test_it_is_not_run_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")  # tasks of srun with PMIx are ranks
    assert (options.job_size(), options.job_rank()) == (1, 0)
    monkeypatch.setenv("PMIX_RANK", "3")
    assert (options.job_size(), options.job_rank()) == (8, 3)
    result = invoke()
    assert result.exit_code == 2
    assert "run `hvd-pipe doctor` alone" in result.stderr


def test_a_crash_a_hang_and_a_mistake_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "unknown" in doctor.ask("unknown", 60)["error"]
    monkeypatch.setattr(doctor, "_GRACE_S", 0)
    for program, error in (
        ("import time; time.sleep(60)", "no answer within 5 s"),
        ("import os; os.abort()", "the process was ended by SIGABRT"),
        (
            "exit('RuntimeError: no\\n-----\\nmpirun has ended')",
            "RuntimeError: no (exit status 1)",
        ),
        ("exit('-----\\nThere are no slots\\n-----')", "There are no slots (exit status 1)"),
        ("raise SystemExit(3)", "no output (exit status 3)"),
    ):
        assert doctor.ask("", 5, [sys.executable, "-c", program]) == {"error": error}
    tagged = f"[1,0]<stdout>:{doctor._MARK}{json.dumps({'ranks': 2})}[1,0]<stdout>:"
    assert doctor.ask("", 5, ["echo", tagged]) == {"ranks": 2}
