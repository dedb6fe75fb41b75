#!/usr/bin/env python3
"""Kill, stop and cut off ranks and hosts at random, again and again, and check all that is left.

    sudo python benchmarks/kill_loop.py --seed 1 --faults 200 --json kill-loop.json
    python benchmarks/kill_loop.py --local --faults 2 --strategies cocod:period=4 --modes restart

A job trains on emulated hosts (`cluster.py`), or on this machine (`--local`, which needs no root).
Something happens to a rank or to a host. In the mode "restart", all ranks must end by themselves
and say whose fault it was, nothing may remain, and the job starts again from the last checkpoint.
In the mode "elastic", it must go on by itself. At the end the weights must be those of a run to
which nothing has happened. The exit status is 1 where anything went wrong.

Runs that the file of results has already are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kill_loop_check as check
from cluster import Cluster, ClusterError, end, environment
from kill_loop_check import Fault, Outcome, Run
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
RANK = HERE / "kill_loop_rank.py"
STRATEGIES = {
    "restart": (
        "merged-gradient:plan=wfbp",
        "merged-gradient:plan=wfbp,overlap=forward",
        "pipe-sgd:bucket_bytes=1024",
        "cocod:period=4",
        "pipe-sgd:bucket_bytes=1024+int8",
        "pipedream:stash",
        "cocod:period=4,fragments=4,outer=nesterov",
        "cocod:period=4,fragments=4,within=node",
    ),
    "elastic": (
        "merged-gradient:plan=wfbp",
        "merged-gradient:plan=wfbp,overlap=forward",
        "pipe-sgd:bucket_bytes=1024",
        "cocod:period=4",
    ),
}
LR = 2.0**-6  # of elastic jobs
START_S = 300.0  # until a job trains, on a machine that is busy
PATIENCE_S = 180.0  # until all ranks of a job have ended, or train again
FINISH_S = 600.0  # for a run that nothing disturbs
SETTLE_S = 60.0  # until launchers, and what carried their words, have ended
GLOO_S = {"restart": 120.0, "elastic": 300.0}  # new workers must have started by then
RETRIES = "6"  # TCP, and with it mpirun and ssh, give a host up after 25 s, not 16 minutes
# With "1 2", hosts came back before Horovod had counted their workers as lost: it started no new
# ones, and the others waited for them for ever.
COOLDOWN_S = ("8", "10")
STEP_S = 0.04
MARK = "KILL_LOOP_FOLDER"

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMPI_MCA_btl": "^openib",
    "HOROVOD_STALL_CHECK_DISABLE": "1",
}
# Horovod would find out by importing TensorFlow, at each start, whether it has MPI and Gloo.
HOROVODRUN = (
    "import sys; from horovod.runner import launch; "
    "launch.mpi_built = launch.gloo_built = lambda verbose=False: True; "
    "sys.exit(launch.run_commandline())"
)


class TooLateError(Exception):
    """Something has not happened in time."""


def wait_for(true: Callable[[], object], bound_s: float, what: str, look_s: float = 0.1) -> float:
    """Return how many seconds it took until something became true."""
    begun = time.monotonic()
    while not true():
        if time.monotonic() - begun > bound_s:
            raise TooLateError(f"{bound_s:.0f} s are over: {what}")
        time.sleep(look_s)
    return time.monotonic() - begun


# Where a job runs -------------------------------------------------------------------------------


class Here:
    """This machine: all ranks are on it, so no host can be lost."""

    kinds_left_out = ("kill host", *check.ON_HOSTS)

    def __init__(self, ranks: int) -> None:
        self.hosts = ["localhost"] * ranks
        self.interface = "lo"

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def popen(self, words: Sequence[str], env: dict[str, str], log: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(
            words,
            env=environment() | env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def discovered(self) -> list[str]:
        """Names of hosts for a discovery script: one host's names are hosts to Horovod."""
        return ["localhost", "LOCALHOST", "127.0.0.1"][: len(self.hosts)]

    def processes(self, folder: Path) -> dict[int, str]:
        """Return the processes of a job, and their commands."""
        mark = f"{MARK}={folder}".encode()
        found = {}
        for one in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # ended meanwhile, or another user's
                if mark in (one / "environ").read_bytes().split(b"\0"):
                    found[int(one.name)] = command_of(int(one.name))
        return living(found)

    def outside(self, pid: int, host: str) -> int:
        """Return a process's number here."""
        return pid

    def change(self, fault: Fault, host: str, *, heal: bool = False) -> None:
        raise NotImplementedError(f"{fault.kind} needs hosts")


