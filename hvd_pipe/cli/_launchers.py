"""Rows of the doctor for a job of Slurm and a pod of Kubernetes: what it was given there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from hvd_pipe.cli._checks import Row

__all__ = ["cpu_limit", "kubernetes_rows", "launcher_rows", "slurm_rows", "tasks_here"]

_MIB = 2**20
_LEAST_SHARED = 64 * _MIB  # what a container has at /dev/shm unless told otherwise
_INTERACTIVE = "4294967290"  # the step in which salloc starts a shell


def launcher_rows(environment: Mapping[str, str], cores: int) -> list[Row]:
    """Rows for Slurm and Kubernetes, where this process runs in one of them."""
    rows = []
    if "SLURM_JOB_ID" in environment:
        rows += slurm_rows(environment, cores)
    if "KUBERNETES_SERVICE_HOST" in environment:
        memory = os.statvfs("/dev/shm")
        shared = memory.f_blocks * memory.f_frsize
        rows += kubernetes_rows(environment, cores, shared, cpu_limit())
    return rows


def slurm_rows(environment: Mapping[str, str], cores: int) -> list[Row]:
    """Rows for the nodes, tasks and cores of a job, in its batch script or under srun."""
    step = environment.get("SLURM_STEP_ID", _INTERACTIVE) != _INTERACTIVE
    nodes = _number(environment.get("SLURM_JOB_NUM_NODES"))
    here = tasks_here(environment, 1)
    name = f"job {environment['SLURM_JOB_ID']}"
    if not step:
        found = f"{_count(nodes, 'node')}, {_count(here, 'task')} on this one"
        todo = ""
        if here == 1:
            todo = "for more ranks on a node: sbatch --ntasks-per-node=..., or horovodrun --gloo"
        return [Row("Slurm", name, None, found, todo), _cores_of_node(environment, cores, here)]
    tasks = _number(environment.get("SLURM_STEP_NUM_TASKS"))
    pmix = "PMIX_RANK" in environment
    found = f"{_count(tasks, 'task')} under srun, {'with' if pmix else 'without'} PMIx"
    todo = "run hvd-pipe doctor in the batch script, without srun: it starts ranks of its own"
    if tasks > 1 and not pmix:
        todo = "srun --mpi=pmix makes the tasks ranks of one job; so does horovodrun without srun"
    return [Row("Slurm", name, False, found, todo), _cores_of_task(environment, cores)]


def _cores_of_node(environment: Mapping[str, str], cores: int, tasks: int) -> Row:
    """The row for the cores that all ranks share which a batch script starts on its node."""
    needed = tasks * _number(environment.get("SLURM_CPUS_PER_TASK"))
    good = cores >= needed and (cores > 1 or "SLURM_NTASKS" in environment)
    todo = "" if good else "a core for each rank: sbatch --ntasks-per-node=... --cpus-per-task=..."
    return Row("Slurm", "cores", good, f"{_count(cores, 'core')} for the ranks of a node", todo)


def _cores_of_task(environment: Mapping[str, str], cores: int) -> Row:
    asked = _number(environment.get("SLURM_CPUS_PER_TASK"))
    good = cores >= asked
    todo = "" if good else f"srun --cpus-per-task={asked}: srun does not take it from sbatch"
    found = f"{_count(cores, 'core')} for this task, {asked} asked for"
    return Row("Slurm", "cores", good, found, todo)


def tasks_here(environment: Mapping[str, str], default: int) -> int:
    """Return how many ranks mpirun starts on a node of a job of Slurm; ``default`` outside one."""
    return _number(environment.get("SLURM_TASKS_PER_NODE"), default)


def kubernetes_rows(
    environment: Mapping[str, str], cores: int, shared: int, limit: float | None
) -> list[Row]:
    """Rows for a pod's shared memory and processors."""
    enough = shared > _LEAST_SHARED
    todo = "" if enough else "mount an emptyDir with medium: Memory there: data loaders use it"
    rows = [Row("Kubernetes", "/dev/shm", enough, f"{shared // _MIB} MiB", todo)]
    if limit is None:
        return [*rows, Row("Kubernetes", "cores", True, f"{cores}, no limit")]
    threads = _number(environment.get("OMP_NUM_THREADS"), cores)
    good = threads <= max(1, limit)
    found = f"a limit of {limit:g}, {_count(threads, 'thread')}"
    todo = "" if good else f"OMP_NUM_THREADS={max(1, int(limit))}, or less with several ranks"
    return [*rows, Row("Kubernetes", "cores", good, found, todo)]


def cpu_limit(folder: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return how many cores the control group may keep busy; None for no limit."""
    new, old = folder / "cpu.max", folder / "cpu"
    if new.is_file():
        quota, period = new.read_text().split()
    elif (old / "cpu.cfs_quota_us").is_file():
        quota = (old / "cpu.cfs_quota_us").read_text()
        period = (old / "cpu.cfs_period_us").read_text()
    else:
        return None
    return None if quota == "max" or int(quota) < 0 else int(quota) / int(period)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _number(text: str | None, default: int = 1) -> int:
    """Return the number that a variable begins with, such as the 2 of ``2(x3),1``."""
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else default
