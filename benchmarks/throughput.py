r"""Training throughput beside its peers: stock Horovod, PyTorch DDP, one worker, and hvd_pipe.

    sudo python benchmarks/throughput.py --workers 4 --json grid.json

Workers are hosts of an emulated cluster (`cluster.py`): the communication crosses links of a known
rate, which is set so that an all-reduce of all gradients takes ``r`` times a worker's computation.
Computation is an emulated accelerator's, or, with ``--compute cpu``, real (`models.py`).

Each row of a cell is a contestant (`contestants.py`). Horovod reads its settings once, so stock
Horovod with other settings, DDP, and hvd_pipe are jobs of their own, *teams*: all are started at
once on the same hosts, one at a time has the turn, the others are stopped (SIGSTOP). Contestants
take turns in every round; what is reported is the median over the rounds of the slowest rank.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cluster import MOST_HOSTS, Cluster, ClusterError, end
from contestants import DDP_BUCKETS, ENGINE, TENSORFLOW, parts_of, period_of
from models import MODELS
from throughput_rank import write
from throughput_report import table
from tqdm import tqdm

from hvd_pipe.planning.comm import CODECS

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SWEEP = {  # stock Horovod's settings beside its default: bytes to fuse, milliseconds of a cycle
    # (Without fusion, or with a cycle of 20 ms, DenseNet was slower than with the default.)
    "fusion=M-over-8,cycle=1": {"HOROVOD_FUSION_THRESHOLD": "M/8"},
    "fusion=M-over-8,cycle=5": {"HOROVOD_FUSION_THRESHOLD": "M/8", "HOROVOD_CYCLE_TIME": "5"},
    "fusion=128M,cycle=5": {"HOROVOD_CYCLE_TIME": "5"},
}
# Both stock Horovod and ours: Open MPI chooses one that takes 1.6 times as long, see
# docs/launching.md.
RING = {
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
}
OVERLAPS = ("backward", "forward")
SETTLE_STEPS = 4
LEAST_STEPS = 4.0  # of a turn, where these take longer; one message may travel between turns
PLANNING_STEPS = {  # until all plans were tried; by the beginning of a name
    "merged-gradient:overlap=forward": 62,
    "merged-gradient:overlap=backward": 28,
    "merged-gradient": 62,
    "pipe-sgd": 34,
    "auto": 36,
}
SMALL_BYTES = 2**16  # a second point, for the line that predictions take
SAMPLES = 5  # messages of each size whose time is measured
LONG_S = 0.5  # fewer do where one takes so long
MOST_S = 600.0  # for one answer
SCRIPT = Path(__file__).with_name("throughput_rank.py")


@dataclass(frozen=True)
class Cell:
    """One place of the grid."""

    model: str
    workers: int
    ratio: float


class Team:
    """A job whose ranks do what they are asked while they have the turn."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        env: dict[str, str],
        directory: Path,
        backend: str,
        script: Path = SCRIPT,
        per_host: int = 1,
    ) -> None:
        self.name, self.directory = name, directory
        self.size = per_host * len(cluster.hosts)
        self._script = script
        self._number = 0
        for left in directory.glob(f"{name}.*"):  # by a team of this name before
            left.unlink()
        self._mark = f"THROUGHPUT_TEAM={directory}/{name}"
        env = {**env, "THROUGHPUT_TEAM": f"{directory}/{name}", "OMP_NUM_THREADS": "1"}
        env["HVD_PIPE_TIMEOUT"] = "0"  # ranks are stopped on purpose
        hosts = ",".join(f"{host}:{per_host}" for host in cluster.hosts)
        words = [sys.executable, str(script), str(directory), name]
        if backend == "gloo" and name != "ddp":
            launcher = ["horovodrun", "--gloo", "-np", str(self.size), "-H", hosts]
            # Ranks that are stopped for longer must not count as lost.
            env["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "100000"
        else:
            launcher = ["mpirun", "-np", str(self.size), "-H", hosts, "-bind-to", "none"]
            launcher += ["-mca", "pml", "ob1", "-mca", "btl", "^openib"]
            passed = {"PATH", "TF_CPP_MIN_LOG_LEVEL", *env, *RING}
            launcher += [word for key in sorted(passed) for word in ("-x", key)]
            env = {**RING, **env}
        self._log = (directory / f"{name}.log").open("w")
        self._job = cluster.popen(
            "h1", [*launcher, *words], env=env, stdout=self._log, stderr=self._log
        )

    def ask(self, do: str, **what: Any) -> list[dict[str, Any]]:
        """Give the team the turn for one order; return each rank's answer."""
        self._number += 1
        write(self.directory / f"{self.name}.order", {"number": self._number, "do": do, **what})
        self._signal(signal.SIGCONT)
        answers = self._answers()
        self._signal(signal.SIGSTOP)
        return answers

    def close(self) -> None:
        """End the job, whatever state it is in."""
        self._signal(signal.SIGKILL)
        end(self._job)
        self._log.close()

    def _answers(self) -> list[dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + MOST_S
        while len(found) < self.size:
            for rank in set(range(self.size)) - set(found):
                file = self.directory / f"{self.name}.{rank}.answer"
                answer = json.loads(file.read_text()) if file.exists() else {"number": 0}
                if answer.pop("number") == self._number:
                    found[rank] = answer
                if "error" in answer:  # the others may be waiting for this rank
                    raise RuntimeError(f"team {self.name}: {answer['error']}")
            if self._job.poll() is not None or time.monotonic() > deadline:
                said = (self.directory / f"{self.name}.log").read_text()[-3000:]
                silent = sorted(set(range(self.size)) - set(found))
                raise RuntimeError(f"team {self.name}: ranks {silent} gave no answer:\n{said}")
            time.sleep(0.01)
        return [found[rank] for rank in range(self.size)]

    def processor_s(self) -> float:
        """Seconds of processor time that its ranks have had."""
        found = 0.0
        for process in self._ranks():
            with suppress(OSError):  # it has ended meanwhile
                after = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                found += sum(map(int, after[11:13])) / os.sysconf("SC_CLK_TCK")
        return found

    def _signal(self, number: int) -> None:
        for process in self._ranks():
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(process, number)

    def _ranks(self) -> Iterator[int]:
        """The ids of the ranks, here, outside the hosts' own namespaces."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                variables = (folder / "environ").read_bytes().split(b"\0")
                if words[1:2] == [os.fsencode(self._script)] and self._mark.encode() in variables:
                    yield int(folder.name)
            except OSError:  # ended meanwhile
                continue


def contestants_of(ratio: float, options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the names of each team's contestants in a cell."""
    k = max(2, math.ceil(ratio))
    ours = ["merged-gradient", *(f"merged-gradient:overlap={way}" for way in OVERLAPS)]
    ours += ["merged-gradient+bf16", "merged-gradient+int8"]
    ours += ["pipe-sgd", "pipe-sgd+bf16", "pipe-sgd+int8"]
    ours += list(dict.fromkeys([f"cocod:period={k}", "cocod:period=8", "cocod:period=8+int8"]))
    teams = {"stock": ["conventional", "horovod", "horovod:asleep", *ENGINE], "ours": ours}
    teams["ddp"] = ["single", "ddp", *DDP_BUCKETS, "ddp+fp16", "ddp:post-local"]
    teams |= {name: ["horovod"] for name in swept(options)}
    if options.tensorflow:
        teams["tf-stock"] = ["tf:single", "tf:horovod"]
        teams["tf-ours"] = [
            f"tf:{name}"
            for name in ours
            if not name.startswith(("merged-gradient+", "merged-gradient:"))
        ]
    if options.only:
        known = {name for names in teams.values() for name in names}
        for name in options.only:
            if name not in known:
                teams["tf-ours" if name.startswith(TENSORFLOW) else "ours"].append(name)
        teams = {
            team: [name for name in names if name in options.only or name.endswith("single")]
            for team, names in teams.items()
        }
    return teams


def swept(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Return stock Horovod's settings beside its default; by the size of emulated gradients."""
    if options.no_sweep:
        return {}
    emulated = options.compute == "emulated"
    return {name: env for name, env in SWEEP.items() if emulated or "M/8" not in env.values()}


@contextmanager
def started(cluster: Cluster, options: argparse.Namespace) -> Iterator[dict[str, Team]]:
    """All teams, started; none is left afterwards."""
    settings: dict[str, dict[str, str]] = {"stock": {}, "ours": {}, "ddp": {}} | swept(options)
    if options.per_host > 1:
        settings["ours"] = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}  # within=node
    if options.tensorflow:
        settings |= {"tf-stock": {}, "tf-ours": {}}
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder, ExitStack() as teams:
        found = {}
        for name, env in settings.items():
            values = {
                key: value.replace("M/8", str(options.gradient_bytes // 8))
                for key, value in env.items()
            }
            found[name] = Team(
                cluster, name, values, Path(folder), options.backend, per_host=options.per_host
            )
            teams.callback(found[name].close)
            found[name].ask("drop")  # it is up, and stops
        yield found


SPIN = """
import sys, time
share = float(sys.argv[1])
while True:
    end = time.perf_counter() + share * 0.02
    while time.perf_counter() < end:
        pass
    time.sleep((1 - share) * 0.02)
"""


@contextmanager
def busy(share: float) -> Iterator[None]:
    """Another process keeps one processor busy for this share of the time."""
    if not share:
        yield
        return
    process = subprocess.Popen([sys.executable, "-S", "-c", SPIN, str(share)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def set_ratio(cluster: Cluster, team: Team, compute_s: float, ratio: float, size: int) -> float:
    """Limit the links so that an all-reduce takes ``ratio`` of the computation: its seconds."""
    workers = team.size
    wire = 2 * (workers - 1) / workers * size
    wanted = 0.98 * ratio * compute_s  # not above: k steps hide k times the computation, no more
    rate, taken = wire / wanted, 0.0
    for _ in range(5):
        cluster.rate(f"{rate / 1e6:.6f}MB/s")
        taken = measured(team, "all-reduce", [size], wanted)[size]
        if abs(taken / wanted - 1) < 0.02:
            break
        beside = taken - wire / rate  # what no faster link would spare
        rate = min(wire / max(wanted - beside, wanted / 8), 2e9)
    return taken


def run_cell(
    cell: Cell, cluster: Cluster, teams: dict[str, Team], options: argparse.Namespace
) -> dict[str, Any]:
    """Race all contestants of a cell and return its rows."""
    size = options.gradient_bytes
    emulated = options.compute == "emulated"
    build = {
        "model": cell.model,
        "compute_s": options.compute_ms / 1e3 if emulated else None,
        "gradient_bytes": size,
    }
    cluster.rate(None)
    built = teams["ddp"].ask("build", name="single", settle=SETTLE_STEPS, **build)
    size = built[0]["gradient_bytes"]
    alone = race(teams["ddp"], "single", 6)
    chosen = contestants_of(cell.ratio, options)
    all_reduce_s = set_ratio(cluster, teams["ours"], alone["seconds"], cell.ratio, size)
    names = {name for each in chosen.values() for name in each}
    codecs = {parts_of(name)[1] for name in names} & set(CODECS)
    sizes = [4 * round(size * CODECS[codec].ratio / 4) for codec in sorted(codecs)]
    all_reduces = measured(teams["ours"], "all-reduce", [SMALL_BYTES, *sizes], all_reduce_s)
    all_reduces[size] = all_reduce_s
    exchanges = measured(teams["ours"], "exchange", sizes, all_reduce_s)
    for team, names in chosen.items():
        for name in names:
            if name != "single":
                settle = settle_steps(name.removeprefix(TENSORFLOW))
                teams[team].ask("build", name=name, settle=settle, **build)
    entrants = [(team, name) for team, names in chosen.items() for name in names]
    results: dict[tuple[str, str], list[dict[str, float]]] = {each: [] for each in entrants}
    steps = dict.fromkeys(entrants, 1)
    before = time.monotonic(), processor_s(), sum(team.processor_s() for team in teams.values())
    for number in range(options.rounds + 1):  # the first one says how many steps to take
        shift = number % len(entrants)
        for each in entrants[shift:] + entrants[:shift]:
            found = race(teams[each[0]], each[1], steps[each])
            if number == 0:
                steps[each] = steps_for(each[1], options.seconds / found["seconds"])
            else:
                results[each].append(found)
    after = time.monotonic(), processor_s(), sum(team.processor_s() for team in teams.values())
    wall_s, all_s, own_s = (late - early for early, late in zip(before, after, strict=True))
    for team in chosen:
        teams[team].ask("drop")
    rows = [
        {
            "team": team,
            "contestant": name,
            "seconds": median(each["seconds"] for each in rounds),
            "least_s": min(each["seconds"] for each in rounds),
            "most_s": max(each["seconds"] for each in rounds),
            "cpu_s": median(each["cpu_s"] for each in rounds),
            "sent_bytes": median(each["sent_bytes"] for each in rounds),
        }
        for (team, name), rounds in results.items()
    ]
    return {
        "date": datetime.date.today().isoformat(),
        "model": cell.model,
        "workers": cell.workers,
        "ratio": cell.ratio,
        "compute": options.compute,
        "backend": options.backend,
        "settings": settings_of(options),
        "gradient_bytes": size,
        "all_reduce_s": all_reduces,
        "exchange_s": exchanges,
        "reached_ratio": all_reduce_s / alone["seconds"],
        "others": max(0.0, all_s - own_s) / wall_s / (os.cpu_count() or 1),
        "rows": rows,
    }


def processor_s() -> float:
    """Seconds that all processors of this machine have worked."""
    words = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, words[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def settle_steps(name: str) -> int:
    """Return after how many steps a contestant's steps stay as they are."""
    return next((n for kind, n in PLANNING_STEPS.items() if name.startswith(kind)), SETTLE_STEPS)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a cell's figures depend on besides its place in the grid."""
    names = ("compute_ms", "gradient_bytes", "rounds", "seconds", "no_sweep", "only")
    found = {name: getattr(options, name) for name in (*names, "realtime", "tensorflow", "busy")}
    return found | ({"per_host": options.per_host} if options.per_host > 1 else {})


def measured(team: Team, kind: str, sizes: list[int], about_s: float) -> dict[int, float]:
    """Seconds of a message of each size, in bytes, on the slowest rank: about so many."""
    samples = 2 if about_s > LONG_S else SAMPLES
    answers = team.ask("measure", kind=kind, sizes=sizes, samples=samples)
    return {int(size): max(answer[size] for answer in answers) for size in answers[0]}


def steps_for(name: str, wanted: float) -> int:
    """Return a number of steps near the wanted one: whole periods where models are averaged."""
    period = period_of(name)
    return max(1, round(max(LEAST_STEPS, wanted) / period)) * period


def race(team: Team, name: str, steps: int) -> dict[str, float]:
    """One contestant's turn: the slowest rank's seconds, all ranks' mean of the rest."""
    answers = team.ask("race", name=name, steps=steps)
    return {
        "seconds": max(answer["seconds"] for answer in answers),
        "cpu_s": sum(answer["cpu_s"] for answer in answers) / len(answers),
        "sent_bytes": sum(answer["sent_bytes"] for answer in answers) / len(answers),
    }


def main() -> int:
    """Run the grid and report it."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all that was started ends
    try:
        found = kept(options)
    except RuntimeError as error:
        print(f"throughput: {error}", file=sys.stderr)
        return 2
    left = todo(options, found)
    if options.realtime:  # all that this process starts has it, too
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    progress = tqdm(total=len(left), desc="cells", disable=None)
    try:
        for workers in options.workers:
            mine = [cell for cell in left if cell.workers == workers]
            if not mine:
                continue
            with (
                Cluster(workers // options.per_host) as cluster,
                started(cluster, options) as teams,
                busy(options.busy),
            ):
                for cell in mine:
                    found.append(run_cell(cell, cluster, teams, options))
                    print("\n\n".join(table(found[-1])))
                    if options.json:
                        write(Path(options.json), found)
                    progress.update()
    except (ClusterError, RuntimeError) as error:
        print(f"throughput: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # as a shell says it
    finally:
        progress.close()
    return 0


def todo(options: argparse.Namespace, found: list[dict[str, Any]]) -> list[Cell]:
    """Return the cells of the grid that are not among those found with these settings."""
    alike = [
        one
        for one in found
        if (one["compute"], one["backend"]) == (options.compute, options.backend)
        and one["settings"] == settings_of(options)
    ]
    done = {Cell(one["model"], one["workers"], one["ratio"]) for one in alike}
    cells = [
        Cell(model, workers, ratio)
        for workers in options.workers
        for ratio in options.ratios
        for model in options.models
    ]
    return [cell for cell in cells if cell not in done]


def kept(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the cells of an earlier run that ``--resume`` goes on with."""
    if not options.resume or not Path(options.json).exists():
        return []
    try:
        found: list[dict[str, Any]] = json.loads(Path(options.json).read_text())
        todo(options, found)
    except (LookupError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"{options.json} is no file of this benchmark ({error!r}): give --json another name."
        ) from error
    return found


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=list(RATIOS), help="communication / computation"
    )
    parser.add_argument("--per-host", type=int, default=1, help="workers on each host (default 1)")
    parser.add_argument("--compute", choices=("emulated", "cpu"), default="emulated")
    parser.add_argument("--compute-ms", type=float, default=120.0, help="of an emulated step")
    parser.add_argument("--gradient-bytes", type=int, default=3 * 2**20, help="of emulated models")
    parser.add_argument("--backend", choices=("gloo", "mpi"), default="gloo")
    parser.add_argument(
        "--rounds", type=int, default=3, help="turns of each contestant (default 3)"
    )
    parser.add_argument("--seconds", type=float, default=0.6, help="of a turn (default 0.6)")
    parser.add_argument("--no-sweep", action="store_true", help="stock Horovod's default only")
    parser.add_argument("--tensorflow", action="store_true", help="TensorFlow's contestants, too")
    parser.add_argument("--only", nargs="+", help="these contestants (contestants.py), and single")
    parser.add_argument(
        "--realtime", action="store_true", help="the hosts go before all else on this machine"
    )
    parser.add_argument(
        "--busy", type=float, default=0.0, help="the share of one core that another process takes"
    )
    parser.add_argument("--json", help="write all cells here, after each one")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the cells that --json has with these settings, add the others",
    )
    options = parser.parse_args(words)
    if min(options.workers) < 2:
        parser.error("--workers: 2 at least; one worker by itself is a row of each cell")
    if options.rounds < 1 or options.seconds <= 0.0:
        parser.error("--rounds and --seconds: more than 0")
    if not 0.0 <= options.busy <= 1.0:
        parser.error("--busy: from 0 to 1")
    if options.per_host < 1 or any(workers % options.per_host for workers in options.workers):
        parser.error("--per-host: at least 1, and --workers a multiple of it")
    if max(options.workers) > MOST_HOSTS * options.per_host:
        parser.error(f"--workers: {MOST_HOSTS} hosts at most")
    if options.realtime and options.backend == "mpi":
        parser.error("--realtime: not with mpi, which polls and would lock everybody else out")
    if min(options.ratios) <= 0.0:
        parser.error("--ratios: more than 0, as they are reached by slowing the links down")
    if options.resume and not options.json:
        parser.error("--resume: of which run? Give its --json, too")
    if options.json and not Path(options.json).resolve().parent.is_dir():
        parser.error(f"{options.json}: no such folder")
    return options


if __name__ == "__main__":
    sys.exit(main())
