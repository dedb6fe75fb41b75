"""What messages cost under each carrier: Horovod, and groups of torch.distributed.

    sudo python benchmarks/carriers.py --json benchmarks/results/carriers.json

Hosts of one machine (`cluster.py`) all-reduce ``--count`` messages of one size, one after another
and all at once; one host alone has two ranks. A group has k connections between two hosts and t
threads (``torch:k/t``). All carriers take turns in one job; figures are medians of milliseconds,
and of the processor's in one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import horovod.torch as hvd
import torch
from cluster import Cluster, ClusterError
from harness import markdown, run_on, write_json
from horovod.torch.mpi_ops import global_process_set

from hvd_pipe.torch.messages import group
from hvd_pipe.torch.messages.group import Group

SIZES = {"4 KiB": 2**12, "64 KiB": 2**16, "256 KiB": 2**18, "1 MiB": 2**20, "4 MiB": 2**22}
SIZES["16 MiB"] = 2**24
GROUPS = ((1, 2), (1, 8))  # the second is what `group` has
HOROVOD = "horovod"


def send(carrier: Group | None, tensors: list[torch.Tensor], size: str, burst: bool) -> None:
    """All-reduce the tensors, all at once or one after another."""
    if carrier is not None:
        if burst:
            for posted in [carrier.launch(tensor, size) for tensor in tensors]:
                posted.wait()
        else:
            for tensor in tensors:
                carrier.launch(tensor, size).wait()
        return
    handles = []
    for number, tensor in enumerate(tensors):
        handle = hvd.allreduce_async_(tensor, name=f"{size}.{number}", op=hvd.Sum)
        if burst:
            handles.append(handle)
        else:
            hvd.synchronize(handle)
    for handle in handles:
        hvd.synchronize(handle)


def rank(folder: Path, rounds: int, count: int) -> None:
    """Time every carrier; rank 0 writes the medians."""
    hvd.init()
    torch.set_num_threads(1)
    carriers: dict[str, Group | None] = {HOROVOD: None}
    for connections, threads in GROUPS:
        name = f"torch:{connections}/{threads}"
        group.CONNECTIONS, group.THREADS = connections, threads
        carriers[name] = Group(global_process_set, name)
    rows = {}
    for size, nbytes in SIZES.items():
        tensors = [torch.zeros(nbytes // 4) for _ in range(count)]
        for burst in (True, False):
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in carriers}
            for _ in range(rounds + 1):
                for name, carrier in carriers.items():
                    hvd.barrier()
                    begun, busy = time.perf_counter(), time.process_time()
                    send(carrier, tensors, size, burst)
                    now = time.perf_counter() - begun, time.process_time() - busy
                    times[name].append(now)
            rows[f"{size}, {'burst' if burst else 'one by one'}"] = {
                name: [1e3 * median(part) for part in zip(*own[1:], strict=True)]
                for name, own in times.items()
            }
    if hvd.rank() == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    hvd.barrier()
    carriers.clear()
    hvd.shutdown()


def main() -> int:
    """Run each number of hosts in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="of the links (default 1gbit)")
    parser.add_argument("--hosts", nargs="+", type=int, default=[1, 2, 4])
    launchers = ("gloo", "mpi")
    parser.add_argument("--launchers", nargs="+", default=launchers, choices=launchers)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--count", type=int, default=12, help="messages of a round")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.rounds, options.count)
        return 0
    busy, results = os.getloadavg()[0], {}
    words = [__file__, "--rounds", str(options.rounds), "--count", str(options.count)]
    try:
        for hosts in options.hosts:
            with Cluster(hosts, options.rate) as cluster:
                for launcher in options.launchers:
                    done = run_on(cluster, words, launcher, per_host=1 + (hosts == 1))
                    where = "2 ranks of one host" if hosts == 1 else f"{hosts} hosts"
                    results[f"{where}, {launcher}"] = done["rows"]
    except (ClusterError, subprocess.TimeoutExpired) as error:
        print(f"carriers: {error}", file=sys.stderr)
        return 2
    names = [HOROVOD, *(f"torch:{connections}/{threads}" for connections, threads in GROUPS)]
    table = [
        [hosts, what, *("{:.1f} ({:.1f})".format(*row[name]) for name in names)]
        for hosts, rows in results.items()
        for what, row in rows.items()
    ]
    print(
        f"Milliseconds (of the processor) of {options.count} messages, {options.rate}, "
        f"load {busy:.1f} at the start\n"
    )
    print(markdown(["", "", *names], table))
    if options.json:
        settings = {"rate": options.rate, "load": busy, "count": options.count}
        write_json(options.json, {**settings, "rows": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
