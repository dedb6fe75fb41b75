"""Pipelines that write timelines."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from cases import Raised, run_cases
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.runtime.timeline.recorder import OFF, TraceRecorder
from hvd_pipe.torch import pipedream
from hvd_pipe.torch.measuring import timeline

WORKERS, MINIBATCHES, BATCH = 3, 7, 8

CASES = {
    # plan, mode, microbatches
    "straight": ("straight", "stash", None),
    "replicas": ("2-1", "stash", None),
    "last replicas": ("1-2", "vertical-sync", None),
    "microbatches": ("2-1", "2bw", 4),
    "flush": ("straight", "flush", 3),
}
PLAIN_STEPS = 5


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (m for _ in range(3) for m in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()))
    return nn.Sequential(*layers, nn.Linear(16, 3))


def make_engine(plan: str, mode: str, microbatches: int | None) -> pipedream.PipeDream:
    return pipedream.PipeDream(
        make_model(),
        nn.functional.cross_entropy,
        partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        plan=plan,
        mode=mode,
        microbatches=microbatches,
        bandwidth=1e9,
        progress=False,
    )


def loader() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 16, generator=generator), torch.arange(BATCH) % 3)
        for _ in range(MINIBATCHES)
    ]


def begin(directory: Path) -> None:
    """Be as a new process that writes there; what was written is on the disk."""
    if isinstance(timeline.active, TraceRecorder):
        timeline.active.file.close()
    timeline.active = OFF
    os.environ[timeline.DIRECTORY] = str(directory)


def run(directory: Path, plan: str, mode: str, microbatches: int | None) -> tuple[int, int]:
    """Train an epoch, and return this worker's stage and the updates it made."""
    begin(directory)
    engine = make_engine(plan, mode, microbatches)
    engine.train_epoch(loader())
    assert isinstance(timeline.active, TraceRecorder)
    return engine.stage, timeline.active._step


def evaluate(directory: Path) -> None:
    begin(directory)
    make_engine("2-1", "stash", None).evaluate(loader())


def beside(directory: Path) -> None:
    """Train another model without a pipeline after one with: its passes are found by hooks."""
    begin(directory)
    make_engine("2-1", "stash", None).train_epoch(loader())
    model = nn.Linear(4, 4)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
    )
    for _ in range(PLAIN_STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def refused(directory: Path) -> str:
    """Ask for a directory that rank 1 cannot write."""
    if hvd.rank() == 1:
        directory = directory / "file"
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.write_text("")
    begin(directory)
    try:
        make_engine("2-1", "stash", None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def written(directory: Path) -> dict[str, object | Raised]:
    pipedream.init()
    torch.set_num_threads(1)
    cases = {name: partial(run, directory / name, *case) for name, case in CASES.items()}
    more = {
        "evaluation": partial(evaluate, directory / "evaluation"),
        "beside": partial(beside, directory / "beside"),
        "refused": partial(refused, directory / "refused"),
    }
    results = run_cases({**cases, **more})
    if isinstance(timeline.active, TraceRecorder):
        timeline.active.file.close()
    return results
