"""What benchmarks share: where ranks run, how they are launched, waiting, results and tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster import Cluster, ClusterError, environment

# Horovod would find out by importing TensorFlow, at each start, whether it has MPI and Gloo.
HOROVODRUN = (
    "import sys; from horovod.runner import launch; "
    "launch.mpi_built = launch.gloo_built = lambda verbose=False: True; "
    "sys.exit(launch.run_commandline())"
)
SHARED_CORES = {  # ranks of one machine take turns
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


class TooLateError(Exception):
    """Something has not happened in time."""


def wait_for(
    condition: Callable[[], object], bound_s: float, what: str, look_s: float = 0.1
) -> float:
    """Return how many seconds it took until a condition held."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > bound_s:
            raise TooLateError(f"{bound_s:.0f} s are over: {what}")
        time.sleep(look_s)
    return time.monotonic() - begun


# Where ranks run ------------------------------------------------------------------------------


class Here:
    """This machine: all ranks are on it, so no host can be lost."""

    interface = "lo"

    def __init__(self, ranks: int) -> None:
        self.hosts = ["localhost"] * ranks

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def popen(self, words: Sequence[str], env: Mapping[str, str], **io: Any) -> Any:
        """Start a launcher in a session of its own."""
        return subprocess.Popen(words, env=environment() | env, start_new_session=True, **io)

    def launcher(self, kind: str, ranks: int, env: Mapping[str, str]) -> list[str]:
        """Return the words that launch ranks, over "mpi" or "gloo"."""
        local = self.interface == "lo"
        hosts = ["-H", ",".join(f"{host}:1" for host in self.hosts)]
        if kind == "mpi":
            words = ["mpirun", "-np", str(ranks), "--bind-to", "none"]
            words += ["--oversubscribe"] if local else hosts
            passed = ["PATH", *(["PYTHONPATH"] if "PYTHONPATH" in os.environ else []), *env]
            return [*words, *(word for name in passed for word in ("-x", name))]
        words = [sys.executable, "-c", HOROVODRUN, "--gloo", "-np", str(ranks)]
        where = ["-H", f"localhost:{ranks}"] if local else hosts
        return [*words, *where, "--network-interface", self.interface]

    def marked(self, mark: str) -> dict[int, str]:
        """Return the processes with a variable ``NAME=value``, and their commands."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # ended meanwhile, or another user's
                if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = command_of(int(folder.name))
        return {pid: words for pid, words in found.items() if lives(pid)}

    def outside(self, pid: int, host: str) -> int:
        """Return the number here of a host's process."""
        return pid


class Hosts(Here):
    """Emulated hosts, one a rank; the launcher is on the first one."""

    interface = "eth0"

    def __init__(self, ranks: int, rate: str | None = None) -> None:
        self.cluster = Cluster(ranks, rate)
        self.hosts = self.cluster.hosts

    def __enter__(self) -> Hosts:
        self.cluster.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.cluster.__exit__(None, None, None)

    def popen(self, words: Sequence[str], env: Mapping[str, str], **io: Any) -> Any:
        return self.cluster.popen(self.hosts[0], words, env=env, **io)

    def marked(self, mark: str) -> dict[int, str]:
        """Return all processes of the hosts: whatever is there belongs to the job."""
        pids = [pid for host in self.hosts for pid in self.cluster.processes(host)]
        return {pid: command_of(pid) for pid in pids if lives(pid)}

    def outside(self, pid: int, host: str) -> int:
        for process in self.cluster.processes(host):
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{process}/status").read_text().splitlines()
                numbers = next(line for line in lines if line.startswith("NSpid:")).split()
                if int(numbers[-1]) == pid:
                    return process
        return 0


def command_of(pid: int) -> str:
    """Return a process's command, or its name."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return words[:200] or Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def lives(pid: int) -> bool:
    """Whether a process has not ended; a zombie has."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def signal_to(pid: int, number: int) -> None:
    if pid > 0:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def run_here(
    words: Sequence[str], ranks: int, launcher: str = "gloo", env: Mapping[str, str] | None = None
) -> None:
    """Run a Python script with its arguments on ranks of this machine, to its end."""
    variables = {**SHARED_CORES, **(env or {})}
    place = Here(ranks)
    command = [*place.launcher(launcher, ranks, variables), sys.executable, *words]
    process = place.popen(command, variables)
    try:
        code = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def run_on(
    cluster: Cluster,
    words: Sequence[str],
    launcher: str,
    env: Mapping[str, str] | None = None,
    per_host: int = 1,
) -> dict[str, Any]:
    """Run a script, with ``--rank FOLDER``, as ranks on each host; return its files of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        hosts = ",".join(f"{host}:{per_host}" for host in cluster.hosts)
        ranks = str(per_host * len(cluster.hosts))
        job = ["horovodrun", "-np", ranks, "-H", hosts, f"--{launcher}"]
        command = [*job, sys.executable, *words, "--rank", folder]
        done = cluster.run(cluster.hosts[0], command, env=env, timeout=600)
        if done.returncode:
            raise ClusterError(f"the job failed:\n{done.stdout}")
        return {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("*.json")}


# Results --------------------------------------------------------------------------------------


def write_json(path: Path, value: Any, indent: int | None = 1) -> None:
    """Write JSON that a reader sees whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=indent) + "\n")
    part.replace(path)


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
