#!/usr/bin/env python3
r"""A Slurm cluster whose nodes are the emulated hosts of cluster.py.

    sudo python benchmarks/slurm.py --hosts 2 -- sbatch --wait docs/launching/slurm_srun.sh \
        python torch_examples/digits.py

The command runs on h1, where slurmctld runs, too. Each host has a munged and a slurmd. They are
Debian's, and read a configuration of their own, not /etc/slurm. Sockets and states are in each
host's own /run. So the machine's own Slurm, if there is one, is not touched, and everything ends
with the hosts.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, os.fspath(Path(__file__).resolve().parents[1]))
from benchmarks.cluster import SBIN, Cluster, ClusterError, end, environment, exit_status

START_S = 120.0  # until all nodes must be idle
POLL_S = 0.3
GOING_ON = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}
TOOLS = {
    "munged": "munge",
    "sbatch": "slurm-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
}

# Times are generous, as all hosts share the machine's cores. config_overrides: a host may promise
# more processors than the machine has.
CONFIGURATION = """\
ClusterName=emulated
SlurmctldHost={first}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=/run/slurmctld
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MessageTimeout=100
BatchStartTimeout=100
SlurmdTimeout=300
ReturnToService=2
NodeName={nodes} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""

MUNGED = """
mkdir -m 755 /run/munge
exec munged --foreground --key-file={key} --seed-file=/run/munge/seed
"""
AFTER_MUNGED = "until [ -S /run/munge/munge.socket.2 ]; do sleep 0.1; done; exec"


class Slurm:
    """Slurm on the hosts of a cluster, which are its nodes: see `start_slurm`."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which Slurm's commands find this cluster."""
        return {"SLURM_CONF": f"{self._folder}/slurm.conf"}

    def run(
        self, command: Sequence[str], *, timeout: float | None = None, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host, as ``Cluster.run`` does."""
        host = self._cluster.hosts[0]
        return self._cluster.run(host, command, env=self.environment, timeout=timeout, check=check)

    def submit(self, command: Sequence[str], output: Path) -> str:
        """Submit a batch script with its arguments; return the number of the job."""
        sbatch = ["sbatch", "--parsable", f"--output={output}", *command]
        return self.run(sbatch, timeout=START_S, check=True).stdout.strip()

    def wait(self, job: str, timeout: float) -> str:
        """Wait until a job has ended and return its state; ``sbatch --wait`` looks less often."""
        deadline = time.monotonic() + timeout
        show = ["scontrol", "--oneliner", "show", "job", job]
        while (state := self._field(show, "JobState")) in GOING_ON:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is {state} after {timeout} s.\n{self._logs()}")
            time.sleep(POLL_S)
        return state

    def _field(self, show: Sequence[str], name: str) -> str:
        words = self.run(show, timeout=START_S, check=True).stdout.split()
        return next(word for word in words if word.startswith(f"{name}=")).partition("=")[2]

    def wait_for_nodes(self) -> None:
        """Wait until jobs can start on every node."""
        deadline = time.monotonic() + START_S
        ask = ["sinfo", "--noheader", "--Node", "--format=%t"]
        idle = ["idle"] * len(self._cluster.hosts)
        while (answer := self.run(ask, timeout=2 * START_S).stdout).split() != idle:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the nodes are not idle within {START_S:.0f} s. "
                    f"sinfo says: {answer.strip()}\n{self._logs()}"
                )
            time.sleep(POLL_S)

    def _logs(self) -> str:
        """Return the ends of what the daemons have written."""
        files = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-3000:]}" for f in files)


@contextmanager
def start_slurm(cluster: Cluster, cpus: int = 2) -> Iterator[Slurm]:
    """Run Slurm on the hosts of a cluster for as long as the context lasts."""
    if missing := missing_packages():
        raise ClusterError(f"packages are missing: apt-get install {' '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="slurm-") as made, ExitStack() as ended:
        folder, first = Path(made), cluster.hosts[0]
        _write_files(folder, cluster.hosts, cpus)
        slurm = Slurm(cluster, folder)
        scripts = [(host, MUNGED.format(key=folder / "key")) for host in cluster.hosts]
        scripts += [(first, f"{AFTER_MUNGED} slurmctld -D")]
        scripts += [(host, f"{AFTER_MUNGED} slurmd -D") for host in cluster.hosts]
        for host, script in scripts:
            with (folder / f"{host}.log").open("ab") as log:
                daemon = cluster.popen(
                    host,
                    ["sh", "-c", script],
                    env=slurm.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            ended.callback(end, daemon)
        slurm.wait_for_nodes()
        yield slurm


def _write_files(folder: Path, hosts: Sequence[str], cpus: int) -> None:
    text = CONFIGURATION.format(first=hosts[0], folder=folder, nodes=",".join(hosts), cpus=cpus)
    (folder / "slurm.conf").write_text(text)
    # Hosts share /tmp, where each would make the same folder for its ranks.
    (folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/run\n")
    (folder / "key").touch(mode=0o600)
    (folder / "key").write_bytes(secrets.token_bytes(1024))


def missing_packages() -> list[str]:
    """Return Debian's names of the packages that Slurm lacks here."""
    path = f"{os.environ.get('PATH', os.defpath)}:{SBIN}"
    return [package for tool, package in TOOLS.items() if shutil.which(tool, path=path) is None]


def main() -> int:
    """Run a command, or a shell, on the first node of a Slurm cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2, help="how many nodes (default 2)")
    parser.add_argument("--cpus", type=int, default=2, help="of each node (default 2)")
    parser.add_argument("command", nargs="*", help="runs on h1 (default: a shell)")
    options = parser.parse_args()

    def run() -> int:
        with Cluster(options.hosts) as cluster, start_slurm(cluster, options.cpus) as slurm:
            command = options.command or [os.environ.get("SHELL", "sh")]
            variables = environment() | slurm.environment
            return subprocess.call(cluster.command("h1", command), env=variables)

    return exit_status("slurm", run)


if __name__ == "__main__":
    sys.exit(main())
