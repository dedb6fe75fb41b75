"""What it costs: memory over many steps, what runs beside what, and images a second.

Each section is a function of a `rank.Place` that returns named jobs.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import horovod.torch as stock
import hvd_pipe.torch as hvd
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_examples import models as zoo

from profile_events import overlap, waits
from rank import Found, Job, Place

STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=4")
PLAIN, STOCK, DDP = "no communication", "stock Horovod", "DDP"


class Transformer(nn.Module):
    """An encoder over token embeddings, with an output layer of the vocabulary's size."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.output(self.encoder(self.embedding(x)))
        return result


class Task:
    """A model on a device, with a batch to train on, in bfloat16 where there is a GPU."""

    def __init__(self, name: str, place: Place) -> None:
        torch.manual_seed(5)
        self.place = place
        if name != "transformer":
            self.model: nn.Module = zoo.build("resnet18" if place.small else "resnet50")
            size = (4, 3, 64, 64) if place.small else (64, 3, 224, 224)
            self.x = torch.randn(size)
            self.y = torch.randint(1000, size[:1])
        else:
            words, length, width = (500, 16, 64) if place.small else (8192, 256, 512)
            self.model = Transformer(width, 2 if place.small else 8, words)
            self.x = torch.randint(words, (4 if place.small else 64, length))
            self.y = torch.randint(words, self.x.shape)
        self.model = self.model.to(place.device)
        self.x, self.y = self.x.to(place.device), self.y.to(place.device)
        self.called = self.model

    @property
    def items(self) -> int:
        """How many images, or sequences, a step has."""
        return len(self.x)

    def loss(self) -> torch.Tensor:
        kind = self.place.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=self.place.cuda):
            out = self.called(self.x)
        return nn.functional.cross_entropy(out.float().flatten(0, -2), self.y.flatten())


def _optimizer(task: Task, who: str, compression: object = None) -> torch.optim.Optimizer:
    plain = torch.optim.SGD(task.model.parameters(), lr=1e-4, momentum=0.9)
    if who in (PLAIN, DDP):
        if who == DDP:
            devices = [task.place.device.index] if task.place.cuda else None
            task.called = DistributedDataParallel(task.model, device_ids=devices)
        return plain
    named = task.model.named_parameters()
    if who == STOCK:
        made: torch.optim.Optimizer = stock.DistributedOptimizer(plain, named)
        return made
    more = {} if compression is None else {"compression": compression}
    ours: torch.optim.Optimizer = hvd.DistributedOptimizer(plain, named, strategy=who, **more)
    return ours


def _step(task: Task, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    task.loss().backward()
    optimizer.step()


def _warm_up(place: Place, who: str) -> int:
    """Merged-gradient measures for some steps before it plans."""
    if place.small:
        return 6
    return 30 if who == STRATEGIES[0] else 5


def _finish(optimizer: torch.optim.Optimizer, who: str) -> None:
    if who in STRATEGIES:
        optimizer.synchronize()  # type: ignore[attr-defined]
    gc.collect()


# Memory


def memory(place: Place) -> dict[str, Job]:
    """Many steps with each strategy, and with a codec that allocates: nothing may pile up."""
    cells = [*((who, None) for who in STRATEGIES), ("pipe-sgd", hvd.Compression.int8)]
    return {
        f"{who}{'' if codec is None else f', {codec!r}'}": partial(_memory, place, who, codec)
        for who, codec in cells
    }


def _memory(place: Place, who: str, codec: object) -> Found:
    steps, settled = (200, 100) if place.small else (1000, 200)
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))).to(place.device)
    plain = torch.optim.SGD(model.parameters(), lr=1e-4)
    more = {} if codec is None else {"compression": codec}
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=who, **more)
    x = torch.randn(32, 256, device=place.device)
    before = _held(place)
    for step in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step + 1 == settled:
            optimizer.synchronize()  # what is in flight holds memory, more or less of it
            before = _held(place)
    optimizer.synchronize()
    after = _held(place)
    _finish(optimizer, who)
    grown = {name: after[name] - before[name] for name in after}
    # The resident set of a process moves by the allocator's own habits; a GPU's count is exact.
    limit = 0 if place.cuda else 16 * 2**20
    good = grown["bytes"] <= limit and grown["retries"] == 0
    text = (
        f"{grown['bytes']:+d} bytes and {grown['retries']:+d} retries, steps {settled} to {steps}"
    )
    return Found(good, text, {"steps": steps, **grown})


