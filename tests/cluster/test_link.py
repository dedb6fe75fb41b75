"""A link is cut, and healed or not, or a host is switched off, while a job trains."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from hosts import as_root

from benchmarks.cluster import Cluster, end

pytestmark = as_root

PARALLEL = Path(__file__).parents[1] / "parallel"
SCRIPT = PARALLEL / "workers_faults.py"
LAUNCH = PARALLEL / "launch.py"
RANKS = (0, 1)
START_S = 150.0
BOUND_S = 120.0
CUT_S = 5.0


class Job:
    """A rank on each of two hosts."""

    def __init__(
        self, cluster: Cluster, launcher: str, folder: Path, steps: int, timeout_s: float
    ) -> None:
        self._cluster, self.folder = cluster, folder
        self._log = folder / "log"
        command = [sys.executable, str(LAUNCH), "-np", "2", "-H", "h1:1,h2:1", f"--{launcher}"]
        command += [sys.executable, str(SCRIPT), str(folder), "pipe-sgd", "", str(steps)]
        with self._log.open("wb") as log:
            self.launched = cluster.popen(
                "h1",
                command,
                env={"HVD_PIPE_TIMEOUT": str(timeout_s), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def steps(self) -> int:
        """How many steps every rank has taken, to ten."""
        files = [self.folder / f"step.{rank}" for rank in RANKS]
        return min(int(f.read_text()) if f.exists() else 0 for f in files)

    def train(self, steps: int, bound_s: float) -> None:
        goal = self.steps() + steps
        self.wait_for(lambda: self.steps() >= goal, bound_s)

    def ended(self) -> bool:
        """Whether the launcher and all that it has started are gone, on both hosts."""
        return self.launched.poll() is not None and not self.processes()

    def processes(self) -> list[str]:
        """All that run on the hosts, but for the ends of idle sessions: a cut link keeps those."""
        inits = self._cluster._inits.values()
        hosts = {Path(f"/proc/{init}/ns/pid").readlink() for init in inits}
        found = []
        for one in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                name = (one / "comm").read_text(errors="replace").strip()
                of_a_rank = str(self.folder).encode() in (one / "cmdline").read_bytes()
                idle = name.startswith("ssh") and not of_a_rank  # sshd, and ssh for an orted
                if (one / "ns" / "pid").readlink() in hosts and not idle:
                    found.append(f"{name} {one.name}")
        return found

    def wait_for(self, true: Callable[[], bool], bound_s: float = BOUND_S) -> None:
        deadline = time.monotonic() + bound_s
        while not true():
            left = f"{bound_s} s are over. Running: {self.processes()}. Output:\n{self.output}"
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


@contextmanager
def job(
    launcher: str, folder: Path, steps: int = 1_000_000, timeout_s: float = 16.0
) -> Iterator[tuple[Cluster, Job]]:
    with Cluster(2) as cluster:
        for host in cluster.hosts:
            # TCP, and with it mpirun and ssh, give a host up after 25 s, not a quarter of an hour.
            cluster.run(host, ["sysctl", "-w", "net.ipv4.tcp_retries2=6"], check=True)
        one = Job(cluster, launcher, folder, steps, timeout_s)
        try:
            one.train(30, START_S)
            yield cluster, one
        finally:
            end(one.launched)


@pytest.mark.parametrize("launcher", ["mpi", "gloo"])
def test_a_link_that_is_cut_and_healed_costs_time_only(launcher: str, tmp_path: Path) -> None:
    with job(launcher, tmp_path, steps=600, timeout_s=120.0) as (cluster, one):
        cluster.cut("h2")
        before = one.steps()
        time.sleep(CUT_S)
        assert one.steps() <= before + 20
        cluster.heal("h2")
        one.wait_for(one.ended)
        assert one.launched.returncode == 0, one.output
    first, second = (torch.load(tmp_path / f"end.{rank}") for rank in RANKS)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("launcher", ["mpi", "gloo"])
def test_a_link_that_stays_cut_ends_the_job(launcher: str, tmp_path: Path) -> None:
    with job(launcher, tmp_path) as (cluster, one):
        cluster.cut("h2")
        one.wait_for(one.ended)
        assert one.launched.returncode != 0
        assert "lost: rank 1 on h2" in one.output, one.output
    assert torch.load(tmp_path / "checkpoint.pt")["step"] >= 20


def test_a_host_that_is_switched_off_ends_the_job(tmp_path: Path) -> None:
    with job("gloo", tmp_path) as (cluster, one):
        cluster.power_off("h2")
        one.wait_for(one.ended)
        assert one.launched.returncode != 0
        # The launcher's ssh may be the first to notice, and end the rest before a rank can speak.
        assert "rank 1 on h2" in one.output or "Process name: 1" in one.output, one.output
    assert torch.load(tmp_path / "checkpoint.pt")["step"] >= 20
