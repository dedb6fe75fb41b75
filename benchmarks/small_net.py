"""A small net on a fast network, where a message's latency and own code are what counts.

    horovodrun --gloo -np 2 python benchmarks/small_net.py
    mpirun -np 2 python benchmarks/small_net.py

All contestants (`contestants.py`) train the net of the demo's size in one job, and take turns; the
figures are medians of milliseconds a step, and of one rank's processor.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from pathlib import Path
from statistics import median

import horovod.torch as stock
import torch
import torch.distributed as dist
from contestants import Contestant, make
from harness import markdown, write_json
from torch import nn

import hvd_pipe.torch as hvd

CONTESTANTS = (
    *("single", "horovod", "ddp", "merged-gradient@horovod", "merged-gradient@torch"),
    *("merged-gradient:overlap=forward@horovod", "merged-gradient:overlap=forward@torch"),
    *("pipe-sgd@horovod", "pipe-sgd@torch"),
)
SETTLE_STEPS = 80  # until all plans were tried
STEPS = 40


def net() -> nn.Module:
    """Return a net of 10 tensors and 300 KiB, for images of 8 x 8."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def join_torch() -> None:
    """Make torch's default group, for DDP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = stock.broadcast_object(free.getsockname()[1], 0, name="port")
    rank, size = stock.rank(), stock.size()
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def main() -> None:
    """Race all contestants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    join_torch()
    images, labels = torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,))
    loss = nn.CrossEntropyLoss()
    racing: dict[str, Contestant] = {}
    for name in options.contestants:
        model = net()
        racing[name] = make(name, model, lambda model=model: loss(model(images), labels))
        for _ in range(SETTLE_STEPS):
            racing[name].step()
    load = os.getloadavg()[0]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in racing}
    for _ in range(options.rounds):
        for name, contestant in racing.items():
            dist.barrier()
            begun, busy = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                contestant.step()
            busy = time.process_time() - busy
            dist.barrier()
            times[name].append(((time.perf_counter() - begun) / STEPS, busy / STEPS))
    rows = {
        name: [1e3 * median(part) for part in zip(*samples, strict=True)]
        for name, samples in times.items()
    }
    if stock.rank() == 0:
        launcher = "MPI" if stock.mpi_enabled() else "Gloo"
        print(f"{stock.size()} ranks of this machine, {launcher}, load {load:.1f} at the start\n")
        table = [
            [name, f"{step:.2f}", f"{busy:.2f}", f"{rows['horovod'][0] / step:.2f}"]
            for name, (step, busy) in rows.items()
        ]
        print(markdown(["", "ms a step", "processor", "times stock"], table), flush=True)
        if options.json:
            write_json(options.json, {"launcher": launcher, "load": load, "rows": rows})
    for contestant in racing.values():
        contestant.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