class Hosts(Here):
    """Emulated hosts, one a rank; the launcher is on the first one."""

    kinds_left_out = ()

    def __init__(self, ranks: int) -> None:
        self.cluster = Cluster(ranks)
        self.hosts = self.cluster.hosts
        self.interface = "eth0"

    def __enter__(self) -> Hosts:
        self.cluster.__enter__()
        for host in self.hosts:
            self.cluster.run(
                host, ["sysctl", "-w", f"net.ipv4.tcp_retries2={RETRIES}"], check=True
            )
        return self

    def __exit__(self, *error: object) -> None:
        self.cluster.__exit__(None, None, None)

    def popen(self, words: Sequence[str], env: dict[str, str], log: Any) -> subprocess.Popen[Any]:
        return self.cluster.popen(
            self.hosts[0],
            words,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def discovered(self) -> list[str]:
        return self.hosts

    def processes(self, folder: Path) -> dict[int, str]:
        numbers = [pid for host in self.hosts for pid in self.cluster.processes(host)]
        return living({pid: command_of(pid) for pid in numbers})

    def outside(self, pid: int, host: str) -> int:
        for one in self.cluster.processes(host):
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{one}/status").read_text().splitlines()
                numbers = next(line for line in lines if line.startswith("NSpid:")).split()
                if int(numbers[-1]) == pid:
                    return one
        return 0

    def change(self, fault: Fault, host: str, *, heal: bool = False) -> None:
        """Let a fault happen to a host, or be over."""
        if fault.kind == "cut":
            (self.cluster.heal if heal else self.cluster.cut)(host)
        elif not heal:
            for pid in self.cluster.processes(host):
                signal_to(pid, signal.SIGKILL)


def command_of(pid: int) -> str:
    """Return a process's command, or its name."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return words[:200] or Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def lives(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has asked for its status has."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def living(processes: dict[int, str]) -> dict[int, str]:
    return {pid: words for pid, words in processes.items() if lives(pid)}


def signal_to(pid: int, number: int) -> None:
    if pid > 0:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


# One start of a job -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One run: under which mode, launcher and strategy, and how."""

    mode: str
    launcher: str
    strategy: str
    seed: int
    faults: int
    ranks: int
    pause: tuple[float, float]
    watch_s: float
    local: bool

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.launcher}, {self.strategy}"

    @property
    def settings(self) -> dict[str, Any]:
        """What two runs of one name may differ in."""
        return {
            "seed": self.seed,
            "faults": self.faults,
            "ranks": self.ranks,
            "pause": list(self.pause),
            "watch_s": self.watch_s,
            "hosts": not self.local,
        }

    @property
    def every(self) -> int:
        """Steps between two checkpoints, or commits; a pipeline's step is an epoch."""
        return 1 if self.strategy.startswith("pipedream") else 10


