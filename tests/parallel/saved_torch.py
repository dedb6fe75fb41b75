"""Checkpoints of PyTorch: written by `make_saved.py`, and how runs go on from any version's."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from saved_problem import LR, MOMENTUM, PLANNED, SAVED, SHAPES, STEPS, Array, target
from torch import nn
from torch.optim import SGD, Adam

import hvd_pipe.torch as hvd
from hvd_pipe.torch import pipedream


@dataclass(frozen=True)
class Case:
    """One run, which is saved, and what it came to some steps later.

    Args:
        strategy: Of the optimizer.
        optimizer: "momentum" or "adam", which has two groups.
        codec: One of `CODECS`.
        passes: Backward passes a step.
        saved: Steps before the checkpoint.
        pickled: Whether model and optimizer are pickled, not their state dicts.
    """

    strategy: str
    optimizer: str = "momentum"
    codec: str = "none"
    passes: int = 1
    saved: int = SAVED
    pickled: bool = False

    def __str__(self) -> str:
        text = f"{self.strategy} {self.optimizer} {self.codec} {self.passes} {self.saved}"
        return re.sub(r"[:,=/ ]", "-", text + " pickled" * self.pickled)


CODECS: dict[str, Callable[[], Any]] = {
    "none": lambda: hvd.Compression.none,
    "fp16": lambda: hvd.Compression.fp16,
    "bf16": lambda: hvd.Compression.bf16,
    "bf16 feedback": lambda: hvd.BF16(error_feedback=True),
    "int8": lambda: hvd.Compression.int8,
    "int8 feedback": lambda: hvd.Int8(chunk=4, error_feedback=True),
}
BASE = ("merged-gradient:plan=wfbp", "pipe-sgd", "cocod:period=4")
OPTIONS = (
    "merged-gradient",
    "merged-gradient:plan=single",
    "pipe-sgd:warmup_steps=9",
    "pipe-sgd:prediction=local",
    "pipe-sgd:prediction=previous",
    "pipe-sgd:bucket_bytes=64",
    "cocod:period=4,warmup_steps=9",
    "cocod:period=4,momentum=average",
    "cocod:period=4,pull_back=0.5,anchor_momentum=0.5",
    "cocod:period=4,outer=nesterov,outer_lr=0.25,outer_momentum=0.5",
    "cocod:period=4,weights=3/1",
)
CASES = [
    *(Case(strategy) for strategy in (*BASE, *OPTIONS)),
    *(Case(strategy, codec=codec) for strategy in BASE for codec in CODECS if codec != "none"),
    *(Case(strategy, "adam") for strategy in (*BASE, *OPTIONS[3:5], OPTIONS[7])),
    *(Case(strategy, passes=2) for strategy in BASE),
    Case("merged-gradient", saved=PLANNED),
    Case("auto:allow=pipe-sgd,steps=3", saved=PLANNED),
    Case("pipe-sgd", saved=1),
    Case("cocod:period=4", saved=8),
    *(Case(strategy, pickled=True) for strategy in BASE),
    Case("cocod:period=4", codec="int8 feedback", pickled=True),
    Case("auto:allow=pipe-sgd,steps=3", saved=PLANNED, pickled=True),
]
FIRST = [Case(strategy, codec=codec) for strategy in BASE for codec in ("none", "int8 feedback")]
"""Also loaded on all ranks from rank 0's file, where ranks do not have files of their own."""


def start(case: Case, first: float = 0.0) -> tuple[nn.Module, Any]:
    """A model and its wrapped optimizer."""
    model = nn.ParameterList(torch.full(shape, first, dtype=torch.float64) for shape in SHAPES)
    parameters = list(model.parameters())
    plain: Any = SGD(parameters, lr=LR, momentum=MOMENTUM)
    if case.optimizer == "adam":
        plain = Adam([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}], lr=0.01)
    optimizer = hvd.DistributedOptimizer(
        plain,
        model.named_parameters(),
        strategy=case.strategy,
        compression=CODECS[case.codec](),
        backward_passes_per_step=case.passes,
    )
    return model, optimizer


