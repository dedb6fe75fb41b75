#!/usr/bin/env python3
"""Kill, stop and cut off ranks and hosts at random, again and again, and check all that is left.

    sudo python benchmarks/kill_loop.py --seed 1 --faults 200 --json kill-loop.json
    python benchmarks/kill_loop.py --local --faults 2 --strategies cocod:period=4

A job trains on emulated hosts, or on this machine (`--local`, which needs no root). Something
happens to a rank or to a host. All ranks must end by themselves and say whose fault it was,
nothing may remain, and the job starts again from the last checkpoint. At the end the weights must
be those of a run to which nothing has happened. The exit status is 1 where anything went wrong.

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import kill_loop_check as check
from cluster import ClusterError, end
from harness import Here, Hosts, TooLateError, lives, signal_to, wait_for, write_json
from kill_loop_check import Fault, Outcome, Run
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
STRATEGIES = (
    "merged-gradient:plan=wfbp",
    "merged-gradient:plan=wfbp,overlap=forward",
    "pipe-sgd:bucket_bytes=1024",
    "cocod:period=4",
    "pipe-sgd:bucket_bytes=1024+int8",
    "pipedream:stash",
    "cocod:period=4,fragments=4,outer=nesterov",
    "cocod:period=4,fragments=4,within=node",
)
START_S = 300.0  # until a job trains, on a machine that is busy
PATIENCE_S = 180.0  # until all ranks of a job have ended
FINISH_S = 600.0  # for a run that nothing disturbs
SETTLE_S = 60.0  # until launchers, and what carried their output, have ended
RETRIES = "net.ipv4.tcp_retries2=6"  # mpirun and ssh give a host up after 25 s, not 16 minutes
STEP_S = 0.04
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMPI_MCA_btl": "^openib",
    "HOROVOD_STALL_CHECK_DISABLE": "1",
}


class Cell(NamedTuple):
    """One run: under which launcher and strategy, and how."""

    launcher: str
    strategy: str
    faults: int
    options: argparse.Namespace

    @property
    def name(self) -> str:
        return f"restart, {self.launcher}, {self.strategy}"

    @property
    def settings(self) -> dict[str, Any]:
        """What two runs of one name may differ in."""
        given = self.options
        return {
            "seed": given.seed,
            "faults": self.faults,
            "ranks": given.ranks,
            "pause": list(given.pause),
            "watch_s": given.watch,
            "hosts": not given.local,
        }

    @property
    def every(self) -> int:
        """Steps between two checkpoints; a pipeline's step is an epoch."""
        return 1 if self.strategy.startswith("pipedream") else 10

    def schedule(self) -> list[Fault]:
        left_out = ("kill host", "cut") if self.options.local else ()
        kinds = [kind for kind in check.KINDS if kind not in left_out]
        given = self.options
        return check.schedule(given.seed, self.name, self.faults, kinds, given.ranks, given.pause)