class Job:
    """A job from its start to its end; nothing of it outlives the context."""

    def __init__(
        self, place: Here, cell: Cell, folder: Path, number: int, start: int, stop: int
    ) -> None:
        self.place, self.cell = place, cell
        self.folder = folder / f"job-{number}"
        self.folder.mkdir(parents=True)
        task = {
            "folder": str(folder),
            "job": number,
            "strategy": cell.strategy,
            "seed": cell.seed,
            "start": start,
            "stop": stop,
            "every": cell.every,
            "pause_s": 0.0 if stop else STEP_S,
            "elastic": cell.mode == "elastic",
        }
        env = {**ENVIRONMENT, MARK: str(self.folder), "HVD_PIPE_TIMEOUT": str(cell.watch_s)}
        env["HOROVOD_GLOO_TIMEOUT_SECONDS"] = f"{GLOO_S[cell.mode]:.0f}"
        words = [*self._launcher(env), sys.executable, str(RANK), json.dumps(task)]
        with (self.folder / "log").open("wb") as log:
            self.launched = place.popen(words, env, log)
        self.pids: dict[int, int] = {}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def clear(self) -> list[str]:
        """End what is left of the job; return what that was. Ranks say where they are."""
        left = self.left()
        ranks = [pid for pid in self.pids.values() if pid in left]
        for pid in ranks:
            signal_to(pid, signal.SIGUSR2)
        time.sleep(1.0 if ranks else 0.0)
        end(self.launched)
        for pid in left:
            signal_to(pid, signal.SIGKILL)
        return [f"{pid}: {words}" for pid, words in left.items()]

    def _launcher(self, env: dict[str, str]) -> list[str]:
        place, ranks = self.place, self.cell.ranks
        hosts = ",".join(f"{host}:1" for host in place.hosts)
        if self.cell.launcher == "mpi":
            words = ["mpirun", "-np", str(ranks), "--bind-to", "none"]
            words += ["--oversubscribe"] if place.interface == "lo" else ["-H", hosts]
            passed = ["PATH", *(["PYTHONPATH"] if "PYTHONPATH" in os.environ else []), *env]
            return [*words, *(word for name in passed for word in ("-x", name))]
        words = [sys.executable, "-c", HOROVODRUN, "--gloo", "-np", str(ranks)]
        words += ["--network-interface", place.interface]
        if self.cell.mode == "restart":
            return words + ([] if place.interface == "lo" else ["-H", hosts])
        script = self.folder / "discover.sh"
        names = "\\n".join(f"{host}:1" for host in place.discovered())
        script.write_text(f"#!/bin/sh\nprintf '{names}\\n'\n")
        script.chmod(0o755)
        return [
            *words,
            *("--min-np", "1", "--max-np", str(ranks), "--blacklist-cooldown-range", *COOLDOWN_S),
            *("--host-discovery-script", str(script)),
        ]

    def left(self) -> dict[int, str]:
        """Return the processes of the job that live."""
        return self.place.processes(self.folder)

    def said(self) -> str:
        """Return what the launcher and the ranks have said."""
        files = [self.folder / "log", *sorted(self.folder.glob("said.*"))]
        return "\n".join(file.read_text(errors="replace") for file in files)

    def step(self, rank: int) -> int:
        """Return the step that a rank has taken last; -1 for none."""
        file = self.folder / f"step.{rank}"
        return int(file.read_text()) if file.exists() else -1

    def trains(self) -> bool:
        """Whether all ranks have taken a step."""
        self.alive()
        return min(map(self.step, range(self.cell.ranks))) >= 0

    def alive(self) -> None:
        """Raise where the launcher has ended, though nobody has asked for that."""
        if self.launched.poll() is not None:
            raise TooLateError(f"the job has ended by itself: status {self.launched.returncode}")

    def find_ranks(self) -> None:
        """Learn the ranks' processes."""
        for rank in range(self.cell.ranks):
            who = json.loads((self.folder / f"pid.{rank}").read_text())
            self.pids[rank] = self.place.outside(who["pid"], who["host"])

    def have_ended(self) -> bool:
        return not any(map(lives, self.pids.values()))

    def where(self) -> str:
        """Return which system call each thread of the ranks that live is in."""
        found = []
        for rank, pid in self.pids.items():
            for task in Path(f"/proc/{pid}/task").glob("*"):
                with suppress(OSError):
                    words = [(task / name).read_text().strip() for name in ("comm", "wchan")]
                    found.append(f"rank {rank}, thread {task.name}: {' '.join(words)}")
        return "\n".join(found)

    def happen(self, fault: Fault, rank: int) -> None:
        """Let a fault happen to a rank, or to its host."""
        if fault.kind == "kill":
            signal_to(self.pids[rank], signal.SIGKILL)
        elif fault.kind == "stop":
            signal_to(self.pids[rank], signal.SIGSTOP)
        elif fault.kind == "raise":
            (self.folder / f"raise.{rank}").touch()
        else:
            self.place.change(fault, self.place.hosts[rank])


