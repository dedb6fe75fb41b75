"""What a step costs on a GPU: what runs beside what, and images a second."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import horovod.torch as stock
import pytest
import torch
import torch.distributed as dist
from profile_events import overlap, waits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvd_pipe.torch as hvd
from torch_examples import models as zoo

pytestmark = pytest.mark.cuda
Record = Callable[[str, object], None]

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
    """A model with its optimizer and a batch, in bfloat16 where there is a GPU."""

    def __init__(self, name: str, contestant: str, device: torch.device) -> None:
        torch.manual_seed(5)
        self.device = device
        self.contestant = contestant
        small = device.type == "cpu"
        if name == "transformer":
            words, length, width = (500, 16, 64) if small else (8192, 256, 512)
            model: nn.Module = Transformer(width, 2 if small else 8, words)
            x = torch.randint(words, (4 if small else 64, length))
            y = torch.randint(words, x.shape)
        else:
            model = zoo.build("resnet18" if small else "resnet50")
            x = torch.randn((4, 3, 64, 64) if small else (64, 3, 224, 224))
            y = torch.randint(1000, x.shape[:1])
        self.x, self.y = x.to(device), y.to(device)
        self.model = model.to(device)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=1e-4, momentum=0.9
        )
        named = self.model.named_parameters()
        if contestant == DDP:
            join_ddp(device)
            devices = None if small else [device.index]
            self.model = DistributedDataParallel(self.model, device_ids=devices)
        elif contestant == STOCK:
            self.optimizer = stock.DistributedOptimizer(self.optimizer, named)
        elif contestant != PLAIN:
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, named, strategy=contestant)
        self.warm_up = 6 if small else 30 if contestant == "merged-gradient" else 5  # it measures

    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"
            ):
                out = self.model(self.x)
            loss = nn.functional.cross_entropy(out.float().flatten(0, -2), self.y.flatten())
            loss.backward()
            self.optimizer.step()

    def wait(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def end(self) -> None:
        if self.contestant in STRATEGIES:
            self.optimizer.synchronize()  # type: ignore[attr-defined]
        gc.collect()


def join_ddp(device: torch.device) -> None:
    if dist.is_initialized():
        return
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{os.environ['GPU_CHECK_RESULTS']}.store",
        rank=hvd.rank(),
        world_size=hvd.size(),
    )


@pytest.mark.parametrize("contestant", [STOCK, *STRATEGIES])
def test_profile(
    contestant: str, device: torch.device, tmp_path: Path, record_property: Record
) -> None:
    """A step waits for the device once: for the control flags, which the ranks must agree on."""
    task = Task("transformer", contestant, device)
    cuda = device.type == "cuda"
    steps = 8 if cuda else 4
    task.steps(task.warm_up)
    task.wait()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as recorded:
        task.steps(steps)
        # The host is ahead of the device now, by what it has not waited for.
        begun = time.perf_counter()
        task.wait()
        ahead_s = time.perf_counter() - begun
    task.end()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found, waited = overlap(events), waits(events)
    # Two calls are not the step's: ours above, and the profiler's at its end.
    calls = (sum(map(len, waited.values())) - 2 * cuda) / steps
    spent_ms = sum(map(sum, waited.values())) / steps / 1000
    hidden = found["hidden_us"] / found["communication_us"] if found["communication_us"] else 0.0
    text = (
        f"{hidden:.0%} of {found['communication_us'] / steps / 1000:.2f} ms of communication a "
        f"step beside kernels; {found['copied_beside'] / steps:.0f} of "
        f"{found['copied'] / steps:.0f} bytes copied; {calls:.1f} waits a step of "
        f"{spent_ms:.3f} ms; the host ended {1000 * ahead_s:.2f} ms ahead"
    )
    record_property("text", text)
    record_property("numbers", {**found, "waits": waited, "steps": steps, "ahead_s": ahead_s})
    record_property("judged", cuda)
    assert calls <= 1.0


@pytest.mark.parametrize("contestant", [PLAIN, STOCK, DDP, *STRATEGIES])
@pytest.mark.parametrize("model", ["ResNet", "transformer"])
def test_speed(model: str, contestant: str, device: torch.device, record_property: Record) -> None:
    """Images (of ResNet-50 on a GPU, of ResNet-18 on a CPU) and sequences a second."""
    task = Task(model, contestant, device)
    steps = 10 if device.type == "cuda" else 6
    task.steps(task.warm_up)
    task.wait()
    hvd.barrier()
    begun = time.perf_counter()
    task.steps(steps)
    task.wait()
    hvd.barrier()
    step_s = (time.perf_counter() - begun) / steps
    task.end()
    rate = len(task.x) * hvd.size() / step_s
    unit = "sequences" if model == "transformer" else "images"
    record_property("text", f"{rate:.1f} {unit}/s")
    record_property("numbers", {"per_second": rate, "step_s": step_s, "ranks": hvd.size()})
    record_property("judged", False)