def advance(case: Case, model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    exact = "int8" not in case.codec
    for step in range(first, last):
        optimizer.zero_grad()
        for number in range(case.passes):
            loss = torch.zeros((), dtype=torch.float64)
            for place, p in enumerate(model.parameters()):
                there = target(
                    SHAPES[place], place, hvd.rank(), step * case.passes + number, exact
                )
                loss = loss + ((p - torch.from_numpy(there)) ** 2).sum() / 2
            loss.backward()
        optimizer.step()


def ended(case: Case, model: nn.Module, optimizer: Any) -> Array:
    """Weights after some more steps and after `synchronize`, then the optimizer's state."""
    advance(case, model, optimizer, case.saved, case.saved + STEPS)
    rows = [p.detach().clone() for p in model.parameters()]
    optimizer.synchronize()
    owned = list(model.parameters())
    state = [optimizer.state[p] for p in owned]
    rows += [*owned, *(torch.as_tensor(one[key]) for one in state for key in sorted(one))]
    return np.concatenate([row.detach().double().numpy().ravel() for row in rows])


def write(case: Case, folder: Path) -> Array:
    """Write each rank's checkpoint; return what the run itself came to."""
    model, optimizer = start(case)
    advance(case, model, optimizer, 0, case.saved)
    path = folder / f"rank{hvd.rank()}" / f"{case}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    if case.pickled:
        path.write_bytes(pickle.dumps((model, optimizer)))
    else:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return ended(case, model, optimizer)


def go_on(case: Case, folder: Path, rank: int) -> Array:
    """What a run comes to that loads a rank's checkpoint."""
    path = folder / f"rank{rank}" / f"{case}.pt"
    if case.pickled:
        model, optimizer = pickle.loads(path.read_bytes())
        return ended(case, model, optimizer)
    checkpoint = torch.load(path, weights_only=True)
    model, optimizer = start(case, first=8.0)
    model.load_state_dict(checkpoint["model"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(checkpoint["optimizer"])
    return ended(case, model, optimizer)


@dataclass(frozen=True)
class Pipeline:
    """A pipeline's run of an epoch, which is saved, and of one more.

    Args:
        mode: Of the versions of the weights.
        plan: Of workers.
    """

    mode: str
    plan: str

    def __str__(self) -> str:
        return f"pipedream-{self.mode}-{self.plan}"

    def start(self, first: float) -> Any:
        torch.manual_seed(5)
        stages = [
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()),
            nn.Sequential(nn.Dropout(0.25), nn.Linear(4, 2)),
        ]
        for stage in stages:
            for number, p in enumerate(stage.double().parameters()):
                values = target(p.shape, number, 0, 3, exact=True)
                nn.init.zeros_(p).data.add_(torch.from_numpy(values) / 4 + first)
        return pipedream.PipeDream(
            stages if self.plan == "straight" else nn.Sequential(*stages),
            nn.functional.mse_loss,
            lambda parameters: Adam(parameters, lr=0.05),
            plan=self.plan,
            mode=self.mode,
            sample=self.data(0)[0],
            in_transit=0,  # else what this machine takes decides, and so what is trained
            microbatches=None if self.mode in ("stash", "vertical-sync") else 4,
            max_grad_norm=1.0,
            scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            progress=False,
        )

    def data(self, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        def draw(width: int, step: int) -> torch.Tensor:
            return torch.from_numpy(target((8, width), width, epoch, step, exact=False))

        return [(draw(3, step), draw(2, step)) for step in range(6)]

    def write(self, folder: Path) -> Array:
        engine = self.start(0.0)
        engine.train_epoch(self.data(0))
        engine.save(folder / str(self))
        return self.ended(engine)

    def go_on(self, folder: Path) -> Array:
        engine = self.start(1.0)
        engine.load(folder / str(self))
        return self.ended(engine)

    def ended(self, engine: Any) -> Array:
        """The loss of one epoch more, and the weights and statistics after it."""
        loss = engine.train_epoch(self.data(1)).loss
        values = [each.double().numpy().ravel() for each in engine.state_dict().values()]
        engine.close()
        return np.concatenate([[loss], *values])


PIPELINES = [
    *(Pipeline(mode, "straight") for mode in ("stash", "vertical-sync", "2bw", "flush", "gpipe")),
    Pipeline("stash", "2"),
]


def write_all(folder: Path) -> dict[str, Array]:
    """Write all checkpoints; return what the runs themselves came to."""
    pipedream.init()
    runs = {str(case): write(case, folder) for case in CASES}
    return runs | {str(pipeline): pipeline.write(folder) for pipeline in PIPELINES}


def runs_from(folder: Path) -> dict[str, Callable[[], Array]]:
    """Return how to go on from each rank's own checkpoints, and from some of rank 0's, by name."""
    runs: dict[str, Callable[[], Array]] = {}
    for case in CASES:
        if (folder / "rank0" / f"{case}.pt").exists():
            runs[f"own {case}"] = partial(go_on, case, folder, hvd.rank())
            if case in FIRST:
                runs[f"first {case}"] = partial(go_on, case, folder, 0)
    for pipeline in PIPELINES:
        if (folder / str(pipeline)).exists():
            runs[f"own {pipeline}"] = partial(pipeline.go_on, folder)
    return runs


def go_on_all(folder: Path) -> dict[str, Array]:
    pipedream.init()
    return {name: run() for name, run in runs_from(folder).items()}


def timed() -> None:
    """Under HVD_PIPE_TIMELINE and HVD_PIPE_PROFILE: each strategy, and a pipeline."""
    pipedream.init()
    for strategy in BASE:
        case = Case(strategy)
        advance(case, *start(case), 0, 20)
    engine = PIPELINES[0].start(0.0)
    engine.train_epoch(PIPELINES[0].data(0))
    engine.close()
    hvd.shutdown()
