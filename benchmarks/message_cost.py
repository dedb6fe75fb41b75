"""What a message costs in Horovod, taken apart: queueing, negotiation, wire, waking.

    sudo python benchmarks/message_cost.py --json benchmarks/results/message-cost.json

Messages travel over Gloo and MPI between hosts of one machine (`cluster.py`), alone and in bursts.
NCCL needs GPUs and is not measured. Rank 0 reads Horovod's timeline and the thread's own clock::

    launched | until the next cycle | negotiation | all-reduce | until the thread has noticed
             queue                  negotiate     wire         wake

In a burst, all is counted up to its last message, and the wire carries all. Cycles in which a rank
is late are queueing. The two clocks differ by a constant: the least waking of a thread that asks
without a pause is taken as none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import horovod.torch as hvd
import torch
from cluster import Cluster, ClusterError
from harness import markdown, run_on, write_json

from hvd_pipe.runtime.watch.waits import sleep_between_polls

SIZES = {"4 KiB": 4096, "1 MiB": 2**20}
BURST = 8
PARTS = ("queue", "negotiate", "wire", "wake")
ENV = {"HOROVOD_TIMELINE_MARK_CYCLES": "1", "HOROVOD_FUSION_THRESHOLD": "0"}
WARM_UP = 3  # the first messages of a name are not in Horovod's cache


def send(name: str, size: int, count: int, sleeps: bool) -> tuple[float, float]:
    """Send messages together; return when they were launched, and when the last was noticed."""
    parts = [torch.zeros(size // 4) for _ in range(count)]
    launched = time.monotonic()
    handles = [
        hvd.allreduce_async_(x, name=f"{name}.{i}", op=hvd.Sum) for i, x in enumerate(parts)
    ]
    for handle in handles:
        begun = time.monotonic()
        while not hvd.poll(handle):
            if sleeps:
                sleep_between_polls(begun)
    noticed = time.monotonic()
    for handle in handles:
        hvd.synchronize(handle)
    return launched, noticed


def rank(folder: Path, rounds: int) -> None:
    """Send every kind of message, and write when."""
    hvd.init()
    torch.set_num_threads(1)
    found = {}
    for label, size in SIZES.items():
        for count in (1, BURST):
            for wait in ("spins", "sleeps"):
                name = f"{label}/{count}/{wait}"
                times = []
                for _ in range(rounds + WARM_UP):
                    hvd.barrier()
                    times.append(send(name, size, count, wait == "sleeps"))
                found[name] = times
    first = hvd.rank() == 0
    hvd.allreduce(torch.zeros(1), name="end")  # or the file may lack the end of the last message
    hvd.shutdown()
    if first:
        (folder / "clock.json").write_text(json.dumps(found))


def spans(text: str) -> tuple[dict[str, list[tuple[float, float]]], list[float]]:
    """Return begin and end of each all-reduce by name, and when cycles began, in seconds."""
    text = text.strip().rstrip(",")
    events = json.loads(text if text.endswith("]") else text + "]")
    names: dict[int, str] = {}
    begun: dict[int, float] = {}
    found: dict[str, list[tuple[float, float]]] = {}
    cycles = []
    open_: dict[int, list[str]] = {}
    for event in events:
        kind, pid, at = event.get("ph"), event.get("pid"), 1e-6 * event.get("ts", 0)
        if kind == "M" and event["name"] == "process_name":
            names[pid] = event["args"].get("name", "")  # the first is the timeline's own
        elif event.get("name") == "CYCLE_START":
            cycles.append(at)
        elif kind == "B":
            open_.setdefault(pid, []).append(event["name"])
            if event["name"] == "ALLREDUCE":
                begun[pid] = at
        elif kind == "E" and open_.get(pid) and open_[pid].pop() == "ALLREDUCE":
            found.setdefault(names[pid], []).append((begun[pid], at))
    return found, cycles


def taken_apart(clock: dict[str, Any], text: str) -> dict[str, dict[str, float]]:
    """Return the median seconds of each part of each kind of message, and of the whole."""
    carried, cycles = spans(text)
    rows: dict[str, list[list[float]]] = {}
    for name, times in clock.items():
        count = int(name.split("/")[1])
        own = zip(*(carried[f"allreduce.{name}.{i}"] for i in range(count)), strict=True)
        for (launched, noticed), burst in list(zip(times, own, strict=True))[WARM_UP:]:
            begin, end = min(one for one, _ in burst), max(one for _, one in burst)
            looked = cycles[max(0, bisect_right(cycles, begin) - 1)]
            rows.setdefault(name, []).append([launched, looked, begin, end, noticed])
    offset = min(row[4] - row[3] for name, own in rows.items() if "spins" in name for row in own)
    result = {}
    for name, own in rows.items():
        clocks = [[row[0], *(at + offset for at in row[1:4]), row[4]] for row in own]
        split = [[b - a for a, b in pairwise(row)] for row in clocks]
        result[name] = dict(zip(PARTS, map(median, zip(*split, strict=True)), strict=True))
        result[name]["whole"] = median(row[4] - row[0] for row in clocks)
    return result


def main() -> int:
    """Run every backend and number of hosts in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit", help="of the links (default 1gbit)")
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--backends", nargs="+", default=["gloo", "mpi"])
    parser.add_argument("--rounds", type=int, default=40, help="messages of each kind")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.rounds)
        return 0
    busy = os.getloadavg()[0]
    results: dict[str, dict[str, dict[str, float]]] = {}
    try:
        for hosts in options.hosts:
            with Cluster(hosts, options.rate) as cluster:
                for backend in options.backends:
                    with tempfile.NamedTemporaryFile(suffix=".json") as timeline:
                        env = {**ENV, "HOROVOD_TIMELINE": timeline.name}
                        words = [__file__, "--rounds", str(options.rounds)]
                        clock = run_on(cluster, words, backend, env)["clock"]
                        text = Path(timeline.name).read_text()
                    results[f"{backend}, {hosts} ranks"] = taken_apart(clock, text)
    except (ClusterError, subprocess.TimeoutExpired) as error:
        print(f"message_cost: {error}", file=sys.stderr)
        return 2
    parts = (*PARTS, "whole")
    table = [
        [key, name, *(f"{1e3 * row[part]:.2f}" for part in parts)]
        for key, rows in results.items()
        for name, row in rows.items()
    ]
    print(f"Milliseconds of messages, {options.rate}, load {busy:.1f} at the start\n")
    print(markdown(["", "bytes/messages/thread", *parts], table))
    if options.json:
        write_json(options.json, {"rate": options.rate, "load": busy, "seconds": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