def _held(place: Place) -> dict[str, int]:
    """What is allocated now; of a CPU, the resident set."""
    gc.collect()
    if not place.cuda:
        return {"bytes": int(psutil.Process().memory_info().rss), "retries": 0}
    place.wait()
    statistics = torch.cuda.memory_stats()
    return {
        "bytes": torch.cuda.memory_allocated(),
        "retries": int(statistics["num_alloc_retries"]),
    }


# The profile of some steps


def profile(place: Place) -> dict[str, Job]:
    """What moves beside kernels in some steps, and when the host waits for the device."""
    return {who: partial(_profile, place, who) for who in (STOCK, *STRATEGIES)}


def _profile(place: Place, who: str) -> Found:
    task = Task("transformer", place)
    optimizer = _optimizer(task, who)
    steps = 4 if place.small else 8
    for _ in range(_warm_up(place, who)):
        _step(task, optimizer)
    place.wait()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if place.cuda:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as recorded:
        for _ in range(steps):
            _step(task, optimizer)
        # The host is ahead of the device now, by what it has not waited for.
        begun = time.perf_counter()
        place.wait()
        ahead_s = time.perf_counter() - begun
    _finish(optimizer, who)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found, waited = overlap(events), waits(events)
    # Two calls are not the step's: ours above, and the profiler's at its end.
    own = 2 * place.cuda
    calls = (sum(row["calls"] for row in waited.values()) - own) / steps
    spent = sum(row["us"] for row in waited.values()) / steps / 1000
    text = (
        f"{found['hidden']:.0%} of {found['communication_us'] / steps / 1000:.2f} ms of "
        f"communication a step beside kernels; {found['copied_beside_kernels_bytes'] / steps:.0f} "
        f"of {found['copied_bytes'] / steps:.0f} bytes copied; {calls:.1f} waits a step of "
        f"{spent:.3f} ms; the host ended {1000 * ahead_s:.2f} ms ahead"
    )
    numbers = {**found, "waits": waited, "steps": steps, "ahead_s": ahead_s}
    # Each wait in the threads that compute is one that we have made: the words' copy, once a step.
    return Found(None if not place.cuda else calls <= 1.0, text, numbers)


# Speed


def speed(place: Place) -> dict[str, Job]:
    """Images and sequences a second, beside stock Horovod, DDP and no communication at all."""
    contestants = (PLAIN, STOCK, DDP, *STRATEGIES)
    return {
        f"{model}, {who}": partial(_speed, place, model, who)
        for model in ("ResNet-18, 64x64" if place.small else "ResNet-50", "transformer")
        for who in contestants
    }


def _speed(place: Place, model: str, who: str) -> Found:
    if who == DDP:
        _join_ddp(place)
    task = Task(model, place)
    optimizer = _optimizer(task, who)
    steps = 6 if place.small else 10
    for _ in range(_warm_up(place, who)):
        _step(task, optimizer)
    place.wait()
    hvd.barrier()
    begun = time.perf_counter()
    for _ in range(steps):
        _step(task, optimizer)
    place.wait()
    hvd.barrier()
    seconds = (time.perf_counter() - begun) / steps
    _finish(optimizer, who)
    rate = task.items * hvd.size() / seconds
    text = f"{rate:.1f} {'sequences' if model == 'transformer' else 'images'}/s"
    return Found(None, text, {"per_second": rate, "step_s": seconds, "ranks": hvd.size()})


def _join_ddp(place: Place) -> None:
    if dist.is_initialized():
        return
    store = Path(os.environ["KIT_STORE"])
    dist.init_process_group(
        "nccl" if place.cuda and os.environ.get("KIT_RANKS_ON_A_GPU") != "host" else "gloo",
        init_method=f"file://{store}",
        rank=hvd.rank(),
        world_size=hvd.size(),
    )


SECTIONS: dict[str, Callable[[Place], dict[str, Job]]] = {
    "memory": memory,
    "profile": profile,
    "speed": speed,
}