class Job:
    """A job from its start to its end; nothing of it outlives the context."""

    def __init__(
        self, place: Here, cell: Cell, folder: Path, number: int, start: int, stop: int
    ) -> None:
        self.place, self.ranks = place, cell.options.ranks
        self.folder = folder / f"job-{number}"
        self.folder.mkdir(parents=True)
        task = {
            "folder": str(folder),
            "job": number,
            "strategy": cell.strategy,
            "seed": cell.options.seed,
            "start": start,
            "stop": stop,
            "every": cell.every,
            "pause_s": 0.0 if stop else STEP_S,
        }
        self.mark = f"KILL_LOOP_FOLDER={self.folder}"
        env = {
            **ENVIRONMENT,
            "KILL_LOOP_FOLDER": str(self.folder),
            "HVD_PIPE_TIMEOUT": str(cell.options.watch),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
        }
        launcher = place.launcher(cell.launcher, self.ranks, env)
        words = [*launcher, sys.executable, str(HERE / "kill_loop_rank.py"), json.dumps(task)]
        with (self.folder / "log").open("wb") as log:
            self.launched = place.popen(
                words, env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.pids: dict[int, int] = {}

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def clear(self) -> list[str]:
        """End what is left of the job; return what that was. Ranks print their stacks."""
        left = self.place.marked(self.mark)
        ranks = [pid for pid in self.pids.values() if pid in left]
        for pid in ranks:
            signal_to(pid, signal.SIGUSR2)
        time.sleep(1.0 if ranks else 0.0)
        end(self.launched)
        for pid in left:
            signal_to(pid, signal.SIGKILL)
        return [f"{pid}: {words}" for pid, words in left.items()]

    def settle(self) -> list[str]:
        """Wait until nothing of the job is left; end what is left then, and return it."""
        with suppress(TooLateError):
            wait_for(lambda: self.launched.poll() is not None, SETTLE_S, "the launcher")
            wait_for(lambda: not self.place.marked(self.mark), SETTLE_S, "processes", 0.5)
        return self.clear()

    def output(self) -> str:
        """Return what the launcher and the ranks have printed."""
        files = [self.folder / "log", *sorted(self.folder.glob("said.*"))]
        return "\n".join(file.read_text(errors="replace") for file in files)

    def step(self, rank: int) -> int:
        """Return the step that a rank has taken last; -1 for none."""
        file = self.folder / f"step.{rank}"
        return int(file.read_text()) if file.exists() else -1

    def trains(self) -> bool:
        """Whether all ranks have taken a step; raises where the launcher has ended."""
        if self.launched.poll() is not None:
            raise TooLateError(f"the job has ended by itself: status {self.launched.returncode}")
        return min(map(self.step, range(self.ranks))) >= 0

    def find_ranks(self) -> None:
        for rank in range(self.ranks):
            who = json.loads((self.folder / f"pid.{rank}").read_text())
            self.pids[rank] = self.place.outside(who["pid"], who["host"])

    def let_happen(self, kind: str, rank: int, host: str) -> None:
        """Let a fault happen to a rank, or to its host."""
        if kind in ("kill", "stop"):
            signal_to(self.pids[rank], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        elif kind == "raise":
            (self.folder / f"raise.{rank}").touch()
        else:
            assert isinstance(self.place, Hosts)
            cluster = self.place.cluster
            if kind == "cut":
                cluster.cut(host)
            else:
                for pid in cluster.processes(host):
                    signal_to(pid, signal.SIGKILL)


Report = Callable[[Outcome], None]


# Restarts from checkpoints --------------------------------------------------------------------


def restart_once(place: Here, cell: Cell, folder: Path, fault: Fault, start: int) -> Outcome:
    """Run a job until a fault and its end."""
    rank = fault.rank
    outcome = Outcome("none", [], fault.after_s, start, None, [], [], load=os.getloadavg()[0])
    with Job(place, cell, folder, fault.number, start, 0) as job:
        try:
            wait_for(job.trains, START_S, "the job has not started")
            job.find_ranks()
            time.sleep(fault.after_s)
            job.trains()
        except TooLateError as error:
            return replace(outcome, said=f"{error}\n{job.output()[-6000:]}")
        outcome = replace(outcome, kind=fault.kind, victims=[rank])
        job.let_happen(fault.kind, rank, place.hosts[rank])
        with suppress(TooLateError):
            pids = job.pids.values()
            seconds = wait_for(lambda: not any(map(lives, pids)), PATIENCE_S, "the ranks' end")
            outcome = replace(outcome, ended_s=round(seconds, 2))
        if fault.kind == "cut":
            place.cluster.heal(place.hosts[rank])  # type: ignore[attr-defined]
        left = job.settle()
        output = job.output()
    named = check.named_by_ranks(output)
    wrong = check.misnamed(named, outcome.victims, outcome.kind == "cut")
    outcome = replace(
        outcome,
        left=left,
        by_ranks=sorted({other for _, other in named}),
        by_launcher=sorted(check.named_by_launcher(output, place.hosts)),
        misnamed=[list(pair) for pair in wrong],
    )
    return replace(outcome, said=output[-9000:] if outcome.wrong() else "")


def newest(cell: Cell, folder: Path) -> int:
    """Return the newest step of which every rank has what it needs; 0 for none."""
    each = cell.strategy.startswith("cocod") or "+" in cell.strategy
    found = [
        {int(path.name.split(".")[0][5:]) for path in folder.glob(f"step-*.rank{rank}.pt")}
        for rank in range(cell.options.ranks if each else 1)
    ]
    return max(set.intersection(*found), default=0)


def finish(place: Here, cell: Cell, folder: Path, number: int, start: int, stop: int) -> list[str]:
    """Train from a checkpoint to the last step; return why that failed, if it did."""
    with Job(place, cell, folder, number, start, stop) as job:
        with suppress(TooLateError):
            wait_for(lambda: job.launched.poll() is not None, FINISH_S, "it has not finished")
        code = job.launched.poll()
        return [] if code == 0 else [f"{folder.name}: status {code}\n{job.output()[-3000:]}"]


def run_restarts(place: Here, cell: Cell, folder: Path, report: Report) -> Run:
    """Let a run's faults happen, finish it, and compare it with one that nothing disturbs."""
    begun = time.monotonic()
    outcomes, step = [], 0
    disturbed, whole = folder / "disturbed", folder / "whole"
    for fault in cell.schedule():
        outcomes.append(restart_once(place, cell, disturbed, fault, step))
        step = newest(cell, disturbed)
        report(outcomes[-1])
    stop = step + 3 * cell.every + 1 - (cell.every == 1)
    # Without a fault under this launcher on as many ranks: others may add up in another order.
    unequal = finish(place, cell, disturbed, cell.faults + 1, step, stop)
    if (disturbed / "plan.json").exists():
        whole.mkdir()
        (whole / "plan.json").write_text((disturbed / "plan.json").read_text())
    unequal += finish(place, cell, whole, 0, 0, stop)
    compared = 0
    for rank in range(1 if cell.strategy.startswith("pipedream") else cell.options.ranks):
        paths = (disturbed / f"digests.{rank}", whole / f"digests.{rank}")
        texts = [path.read_text() if path.exists() else "" for path in paths]
        count, wrong = check.unequal_digests(*texts)
        compared += count
        unequal += [f"rank {rank}, step {step}" for step in wrong]
    seconds = round(time.monotonic() - begun, 1)
    return Run(cell.name, cell.settings, outcomes, compared, unequal, seconds=seconds)


# All of it ------------------------------------------------------------------------------------


def cells(options: argparse.Namespace) -> list[Cell]:
    """Return the runs that are asked for; each has its share of the faults."""
    launchers = itertools.cycle(options.launchers)
    known = [name for name in STRATEGIES if name in (options.strategies or [name])]
    found = [(next(launchers), strategy) for strategy in known]
    share, rest = divmod(options.faults, max(1, len(found)))
    return [Cell(*cell, share + (number < rest), options) for number, cell in enumerate(found)]


def read_runs(path: Path | None) -> dict[str, Run]:
    if path is None or not path.exists():
        return {}
    return {n: Run.read(run) for n, run in json.loads(path.read_text())["runs"].items()}


def write_runs(path: Path, runs: dict[str, Run]) -> None:
    versions = {name: version(name) for name in ("hvd-pipe", "horovod", "torch")}
    about = {
        "versions": {
            **versions,
            "python": platform.python_version(),
            "kernel": platform.release(),
        },
        "cores": os.cpu_count(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "runs": {name: asdict(run) for name, run in runs.items()},
    }
    text = json.dumps(about).replace(f"{HERE.parent}/", "").replace(f"{Path.home()}/", "~/")
    write_json(path, json.loads(text))


def carry_out(cell: Cell, bar: Any) -> Run:
    """Carry a run out, on hosts of its own."""

    def report(outcome: Outcome) -> None:
        seconds = "never" if outcome.ended_s is None else f"{outcome.ended_s:.1f} s"
        what = f"{cell.name}: {outcome.kind}, rank {outcome.victims}: {seconds}"
        bar.write(f"{what} {'; '.join(outcome.wrong())}".rstrip())
        bar.update()

    ranks = cell.options.ranks
    with (
        Here(ranks) if cell.options.local else Hosts(ranks) as place,
        tempfile.TemporaryDirectory(prefix="kill-loop-") as folder,
    ):
        if isinstance(place, Hosts):
            for host in place.hosts:
                place.cluster.run(host, ["sysctl", "-w", RETRIES], check=True)
        return run_restarts(place, cell, Path(folder), report)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--seed", type=int, default=1, help="of victims, kinds and moments")
    add("--faults", type=int, default=200, help="of all runs together")
    add("--strategies", nargs="+", choices=STRATEGIES, help="default: all")
    add("--launchers", nargs="+", choices=("mpi", "gloo"), default=["mpi", "gloo"], help="turns")
    add("--ranks", type=int, default=3, help="of a job, one a host")
    add("--pause", type=float, nargs=2, default=[2.0, 6.0], help="seconds of training, from, to")
    add("--watch", type=float, default=8.0, help="seconds: HVD_PIPE_TIMEOUT")
    add("--local", action="store_true", help="no hosts: all ranks on this machine")
    add("--jobs", type=int, default=1, help="runs at a time")
    add("--json", type=Path, help="the file of results")
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error(f"--ranks must be at least 2, as somebody must be left; got {options.ranks}")
    if options.faults < len(found := cells(options)):
        parser.error(f"--faults must be at least {len(found)}, one a run; got {options.faults}")
    return options


def main() -> int:
    """Carry all runs out; return 1 where anything went wrong."""
    options = arguments()
    asked, known, lock = cells(options), read_runs(options.json), threading.Lock()
    left = [
        cell
        for cell in asked
        if cell.name not in known or known[cell.name].settings != cell.settings
    ]
    if len(left) < len(asked):
        print(f"{len(asked) - len(left)} of {len(asked)} runs are in {options.json} already.")
    runs: dict[str, Run] = dict(known)

    def run(cell: Cell) -> None:
        found = carry_out(cell, bar)
        with lock:
            runs.update({**read_runs(options.json), found.name: found})  # others may have added
            if options.json is not None:
                write_runs(options.json, runs)

    try:
        with (
            tqdm(total=sum(cell.faults for cell in left), unit="fault") as bar,
            ThreadPoolExecutor(options.jobs) as pool,
        ):
            list(pool.map(run, left))
    except ClusterError as error:
        print(f"kill_loop: {error}", file=sys.stderr)
        return 2
    wrong = [what for cell in asked for what in runs[cell.name].wrong()]
    print(check.table([runs[cell.name] for cell in asked]))
    print("".join(f"{what}\n" for what in wrong), end="", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
