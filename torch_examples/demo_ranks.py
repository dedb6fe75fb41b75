"""What a worker of the demo does, in PyTorch; `demo.py` starts two of them and draws the results.

All rows start from the same weights and see the same images in the same order.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import horovod.torch as stock
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hvd_pipe.torch as hvd
from data import Data, load
from demo_course import BATCH, LR, MOMENTUM, ROWS, WIDTHS, Job, watched

SHOWN, SKIPPED_STEPS, SHOWN_STEPS = ("stock Horovod", "overlap=forward"), 8, 5


def net(classes: int) -> nn.Module:
    """Return a convolutional net of 20 tensors and 3.0 MiB, for images that it enlarges."""
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Upsample(24, mode="bilinear")]
    inputs = 1
    for width in WIDTHS:
        layers.append(nn.Conv2d(inputs, width, 3, padding=1, bias=False))
        layers += [nn.BatchNorm2d(width, momentum=0.3), nn.ReLU()]
        if width in (64, 128):
            layers.append(nn.MaxPool2d(2))
        inputs = width
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)
    )


class Row:
    """A model that one strategy trains."""

    def __init__(self, name: str, data: Data) -> None:
        self.name, self.data, self.strategy = name, data, ROWS.get(name)
        self.model = self.forward = net(data.num_classes)
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), LR, MOMENTUM)
        named = list(self.model.named_parameters())
        if name == "stock Horovod":
            self.optimizer = stock.DistributedOptimizer(self.optimizer, named)
        elif name == "PyTorch DDP":
            self.forward = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        elif self.strategy:
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, named, strategy=self.strategy
            )
        self.first = {key: value.clone() for key, value in self.model.state_dict().items()}
        self.forward_ends: list[float] = []
        self.waits: list[tuple[float, float]] = []  # of stock Horovod, which polls meanwhile

    def step(self, index: Tensor) -> None:
        """Train on these images."""
        x, y = self.data.train_x[index], self.data.train_y[index]
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.forward(x), y)
        self.forward_ends.append(time.perf_counter())
        loss.backward()
        if self.name == "stock Horovod":
            begun = time.perf_counter()
            self.optimizer.synchronize()
            self.waits.append((begun, time.perf_counter()))
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        else:
            self.optimizer.step()

    def drain(self) -> None:
        """Take in what is in flight, before the model is evaluated."""
        if self.strategy:
            self.optimizer.synchronize()

    def settle(self, steps: int) -> None:
        """Train for some steps, then go back to the first weights."""
        for number in range(steps):
            self.step(torch.arange(BATCH) + number)
        self.drain()
        self.optimizer.zero_grad()
        self.model.load_state_dict(self.first)
        for state in self.optimizer.state.values():
            state["momentum_buffer"].zero_()

    def train(self, epoch: int, lr: float) -> None:
        """Train for an epoch, and take in what is in flight at its end."""
        self.optimizer.param_groups[0]["lr"] = lr
        for index in batches(len(self.data.train_x), epoch):
            self.step(index)
        self.drain()

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the accuracy on the test images, of which each rank looks at its own."""
        self.model.eval()
        x, y = (part[hvd.rank() :: hvd.size()] for part in (self.data.test_x, self.data.test_y))
        right = mean(float((self.model(x).argmax(1) == y).sum()))
        self.model.train()
        return right / mean(len(y))


def batches(n: int, epoch: int) -> Iterator[Tensor]:
    """Yield this rank's minibatches of an epoch, as indices; no image comes twice."""
    size, rank = hvd.size(), hvd.rank()
    steps = n // (BATCH * size)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch))
    yield from order[: steps * size * BATCH].view(steps, size, BATCH)[:, rank]


def join_torch() -> None:
    """Make torch's default group, for DDP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = stock.broadcast_object(free.getsockname()[1], 0, name="port")
    store = dist.TCPStore("127.0.0.1", port, hvd.size(), hvd.rank() == 0)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def mean(value: float) -> float:
    """Return the mean over all ranks."""
    return float(stock.allreduce(torch.tensor([value], dtype=torch.float64), name="mean"))


def computing_s(data: Data) -> float:
    """Return the seconds of a step that sends nothing, while the other worker computes, too."""
    row, times = Row("alone", data), []
    for index in list(batches(len(data.train_x), 0))[:20]:
        mean(0.0)
        begun = time.perf_counter()
        row.step(index)
        times.append(time.perf_counter() - begun)
    return mean(median(times[5:]))


def show(row: Row, folder: Path) -> dict[str, Any]:
    """Return what the link and this worker do in some steps."""
    indices = list(batches(len(row.data.train_x), 0))[: SKIPPED_STEPS + SHOWN_STEPS]
    mean(0.0)
    with watched(folder, hvd.rank() == 0) as samples:
        ends = []
        for index in indices:
            row.step(index)
            ends.append(time.perf_counter())
    row.drain()
    # The first steps begin with nothing in flight.
    begun, *ends = ends[SKIPPED_STEPS - 1 :]
    seen = {"begun": begun, "ends": ends, "waits": row.waits, "samples": samples}
    return {**seen, "forward_ends": row.forward_ends[-SHOWN_STEPS:]}


def main() -> None:
    folder, is_limited = Path(sys.argv[1]), "limited" in sys.argv[2:]
    # hvd_pipe switches this buffer off for the process; stock Horovod is to have its default.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(128 * 2**20))
    hvd.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    join_torch()
    data = load()
    rows = [Row(name, data) for name in ROWS]
    nbytes = sum(parameter.nbytes for parameter in rows[0].model.parameters())
    job = Job(
        *(folder, is_limited, hvd.rank() == 0),
        nbytes=nbytes,
        steps=len(data.train_x) // (BATCH * hvd.size()),
        mean=mean,
        all_reduce=partial(dist.all_reduce, torch.zeros(nbytes // 4)),
        computing_s=partial(computing_s, data),
    )
    job.run(rows, lambda: {row.name: show(row, folder) for row in rows if row.name in SHOWN})
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