# Runs -------------------------------------------------------------------------------------------

Report = Callable[[Outcome], None]


def spoken(job: Job, outcome: Outcome) -> Outcome:
    """Add what was said, and to whom it points."""
    said = job.said()
    pairs = check.named_by_ranks(said)
    wrong = check.misnamed(pairs, outcome.victims, outcome.kind == "cut")
    found = replace(
        outcome,
        by_ranks=sorted({named for _, named in pairs}),
        by_launcher=sorted(check.named_by_launcher(said, job.place.hosts)),
        misnamed=[list(pair) for pair in wrong],
    )
    return replace(found, said=f"{said[-9000:]}\n{outcome.said}" if found.wrong() else "")


def restart_once(
    place: Here, cell: Cell, folder: Path, fault: Fault, start: int
) -> tuple[Outcome, int]:
    """Run a job until a fault and its end; return that, and the newest checkpoint of all ranks."""
    rank = fault.rank
    victims = [rank]
    outcome = Outcome("none", [], fault.after_s, start, None, [], [], load=os.getloadavg()[0])
    with Job(place, cell, folder, fault.number, start, 0) as job:
        try:
            wait_for(job.trains, START_S, "the job has not started")
            job.find_ranks()
            time.sleep(fault.after_s)
            job.alive()
        except TooLateError as error:
            return replace(outcome, said=f"{error}\n{job.said()[-6000:]}"), newest(cell, folder)
        outcome = replace(outcome, kind=fault.kind, victims=victims)
        job.happen(fault, rank)
        with suppress(TooLateError):
            seconds = wait_for(job.have_ended, PATIENCE_S, "ranks have not ended")
            outcome = replace(outcome, ended_s=round(seconds, 2))
        if fault.kind == "cut":
            place.change(fault, place.hosts[rank], heal=True)
        with suppress(TooLateError):
            wait_for(lambda: job.launched.poll() is not None, SETTLE_S, "the launcher")
            wait_for(lambda: not job.left(), SETTLE_S, "processes", 0.5)
        where = job.where()
        outcome = replace(outcome, left=job.clear(), said=where)
        return spoken(job, outcome), newest(cell, folder)


def newest(cell: Cell, folder: Path) -> int:
    """Return the newest step of which every rank has what it needs; 0 for none."""
    each = cell.strategy.startswith("cocod") or "+" in cell.strategy
    found = [
        {int(path.name.split(".")[0][5:]) for path in folder.glob(f"step-*.rank{rank}.pt")}
        for rank in range(cell.ranks if each else 1)
    ]
    return max(set.intersection(*found), default=0)


def finish(place: Here, cell: Cell, folder: Path, number: int, start: int, stop: int) -> list[str]:
    """Train from a checkpoint to the last step; return why that failed, if it did."""
    with Job(place, cell, folder, number, start, stop) as job:
        with suppress(TooLateError):
            wait_for(lambda: job.launched.poll() is not None, FINISH_S, "it has not finished")
        code = job.launched.poll()
        return [] if code == 0 else [f"{folder.name}: status {code}\n{job.said()[-3000:]}"]


