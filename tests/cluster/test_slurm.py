"""The batch scripts of docs/launching.md, submitted to Slurm on two emulated hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import as_root

from benchmarks import slurm as emulated
from benchmarks.cluster import Cluster, ClusterError
from benchmarks.slurm import Slurm, missing_packages, start_slurm

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
SCRIPTS = ROOT / "docs" / "launching"
JOB_S = 200.0

needs_slurm = [
    *as_root,
    pytest.mark.skipif(
        bool(missing_packages()),
        reason=f"needs Slurm: apt-get install {' '.join(missing_packages())}",
    ),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Cluster(2) as cluster, start_slurm(cluster) as made:
        yield made


class TestScripts:
    pytestmark = needs_slurm

    @pytest.mark.parametrize("script", ["slurm_srun.sh", "slurm_horovodrun.sh"])
    def test_a_job_trains_on_all_nodes(self, slurm: Slurm, script: str, tmp_path: Path) -> None:
        output = tmp_path / "output"
        train = ["python", str(HERE / "worker_train.py"), str(tmp_path), "pipe-sgd"]
        job = slurm.submit([str(SCRIPTS / script), *train], output)
        assert slurm.wait(job, JOB_S) == "COMPLETED", output.read_text()
        ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
        assert [each["host"] for each in ranks] == ["h1", "h1", "h2", "h2"]
        assert [each["local_rank"] for each in ranks] == [0, 1, 0, 1]
        assert [each["size"] for each in ranks] == [4] * 4
        assert [each["weights"] for each in ranks] == [ranks[0]["weights"]] * 4

    def test_a_job_that_fails_is_told_as_failed(self, slurm: Slurm, tmp_path: Path) -> None:
        job = slurm.submit([str(SCRIPTS / "slurm_srun.sh"), "false"], tmp_path / "output")
        assert slurm.wait(job, JOB_S) == "FAILED"

    def test_an_elastic_job_goes_on_without_a_lost_node(
        self, slurm: Slurm, tmp_path: Path
    ) -> None:
        output, workers = tmp_path / "output", tmp_path / "workers"
        train = ["python", str(HERE / "worker_elastic.py"), str(tmp_path)]
        job = slurm.submit([str(SCRIPTS / "slurm_elastic.sh"), *train], output)
        deadline = time.monotonic() + JOB_S
        while not workers.exists():
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        node = ["scontrol", "update", "nodename=h2"]
        slurm.run([*node, "state=down", "reason=test"], check=True)
        try:
            assert slurm.wait(job, JOB_S) == "COMPLETED", output.read_text()
        finally:
            slurm.run([*node, "state=resume"], check=True)
        sizes = list(map(int, workers.read_text().split()))
        assert sizes[0] == 2
        assert sizes[-1] == 1
        assert sizes == sorted(sizes, reverse=True)

    def test_doctor_finds_a_job_with_one_task_a_node_good(
        self, slurm: Slurm, tmp_path: Path
    ) -> None:
        """mpirun starts no more ranks on a node than tasks; two ranks try all-reduce."""
        script, output = tmp_path / "job.sh", tmp_path / "output"
        script.write_text(
            "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1\n"
            "hvd-pipe doctor --json --timeout 180\n"
        )
        job = slurm.submit([str(script)], output)
        assert slurm.wait(job, 2 * JOB_S) == "COMPLETED", output.read_text()
        assert "Gloo, cpu" in output.read_text()


def test_an_elastic_job_asks_again_when_slurm_does_not_answer(tmp_path: Path) -> None:
    """The script ended well and named no host: horovodrun took all of them for lost."""
    for name, body in {
        "squeue": "echo 'Unable to contact slurm controller' >&2; exit $SQUEUE",
        "scontrol": "echo h1; echo h2",
        "horovodrun": '"$6"; echo "answered with $?"',
    }.items():
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\n{body}\n")
        command.chmod(0o755)
    job = {"SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NTASKS_PER_NODE": "1"}
    for status, said in ("1", "answered with 1"), ("0", "h1:1 h2:1 answered with 0"):
        done = subprocess.run(
            ["bash", str(SCRIPTS / "slurm_elastic.sh"), "true"],
            env=os.environ | job | path | {"SQUEUE": status},
            capture_output=True,
            text=True,
            check=True,
        )
        assert " ".join(done.stdout.split()) == said


class TestCommand:
    pytestmark = needs_slurm

    def test_it_passes_the_status_on(self) -> None:
        command = ["sh", "-c", "sinfo --noheader --format=%t,%D; exit 3"]
        done = subprocess.run(
            [sys.executable, "benchmarks/slurm.py", "--hosts", "2", "--", *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 3, done.stderr
        assert done.stdout == "idle,2\n"


def test_missing_daemons_are_named_by_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def which(tool: str, **_: Any) -> str | None:
        return None if tool in ("munged", "slurmd") else f"/bin/{tool}"

    monkeypatch.setattr(emulated.shutil, "which", which)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with (
        pytest.raises(ClusterError, match=r"apt-get install munge slurmd$"),
        start_slurm(Cluster(2)),
    ):
        pass
