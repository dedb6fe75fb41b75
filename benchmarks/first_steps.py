"""What the first steps of a run take: a strategy must cost nothing before it gains.

    sudo python benchmarks/first_steps.py

Two hosts (`cluster.py`) train a small network from its first step on, with real computation, under
stock Horovod and under each strategy, in turn, several times. The clock starts with the first step
and so counts what a strategy does to find its plan.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import horovod.torch as stock
import torch
from cluster import Cluster, ClusterError
from harness import markdown, run_on, write_json
from torch import nn

import hvd_pipe.torch as hvd

HOSTS = 2
BATCH, CLASSES, CHANNELS = 32, 10, 64
STOCK = "horovod"
DEFAULT = ("merged-gradient",)
FUSION = {"HOROVOD_FUSION_THRESHOLD": str(128 * 2**20)}  # Horovod's default; ours fuses nothing


def network() -> nn.Module:
    """Return a small convolutional network: 130 000 parameters, 0.5 MB of gradients."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(CHANNELS * 16, CHANNELS),
        nn.ReLU(),
        nn.Linear(CHANNELS, CLASSES),
    )


def train(name: str, steps: int) -> float:
    """Return the seconds of the first steps of a run."""
    torch.manual_seed(1)
    model = network()
    plain = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    named = model.named_parameters()
    if name == STOCK:
        optimizer = stock.DistributedOptimizer(plain, named_parameters=named)
    else:
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, strategy=name)
    images, labels = torch.randn(BATCH, 1, 8, 8), torch.randint(CLASSES, (BATCH,))
    hvd.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    optimizer.synchronize()
    return time.perf_counter() - start


def rank(folder: Path, names: list[str], steps: int, repeats: int) -> None:
    """Train under each name in turn, and write what was found."""
    hvd.init()
    torch.set_num_threads(1)
    train(STOCK, 10)  # what is set up once a process counts for nobody
    found: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(train(name, steps))
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(found))


def main() -> int:
    """Run a job at each rate, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "20mbit"], help="of the links")
    parser.add_argument("--strategies", nargs="+", default=list(DEFAULT))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--realtime", action="store_true", help="the hosts go before all else on this machine"
    )
    parser.add_argument("--json", type=Path, help="write the seconds of all runs here")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = [STOCK, *options.strategies]
    if options.rank:
        rank(options.rank, names, options.steps, options.repeats)
        return 0
    if options.realtime:  # all that this process starts has it, too
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    rows = []
    seconds: dict[str, dict[str, list[float]]] = {}
    load = os.getloadavg()[0]
    words = [__file__, "--steps", str(options.steps), "--repeats", str(options.repeats)]
    words += ["--strategies", *options.strategies]
    try:
        for rate in options.rates:
            with Cluster(HOSTS, rate) as cluster:
                ranks = run_on(cluster, words, "gloo", FUSION).values()
            slowest = {name: list(map(max, *(found[name] for found in ranks))) for name in names}
            seconds[rate] = slowest
            for name, runs in slowest.items():
                ratios = [one / other for one, other in zip(runs, slowest[STOCK], strict=True)]
                spread = f"{min(runs):.2f} .. {max(runs):.2f}"
                rows.append([rate, name, f"{median(runs):.2f}", spread, f"{median(ratios):.2f}"])
    except (ClusterError, subprocess.TimeoutExpired) as error:
        print(f"first_steps: {error}", file=sys.stderr)
        return 2
    print(markdown(["link", "", "seconds", "min .. max", "/ stock Horovod"], rows))
    if options.json:
        settings = {"steps": options.steps, "realtime": options.realtime, "load_at_start": load}
        begun = datetime.date.today().isoformat()
        found = {"date": begun, "hosts": HOSTS, **settings, "seconds": seconds}
        write_json(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