def run_restarts(place: Here, cell: Cell, folder: Path, report: Report) -> Run:
    """Let a run's faults happen, finish it, and compare it with one that nothing disturbs."""
    begun = time.monotonic()
    kinds = [kind for kind in check.KINDS["restart"] if kind not in place.kinds_left_out]
    outcomes, step = [], 0
    disturbed, whole = folder / "disturbed", folder / "whole"
    for fault in check.schedule(cell.seed, cell.name, cell.faults, kinds, cell.ranks, cell.pause):
        outcome, step = restart_once(place, cell, disturbed, fault, step)
        outcomes.append(outcome)
        report(outcome)
    stop = step + 3 * cell.every + 1 - (cell.every == 1)
    # Without a fault under this launcher on as many ranks: others may add up in another order.
    unequal = finish(place, cell, disturbed, cell.faults + 1, step, stop)
    if (disturbed / "plan.json").exists():
        whole.mkdir()
        (whole / "plan.json").write_text((disturbed / "plan.json").read_text())
    unequal += finish(place, cell, whole, 0, 0, stop)
    compared = 0
    for rank in range(1 if cell.strategy.startswith("pipedream") else cell.ranks):
        paths = (disturbed / f"digests.{rank}", whole / f"digests.{rank}")
        texts = [path.read_text() if path.exists() else "" for path in paths]
        count, wrong = check.unequal_digests(*texts)
        compared += count
        unequal += [f"rank {rank}, step {each}" for each in wrong]
    seconds = round(time.monotonic() - begun, 1)
    return Run(cell.name, cell.settings, outcomes, compared, unequal, 0.0, [], seconds)


class Elastic:
    """An elastic job, as its log and its processes show it."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def log(self) -> list[dict[str, Any]]:
        file = self.job.folder / "log.jsonl"
        return (
            [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        )

    def is_full(self) -> bool:
        """Whether all ranks train; learns their processes, and whose host each is on."""
        self.job.alive()
        last = {line["who"]: line for line in self.log() if "start" in line}
        self.hosts, pids = {}, {}
        for who, line in last.items():
            host, _, pid = who.rpartition("-")
            number = self.job.place.outside(int(pid), host)
            if line["size"] == self.job.cell.ranks and lives(number):
                pids[line["rank"]], self.hosts[line["rank"]] = number, host
        self.job.pids = pids
        return len(pids) == self.job.cell.ranks and self.steps_on(pids)

    def born_as(self, rank: int) -> int:
        """Return the rank that a process was started as, by which its launcher knows it."""
        mine = [line["who"] for line in self.log() if "start" in line and line["rank"] == rank]
        return next(line["rank"] for line in self.log() if line["who"] == mine[-1])  # type: ignore[no-any-return]

    def steps_on(self, ranks: dict[int, int]) -> bool:
        begun = max(line["start"] for line in self.log() if "start" in line)
        return all(self.job.step(rank) > begun for rank in ranks)

    def started_since(self, moment: float) -> dict[str, Any] | None:
        """Return the first start of training after a moment."""
        self.job.alive()
        starts = [line for line in self.log() if "start" in line and line["rank"] == 0]
        return next((line for line in starts if line["time"] > moment), None)


def elastic_once(elastic: Elastic, fault: Fault) -> Outcome:
    """Let a fault happen when all ranks train; return when they trained again."""
    job, place = elastic.job, elastic.job.place
    rank = fault.rank
    outcome = Outcome("none", [], fault.after_s, 0, None, [], [], load=os.getloadavg()[0])
    log = job.folder / "log"
    before = log.stat().st_size
    try:
        wait_for(elastic.is_full, START_S, "not all ranks train", 0.5)
        time.sleep(fault.after_s)
        wait_for(elastic.is_full, START_S, "not all ranks train", 0.5)
        if fault.kind == "kill host" and elastic.hosts[rank] == place.hosts[0]:
            rank = (rank + 1) % job.cell.ranks  # not the launcher's host
        host = elastic.hosts[rank]
        outcome = replace(outcome, kind=fault.kind, victims=[elastic.born_as(rank)])
        moment = time.time()
        if fault.kind == "kill host":
            place.change(fault, host)
        else:
            job.happen(fault, rank)
        wait_for(lambda: elastic.started_since(moment), PATIENCE_S, "nobody trains")
        start = elastic.started_since(moment)
        assert start is not None
        outcome = replace(outcome, step=start["start"], ended_s=round(start["time"] - moment, 2))
    except TooLateError as error:
        return replace(outcome, said=f"{error}\n{job.said()[-6000:]}")
    with suppress(TooLateError):
        wait_for(lambda: log.stat().st_size > before, SETTLE_S, "the launcher's words")
    said = log.read_bytes()[before:].decode(errors="replace")
    told = check.named_by_launcher(said, [])
    outcome = replace(outcome, by_launcher=sorted(told))
    return outcome if not outcome.wrong() else replace(outcome, said=said[-6000:])


def run_elastic(place: Here, cell: Cell, folder: Path, report: Report) -> Run:
    """Let a run's faults happen to one elastic job."""
    begun = time.monotonic()
    kinds = [kind for kind in check.KINDS["elastic"] if kind not in place.kinds_left_out]
    outcomes = []
    with Job(place, cell, folder, 0, 0, 0) as job:
        elastic = Elastic(job)
        for fault in check.schedule(
            cell.seed, cell.name, cell.faults, kinds, cell.ranks, cell.pause
        ):
            outcomes.append(elastic_once(elastic, fault))
            report(outcomes[-1])
            if job.launched.poll() is not None:
                break
        with suppress(TooLateError, ValueError):
            wait_for(elastic.is_full, START_S, "not all ranks train", 0.5)
            (job.folder / "stop.part").write_text(str(job.step(0) + 200))
            (job.folder / "stop.part").rename(job.folder / "stop")
        with suppress(TooLateError):
            wait_for(lambda: job.launched.poll() is not None, SETTLE_S, "the launcher")
            wait_for(lambda: not job.left(), SETTLE_S, "processes", 0.5)
        left, log = job.clear(), elastic.log()
    compared, unequal, largest = check.unequal_commits(log, cell.strategy, cell.seed, LR)
    grown = check.grown_files(log) + [f"left behind: {each}" for each in left]
    seconds = round(time.monotonic() - begun, 1)
    return Run(cell.name, cell.settings, outcomes, compared, unequal, largest, grown, seconds)


