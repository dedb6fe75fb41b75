"""``hvd-pipe doctor``: the rows on this machine, and what each thing that is wrong is told as."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import frozen
import pytest
from click.testing import CliRunner, Result
from test_public_cli import VARIABLES

from hvd_pipe.cli import _checks, _launchers, _probe, doctor, options
from hvd_pipe.cli._probe import Answer
from hvd_pipe.cli.main import main

pytestmark = pytest.mark.slow

BUILT = {"mpi": True, "gloo": True, "nccl": False, "ddl": False, "ccl": False}
HERE = {"python": "3.11.7", "hvd_pipe": "0.1.0", "horovod": "0.28.1", "torch": "2.13.0"}
GOOD = {
    "versions": HERE | {"numpy": "2.4.6", "mpi4py": "4.1.2", "tensorflow": None},
    "horovod_torch": BUILT,
    "mpi": {"library": "Open MPI v4.1.4", "threads": "MPI_THREAD_MULTIPLE"},
    "cuda": {"torch_cuda": None, "devices": [], "nccl": None, "driver": False},
    "network": {"interfaces": []},
    "machine": {"host": "h", "system": "Linux", "cores": 2, "memory_bytes": 2**34},
}


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments], prog_name="hvd-pipe")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer]:
    """What the probes answer: a machine that is good but for TensorFlow; tests change it."""
    given = {name: Answer(found) for name, found in GOOD.items()}
    given["horovod_tensorflow"] = Answer(error="ModuleNotFoundError: tensorflow")
    given["self_test"] = Answer({"ranks": 2, "right": True, "device": "cpu", "controller": "MPI"})
    for name in [*os.environ]:
        if name.startswith(("HVD_PIPE_", "HOROVOD_", "OMPI_", "SLURM_", "KUBERNETES_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(doctor, "ask", lambda name, seconds: given[name])
    monkeypatch.setattr(doctor, "ask_host", lambda host, *_: given[f"ssh {host}"])
    monkeypatch.setattr(doctor, "ask_ranks", lambda *_, **__: given["self_test"])
    monkeypatch.setattr(doctor, "_tool", lambda name: f"/usr/bin/{name}")
    return given


@pytest.mark.nightly  # it starts two ranks of each framework and launcher
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
    assert document["good"] is True
    rows: dict[tuple[str, str], dict[str, Any]] = {
        (row["section"], row["name"]): row for row in document["rows"]
    }
    for key in [
        ("Versions", "horovod"),
        ("Frameworks", "PyTorch"),
        ("Controllers", "MPI"),
        ("Launchers", "horovodrun"),
        ("MPI", "library"),
        ("Self-test", "all-reduce on 2 ranks"),
    ]:
        assert rows[key]["good"] is True, rows[key]
    assert rows["Versions", "python"]["found"].startswith("3.")
    assert int(rows["Machine", "cores"]["found"]) >= 1


def test_the_table_looks_like_check_build(answers: dict[str, Answer]) -> None:
    result = invoke()
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert "Tensor operations:" in lines
    assert "[ ] NCCL" in lines
    assert any(line.startswith("[X] PyTorch") for line in lines)
    assert any(line.startswith("[ ] TensorFlow") and "not installed" in line for line in lines)
    assert lines[-1] == "Training can run here."
    assert "->" not in result.stdout


@pytest.mark.parametrize(
    ("probe", "answer", "row", "todo"),
    [
        (
            "horovod_torch",
            Answer(error="the process was ended by SIGSEGV"),
            "! [ ] PyTorch",
            "-> hvd-pipe build-horovod",
        ),
        (
            "horovod_torch",
            Answer(error="no answer within 60 s"),
            "! [ ] PyTorch",
            "-> python -X importtime -c 'import hvd_pipe.torch'",
        ),
        (
            "versions",
            Answer(GOOD["versions"] | {"horovod": None}),  # type: ignore[operator]
            "! [ ] horovod",
            "-> hvd-pipe build-horovod",
        ),
        (
            "horovod_torch",
            Answer(dict.fromkeys(BUILT, False)),
            "! [ ] MPI",
            "apt-get install openmpi-bin libopenmpi-dev",
        ),
        (
            "self_test",
            Answer(error="no answer within 60 s"),
            "! [ ] all-reduce on 2 ranks",
            "--timeout 240",
        ),
        (
            "self_test",
            Answer({"ranks": 2, "right": False, "device": "cpu", "controller": "MPI"}),
            "! [ ] all-reduce on 2 ranks",
            "hvd-pipe bench",
        ),
    ],
    ids=["a crash", "a slow import", "no horovod", "no controller", "a hang", "a wrong sum"],
)
def test_what_training_needs_fails_the_run(
    answers: dict[str, Answer], probe: str, answer: Answer, row: str, todo: str
) -> None:
    answers[probe] = answer
    result = invoke()
    assert result.exit_code == 1
    assert row in result.stdout
    assert todo in result.stdout
    assert result.stdout.splitlines()[-1].startswith("Training cannot run yet")


@pytest.mark.parametrize(
    ("probe", "answer", "todo"),
    [
        (
            "mpi",
            Answer(error="ModuleNotFoundError: No module named 'mpi4py'"),
            "pip install mpi4py",
        ),
        ("mpi", Answer({"library": "X", "threads": "MPI_THREAD_SERIALIZED"}), "thread support"),
        ("network", Answer(error="ModuleNotFoundError: psutil"), "pip install psutil"),
        (
            "cuda",
            Answer({"torch_cuda": None, "devices": [], "nccl": None, "driver": True}),
            "hvd-pipe build-horovod --cuda",
        ),
        (
            "cuda",
            Answer(
                {
                    "torch_cuda": "12.8",
                    "devices": [{"name": "H200", "memory_bytes": 2**37}],
                    "nccl": "2.27.5",
                    "driver": True,
                }
            ),
            "without NCCL gradients go through the host's memory",
        ),
    ],
)
def test_what_training_can_do_without_is_told_and_passes(
    answers: dict[str, Answer], probe: str, answer: Answer, todo: str
) -> None:
    answers[probe] = answer
    answers["mpi_of_horovod"] = answers["mpi"]
    result = invoke()
    assert result.exit_code == 0, result.output
    assert todo in result.stdout


def test_tensorflow_alone_is_enough(answers: dict[str, Answer]) -> None:
    """The row of PyTorch was required, so a machine for Keras was never good."""
    answers["versions"] = Answer(answers["versions"].found | {"torch": None, "tensorflow": "2.21"})
    answers["horovod_tensorflow"] = answers["horovod_torch"]
    answers["horovod_torch"] = Answer(error="ImportError: no torch")
    answers["mpi"] = Answer(error="ModuleNotFoundError: No module named 'mpi4py'")
    answers["mpi_of_horovod"] = Answer({"library": None, "threads": "MPI_THREAD_MULTIPLE"})
    result = invoke()
    assert result.exit_code == 0, result.output
    assert "[X] TensorFlow" in result.stdout
    assert "[X] MPI_THREAD_MULTIPLE" in result.stdout
    assert "pip install torch" not in result.stdout
    answers["horovod_tensorflow"] = Answer(error="ImportError: not built")
    result = invoke()
    assert result.exit_code == 1
    assert "! [ ] TensorFlow" in result.stdout


def test_without_mpi4py_horovod_is_asked_for_the_threads(answers: dict[str, Answer]) -> None:
    answers["mpi"] = Answer(error="ModuleNotFoundError: No module named 'mpi4py'")
    answers["mpi_of_horovod"] = Answer({"library": None, "threads": "MPI_THREAD_MULTIPLE"})
    assert "[X] MPI_THREAD_MULTIPLE" in invoke().stdout


def test_the_self_test_can_be_left_out_and_waits_for_what_it_needs(
    answers: dict[str, Answer],
) -> None:
    assert "Self-test" not in invoke("--no-self-test").stdout
    answers["horovod_torch"] = Answer(error="ImportError: no")
    assert "not run: PyTorch first" in invoke().stdout


def test_variables_that_matter(
    answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "0.5")
    monkeypatch.setenv("HOROVOD_SECRET_KEY", "hush")
    monkeypatch.setenv("HVD_PIPE_STRATGY", "cocod")
    result = invoke()
    assert result.exit_code == 0
    assert "HOROVOD_CYCLE_TIME" in result.stdout
    assert "hush" not in result.stdout
    assert "unset HVD_PIPE_STRATGY: hvd_pipe reads HVD_PIPE_STRATEGY" in result.stdout
    monkeypatch.setenv("HVD_PIPE_STRATEGY", "cocoo")
    result = invoke()
    assert result.exit_code == 1
    assert "-> unset HVD_PIPE_STRATEGY, or mend it" in result.stdout


def test_no_variable_of_ours_is_refused(
    answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "pipe-sgd" if name == "HVD_PIPE_STRATEGY" else "1")
    result = invoke()
    assert result.exit_code == 0
    assert "unset HVD_PIPE_" not in result.stdout


@pytest.mark.parametrize(
    ("hosts", "wrong"),
    [
        ("", "'' is none"),
        ("h1:four", "'h1:four' is none"),
        ("h1:0", "'h1:0' is none"),
        ("h1:4,,h2:4", "'' is none"),
        ("-oProxyCommand=evil:1", "is none"),
        ("h1:2,h1:2", "h1"),
    ],
)
def test_wrong_hosts_are_refused(answers: dict[str, Answer], hosts: str, wrong: str) -> None:
    result = invoke("-H", hosts)
    assert result.exit_code == 2
    assert wrong in result.stderr
    assert not result.stdout


def test_other_wrong_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("--timeout", "0").exit_code == 2
    assert invoke("-p", "99999").exit_code == 2
    assert invoke("h1").exit_code == 2
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    result = invoke()
    assert result.exit_code == 2
    assert "run `hvd-pipe doctor` alone" in result.stderr


@pytest.mark.parametrize(
    ("said", "todo"),
    [
        ("Host key verification failed.", "ssh-keyscan -H h2 >> ~/.ssh/known_hosts"),
        ("root@h2: Permission denied (publickey).", "ssh-copy-id h2"),
        ("ssh: Could not resolve hostname h2: Name or service not known", "/etc/hosts"),
        ("ssh: connect to host h2 port 22: Connection refused", "--ssh-port"),
        ("sh: 1: /opt/venv/bin/python: not found", "the same environment at the same path"),
        ("No module named hvd_pipe", "the same environment at the same path"),
        ("something new", "`ssh -o BatchMode=yes h2 true`"),
    ],
)
def test_an_unreachable_host(answers: dict[str, Answer], said: str, todo: str) -> None:
    answers["ssh h2"] = Answer(error=said)
    result = invoke("-H", "localhost:2,h2:2")
    assert result.exit_code == 1
    assert "! [ ] ssh h2" in result.stdout
    assert todo in result.stdout


def test_a_host_with_another_version(answers: dict[str, Answer]) -> None:
    answers["ssh h2"] = Answer(answers["versions"].found | {"torch": "2.12.0"})
    result = invoke("-H", "h2:2")
    assert result.exit_code == 1
    assert "torch 2.12.0 (here 2.13.0)" in result.stdout
    answers["ssh h2"] = answers["versions"]
    result = invoke("-H", "h2:2")
    assert result.exit_code == 0
    assert "reachable, the same versions" in result.stdout


def test_hosts_are_really_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for ssh, which runs the command here or fails as ssh does."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        'while [ "$#" -gt 2 ]; do shift; done\n'
        '[ "$1" = good ] && exec sh -c "$2"\n'
        '[ "$1" = silent ] && exec sleep 60\n'
        'echo "** WARNING: connection is watched" >&2\n'
        'echo "ssh: connect to host $1 port 22: Connection refused" >&2; exit 255\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = _probe.ask_host("good", None, "versions", 200).found
    assert found == _probe.ask("versions", 200).found
    assert (
        "Connection refused (exit status 255)" in _probe.ask_host("bad", 22, "versions", 30).error
    )
    assert _probe.ask_host("silent", None, "versions", 1).error == "no answer within 1 s"


def test_a_crash_and_a_hang_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_probe, "_MODULE", "nothing.such")
    assert "nothing" in _probe.ask("versions", 30).error
    run = _probe._run
    crash = [sys.executable, "-c", "import os; os.abort()"]
    assert run(crash, 30).error == "the process was ended by SIGABRT"
    assert run([sys.executable, "-c", "import time; time.sleep(60)"], 1).error.startswith("no ans")
    assert run(["/no/such/program"], 1).error == "/no/such/program: No such file or directory"
    tagged = f"[1,0]<stdout>:{_probe.MARK}{json.dumps({'found': {'ranks': 2}})}[1,0]<stdout>:"
    assert run(["echo", tagged], 30).found == {"ranks": 2}
    raised = run([sys.executable, "-c", "raise RuntimeError('error')"], 30)
    assert raised.error == "RuntimeError: error (exit status 1)"
    quiet = run([sys.executable, "-c", "raise SystemExit(3)"], 30)
    assert quiet.error == "no output (exit status 3)"


def test_hosts_are_parsed_as_horovodrun_does() -> None:
    assert _checks.parse_hosts("h1:4,h2:4") == ("h1", "h2")
    assert _checks.parse_hosts("10.0.0.1, node-3.cluster:8") == ("10.0.0.1", "node-3.cluster")


BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "4(x2)"}
BATCH |= {"SLURM_NTASKS": "8", "SLURM_CPUS_PER_TASK": "2"}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}
PMIX = {"PMIX_RANK": "0"}


@pytest.mark.parametrize(
    ("environment", "cores", "found", "todo"),
    [
        (BATCH, 8, "2 nodes, 4 tasks on this one", ""),
        (BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, 8, "4 tasks", ""),
        (BATCH, 7, "7 cores for the ranks of a node", "sbatch --ntasks-per-node=... --cpus"),
        ({"SLURM_JOB_ID": "7"}, 1, "1 core for the ranks of a node", "a core for each rank: sb"),
        ({"SLURM_JOB_ID": "7"}, 2, "1 node, 1 task on", "for more ranks on a node: sbatch --nta"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}, 1, "1 task", "horovodrun --gloo"),
        (STEP, 2, "8 tasks under srun, without PMIx", "srun --mpi=pmix makes the tasks ranks"),
        (STEP | PMIX, 2, "8 tasks under srun, with PMIx", "in the batch script, without srun"),
        (STEP | PMIX, 1, "1 core for this task, 2 asked for", "srun --cpus-per-task=2: srun does"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, 2, "1 task under", "in the batch script, without"),
    ],
)
def test_what_slurm_gave(environment: dict[str, str], cores: int, found: str, todo: str) -> None:
    rows = _launchers.launcher_rows(environment, cores)
    assert [row.section for row in rows] == ["Slurm"] * 2
    assert any(found in row.found for row in rows), rows
    if todo:
        assert any(todo in row.todo for row in rows), rows
    else:
        assert not [row for row in rows if row.todo or row.good is False]


@pytest.mark.parametrize(
    ("threads", "limit", "shared", "found", "todo"),
    [
        (None, None, 2**30, ["1024 MiB", "8, no limit"], ["", ""]),
        (None, 8.0, 2**30, ["1024 MiB", "a limit of 8, 8 threads"], ["", ""]),
        (None, 2.5, 2**26 + 2**20, ["65 MiB", "a limit of 2.5, 8 threads"], ["", "=2, or less"]),
        ("4", 0.5, 2**26, ["64 MiB", "a limit of 0.5, 4 threads"], ["medium: Memory", "=1, or"]),
        ("1", 0.5, 2**27, ["128 MiB", "a limit of 0.5, 1 thread"], ["", ""]),
        ("2", 2.0, 2**20, ["1 MiB", "a limit of 2, 2 threads"], ["emptyDir", ""]),
    ],
)
def test_what_kubernetes_gave(
    threads: str | None, limit: float | None, shared: int, found: list[str], todo: list[str]
) -> None:
    environment = {} if threads is None else {"OMP_NUM_THREADS": threads}
    rows = _launchers.kubernetes_rows(environment, 8, shared, limit)
    assert [row.found for row in rows] == found
    assert [bool(row.todo) for row in rows] == [not row.good for row in rows]
    assert all(words in row.todo for words, row in zip(todo, rows, strict=True))
    assert [row.good for row in rows] == [not words for words in todo]


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
    ],
)
def test_the_limit_of_a_control_group(
    files: dict[str, str], limit: float | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _launchers.cpu_limit(tmp_path) == limit


def test_slurm_and_kubernetes_have_rows_where_they_are(
    answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = invoke().stdout
    assert "Slurm:" not in shown
    assert "Kubernetes:" not in shown
    for name, value in (BATCH | {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}).items():
        monkeypatch.setenv(name, value)
    shown = invoke().stdout
    assert "2 nodes, 4 tasks on this one" in shown
    assert "MiB" in shown[shown.index("Kubernetes:") :]


@pytest.mark.parametrize(("tasks", "gloo"), [("1(x2)", True), ("2(x2)", False), (None, False)])
def test_the_self_test_has_two_ranks_also_where_slurm_has_one_task_on_a_node(
    answers: dict[str, Answer], monkeypatch: pytest.MonkeyPatch, tasks: str | None, gloo: bool
) -> None:
    """mpirun starts no more ranks on a node than tasks: the self-test failed there."""
    asked = []

    def ask_ranks(*_: object, gloo: bool) -> Answer:
        asked.append(gloo)
        return answers["self_test"]

    monkeypatch.setattr(doctor, "ask_ranks", ask_ranks)
    if tasks is not None:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_TASKS_PER_NODE", tasks)
    invoke()
    assert asked == [gloo]


def test_tasks_of_srun_with_pmix_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    assert (options.job_size(), options.job_rank()) == (1, 0)
    monkeypatch.setenv("PMIX_RANK", "3")
    assert (options.job_size(), options.job_rank()) == (8, 3)
    result = invoke()
    assert result.exit_code == 2
    assert "run `hvd-pipe doctor` alone" in result.stderr
