"""One rank of `kill_loop.py`: it trains until something happens to it, or to the step it is told.

    python kill_loop_rank.py '{"folder": ..., "job": 3, "strategy": "pipe-sgd", ...}'

A rank writes into the job's folder: its process, its steps, its errors' text, its checkpoints, and
what its weights are at each of them. Whoever resumes it tells it the checkpoint.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hvd_pipe.torch as hvd

KEPT = 3  # checkpoints: other ranks may not have the newest
BATCHES = 8  # of an epoch of a pipeline
PER_NODE = 2  # ranks, for within=node
LR = 2.0**-6


@dataclass(frozen=True)
class Task:
    """What a rank is told."""

    folder: str  # of the run, with its checkpoints; all ranks see it
    job: int  # counts the run's starts
    strategy: str  # as in strategy=, with +int8 for a codec; or pipedream: and a mode
    seed: int
    start: int  # the checkpoint to go on from; 0 for none
    stop: int  # the last step; 0 for none
    every: int  # steps between two checkpoints
    pause_s: float  # of each step

    @property
    def place(self) -> Path:
        """The folder of this start."""
        return Path(self.folder) / f"job-{self.job}"

    @property
    def saves_each(self) -> bool:
        """Whether each rank has a checkpoint of its own (docs/checkpoints.md)."""
        return self.strategy.startswith("cocod") or "+" in self.strategy


def publish(path: Path, text: str) -> None:
    """Write a file that is whole or not there."""
    part = path.with_name(f"{path.name}.part{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def add(path: Path, line: str) -> None:
    """Write a line that is whole or not there."""
    with path.open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


def introduce(task: Task) -> None:
    """Say who this process is, and send its errors where they outlive its connections."""
    who = {"pid": os.getpid(), "host": socket.gethostname(), "rank": hvd.rank()}
    publish(task.place / f"pid.{hvd.rank()}", json.dumps(who))
    said = os.open(task.place / f"said.{hvd.rank()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, sys.stderr.fileno())
    os.close(said)
    faulthandler.register(signal.SIGUSR2)  # a rank that does not end says where it is


def batch(task: Task, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """The samples of a step: a function of the seed, the rank and the step alone."""
    seed = (task.seed * 1_000_003 + rank) * 1_000_003 + step
    numbers = torch.randn(8, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers[:, :6], numbers[:, 6:]


def make_model() -> nn.Sequential:
    """Return a small net with the same weights on every rank."""
    torch.manual_seed(7)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.5)


def digest(state: dict[str, Tensor]) -> str:
    """SHA-256 of all tensors: equal only if every bit is."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(state[name].detach().contiguous().numpy().tobytes())
    return found.hexdigest()


class Steps:
    """What happens between two steps: others read the number; a rank that is told to raises."""

    def __init__(self, task: Task, rank: int) -> None:
        self._task, self._rank = task, rank
        self._told = task.place / f"raise.{rank}"

    def next(self, step: int) -> None:
        publish(self._task.place / f"step.{self._rank}", str(step))
        if self._told.exists():
            raise ValueError(f"bad sample in step {step}")
        time.sleep(self._task.pause_s)


# Restarts from checkpoints ----------------------------------------------------------------------


def train(task: Task) -> None:
    """Train by a strategy with checkpoints, from one of them if there is any."""
    hvd.init(process_sets="dynamic" if "within=node" in task.strategy else None)
    rank, folder = hvd.rank(), Path(task.folder)
    os.environ["HOROVOD_HOSTNAME"] = f"node-{rank // PER_NODE}"  # what within=node goes by
    name, _, codec = task.strategy.partition("+")
    model = make_model()
    optimizer: Any = hvd.DistributedOptimizer(
        make_optimizer(model.parameters()),
        model.named_parameters(),
        strategy=name,
        compression=hvd.Int8(error_feedback=True) if codec else hvd.Compression.none,
    )
    introduce(task)
    if task.start:
        source = rank if task.saves_each else 0
        saved = torch.load(folder / f"step-{task.start}.rank{source}.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    steps = Steps(task, rank)
    for step in range(task.start + 1, task.stop + 1 if task.stop else sys.maxsize):
        inputs, targets = batch(task, rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if step % task.every == 0:
            if task.saves_each or rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                save(folder, rank, step, task.every, state)
            add(folder / f"digests.{rank}", f"{step} {digest(model.state_dict())}")
        steps.next(step)
    optimizer.synchronize()
    add(folder / f"digests.{rank}", f"end-{task.stop} {digest(model.state_dict())}")


def save(folder: Path, rank: int, step: int, every: int, state: dict[str, Any]) -> None:
    """Write a checkpoint that is whole or not there; old ones go."""
    path = folder / f"step-{step}.rank{rank}.pt"
    part = path.with_suffix(".part")
    torch.save(state, part)
    part.replace(path)
    (folder / f"step-{step - KEPT * every}.rank{rank}.pt").unlink(missing_ok=True)


def train_pipeline(task: Task) -> None:
    """Train a pipeline, with a checkpoint after each epoch; a step is an epoch here."""
    from hvd_pipe.torch import pipedream  # noqa: PLC0415 - only these ranks need it

    pipedream.init()
    rank, folder = hvd.rank(), Path(task.folder)
    introduce(task)
    plan = folder / "plan.json"  # measured by the first job: other stages would be other sums
    engine: Any = pipedream.PipeDream(
        make_model(),
        nn.functional.mse_loss,
        make_optimizer,
        plan=plan if plan.exists() else "straight",
        mode=task.strategy.partition(":")[2],
        sample=batch(task, 0, BATCHES),
        progress=False,
    )
    if task.start:
        engine.load(folder / f"step-{task.start}.rank0.pt")
    steps = Steps(task, rank)
    for step in range(task.start + 1, task.stop + 1 if task.stop else sys.maxsize):
        engine.train_epoch([batch(task, 0, step * BATCHES + each) for each in range(BATCHES)])
        part, path = folder / f"part-{task.job}-{step}", folder / f"step-{step}.rank0.pt"
        engine.save(part)
        if rank == 0:
            if not plan.exists():
                engine.partition.save(plan)
            saved = torch.load(part / "model.pt", weights_only=True)
            if path.exists():  # a job that was killed has left it, and resumed before
                shutil.rmtree(path)
            part.rename(path)
            shutil.rmtree(folder / f"step-{step - KEPT}.rank0.pt", ignore_errors=True)
            word = f"end-{step}" if step == task.stop else str(step)
            add(folder / "digests.0", f"{word} {digest(saved)}")
        steps.next(step)


def main() -> None:
    """Train as told."""
    torch.set_num_threads(1)
    task = Task(**json.loads(sys.argv[1]))
    if task.strategy.startswith("pipedream"):
        train_pipeline(task)
    else:
        train(task)


if __name__ == "__main__":
    main()
