"""What it costs a host's computation that Horovod's ranks wait for each other.

    sudo python benchmarks/waiting.py

Two hosts (`cluster.py`), each with one core of this machine to itself, train a small network on
it; the core computes and waits, as on a cluster of CPU hosts whose threads use all cores. Open MPI
waits by asking again and again; with ``mpi_yield_when_idle`` it lets others go first; Gloo sleeps.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cluster import Cluster, ClusterError
from harness import markdown, run_on
from models import on_cpu

import hvd_pipe.torch as hvd

HOSTS = 2
SETTINGS = {
    "MPI, polling": ("mpi", {"OMPI_MCA_mpi_yield_when_idle": "0"}),
    "MPI, yielding": ("mpi", {"OMPI_MCA_mpi_yield_when_idle": "1"}),
    "Gloo": ("gloo", {}),
    "Gloo, cycle of 5 ms": ("gloo", {"HOROVOD_CYCLE_TIME": "5"}),
}
MODEL = "transformer"
STRATEGIES = ("merged-gradient", "pipe-sgd")


def rank(folder: Path, rounds: int) -> None:
    """Measure on one rank, and write what was found."""
    place = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", "0")))
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[place]})
    torch.set_num_threads(1)
    model, loss = on_cpu(MODEL)

    def compute() -> None:
        model.zero_grad()
        loss().backward()

    found: dict[str, Any] = {"alone_s": timed(compute, rounds)}
    hvd.init()
    hvd.allreduce(torch.zeros(1), name="start")
    before, start = cpu_seconds(), time.perf_counter()
    time.sleep(2.0)
    found["idle_cpu"] = (cpu_seconds() - before) / (time.perf_counter() - start)
    found["beside_s"] = timed(compute, rounds)
    for strategy in STRATEGIES:
        network, minibatch_loss = on_cpu(MODEL)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(network.parameters(), 1e-3),
            network.named_parameters(),
            strategy=strategy,
        )

        def step(
            optimizer: Any = optimizer, loss: Callable[[], torch.Tensor] = minibatch_loss
        ) -> None:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

        for _ in range(64):  # plans are tried
            step()
        hvd.barrier()
        found[strategy] = timed(step, rounds)
        optimizer.synchronize()
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(found))


def timed(function: Callable[[], None], rounds: int) -> float:
    """Return the median seconds of a call."""
    taken = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return median(taken[2:])


def cpu_seconds() -> float:
    """Return the processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Run every setting in turn, several times, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="of the links (default 1gbit)")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each kind in a job")
    parser.add_argument("--repeats", type=int, default=3, help="jobs of each setting")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.rounds)
        return 0
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    try:
        with Cluster(HOSTS, options.rate) as cluster:
            for _ in range(options.repeats):
                for name, (launcher, env) in SETTINGS.items():
                    words = [__file__, "--rounds", str(options.rounds)]
                    ranks = list(run_on(cluster, words, launcher, env).values())
                    found[name].append({key: max(r[key] for r in ranks) for key in ranks[0]})
    except (ClusterError, subprocess.TimeoutExpired) as error:
        print(f"waiting: {error}", file=sys.stderr)
        return 2
    heads = ["", "idle: % of a core", "compute ms", "beside an idle Horovod"]
    rows = []
    for name, runs in found.items():
        middle = {key: median(run[key] for run in runs) for key in runs[0]}
        figures = [f"{100 * middle['idle_cpu']:.0f}", f"{1e3 * middle['alone_s']:.1f}"]
        figures.append(f"x {middle['beside_s'] / middle['alone_s']:.2f}")
        rows.append(
            [name, *figures, *(f"{1e3 * middle[strategy]:.1f}" for strategy in STRATEGIES)]
        )
    print(markdown([*heads, *(f"{strategy} step ms" for strategy in STRATEGIES)], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