# All of it --------------------------------------------------------------------------------------


def wanted(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Return the mode, launcher and strategy of each run that is asked for."""
    found = []
    for mode in options.modes:
        launchers = itertools.cycle(options.launchers if mode == "restart" else ["gloo"])
        known = [each for each in STRATEGIES[mode] if each in (options.strategies or [each])]
        found += [(mode, launcher, strategy) for strategy, launcher in zip(known, launchers)]  # noqa: B905
    return found


def cells(options: argparse.Namespace) -> list[Cell]:
    """Return the runs that are asked for; each has its share of the faults."""
    found = wanted(options)
    share, rest = divmod(options.faults, len(found))
    return [
        Cell(
            *each,
            options.seed,
            share + (number < rest),
            options.ranks,
            tuple(options.pause),
            options.watch,
            options.local,
        )
        for number, each in enumerate(found)
    ]


class Results:
    """The file of results."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        self.runs: dict[str, Run] = {}
        self._about = {
            "versions": {name: version(name) for name in ("hvd-pipe", "horovod", "torch")}
            | {"python": platform.python_version(), "kernel": platform.release()},
            "cores": os.cpu_count(),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        }
        self._read()

    def has(self, cell: Cell) -> bool:
        """Whether this very run is there."""
        return cell.name in self.runs and self.runs[cell.name].settings == cell.settings

    def add(self, run: Run) -> None:
        """Keep a run."""
        with self._lock:
            self._read()  # another kill loop may have added to it
            self.runs[run.name] = run
            if self._path is not None:
                data = {**self._about, "runs": {n: asdict(r) for n, r in self.runs.items()}}
                part = self._path.with_suffix(".part")
                text = json.dumps(data, indent=1).replace(f"{HERE.parent}/", "")
                part.write_text(text.replace(f"{Path.home()}/", "~/") + "\n")
                part.replace(self._path)

    def _read(self) -> None:
        if self._path is not None and self._path.exists():
            runs = json.loads(self._path.read_text())["runs"]
            self.runs |= {name: Run.read(run) for name, run in runs.items()}


@contextmanager
def folder_of(options: argparse.Namespace, cell: Cell) -> Iterator[Path]:
    """A folder for a run's files: a new one that goes with it, unless it is asked for."""
    if options.folder is None:
        with tempfile.TemporaryDirectory(prefix="kill-loop-") as name:
            yield Path(name)
    else:
        name = "".join(letter if letter.isalnum() else "-" for letter in cell.name)
        yield options.folder.resolve() / name


def carry_out(options: argparse.Namespace, cell: Cell, bar: Any) -> Run:
    """Carry a run out, on hosts of its own."""

    def report(outcome: Outcome) -> None:
        wrong = "; ".join(outcome.wrong())
        seconds = "never" if outcome.ended_s is None else f"{outcome.ended_s:.1f} s"
        victims = ", ".join(map(str, outcome.victims))
        bar.write(f"{cell.name}: {outcome.kind}, rank {victims}: {seconds} {wrong}".rstrip())
        bar.update()

    place = Here(cell.ranks) if cell.local else Hosts(cell.ranks)
    run = run_restarts if cell.mode == "restart" else run_elastic
    with place, folder_of(options, cell) as folder:
        return run(place, cell, folder, report)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="of victims, kinds and moments")
    parser.add_argument("--faults", type=int, default=200, help="of all runs together")
    parser.add_argument("--modes", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    known = sorted({name for names in STRATEGIES.values() for name in names})
    parser.add_argument("--strategies", nargs="+", choices=known, help="default: all")
    parser.add_argument(
        "--launchers",
        nargs="+",
        choices=("mpi", "gloo"),
        default=["mpi", "gloo"],
        help='of mode "restart": strategies take them in turns',
    )
    parser.add_argument("--ranks", type=int, default=3, help="of a job, one a host")
    parser.add_argument(
        "--pause", type=float, nargs=2, default=[2.0, 6.0], help="seconds of training, from, to"
    )
    parser.add_argument(
        "--watch", type=float, default=8.0, help="seconds: HVD_PIPE_TIMEOUT of jobs that restart"
    )
    parser.add_argument("--local", action="store_true", help="no hosts: all ranks on this machine")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--folder", type=Path, help="keep what jobs write here")
    parser.add_argument("--json", type=Path, help="the file of results")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error(f"--ranks must be at least 2, as somebody must be left; got {options.ranks}")
    if not (found := wanted(options)):
        parser.error("none of --modes has any of --strategies")
    if options.faults < len(found):
        parser.error(f"--faults must be at least {len(found)}, one a run; got {options.faults}")
    if options.json is not None and not options.json.resolve().parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.resolve().parent}")
    return options


def main() -> int:
    """Carry all runs out; return 1 where anything went wrong."""
    options = arguments()
    results = Results(options.json)
    asked = cells(options)
    left = [cell for cell in asked if not results.has(cell)]
    if len(left) < len(asked):
        print(f"{len(asked) - len(left)} of {len(asked)} runs are in {options.json} already.")
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    try:
        with ExitStack() as stack:
            bar = stack.enter_context(tqdm(total=sum(c.faults for c in left), unit="fault"))
            pool = stack.enter_context(ThreadPoolExecutor(options.jobs))
            for _ in pool.map(lambda cell: results.add(carry_out(options, cell, bar)), left):
                pass
    except ClusterError as error:
        print(f"kill_loop: {error}", file=sys.stderr)
        return 2
    runs = [results.runs[cell.name] for cell in asked]
    wrong = [what for run in runs for what in run.wrong()]
    after = sum(1 for _ in Path("/proc/self/fd").iterdir())
    if after > before:
        wrong.append(f"this process had {before} descriptors open, and has {after}")
    print(check.table(runs))
    for what in wrong:
        print(what, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
