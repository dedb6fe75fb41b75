"""Checkpoints of PyTorch: written by `make_saved.py`, and how runs go on from any version's."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import saved_problem
import torch
from saved_problem import BASE, LR, MOMENTUM, PLANNED, SHAPES, STEPS, Array, Case, Saver, target
from torch import nn
from torch.optim import SGD, Adam

import hvd_pipe.torch as hvd
from hvd_pipe.torch import pipedream

AUTO = "auto:allow=pipe-sgd,steps=3"


def start(case: Case, first: float = 0.0) -> tuple[nn.Module, Any]:
    """A model and its wrapped optimizer."""
    model = nn.ParameterList(torch.full(shape, first, dtype=torch.float64) for shape in SHAPES)
    parameters = list(model.parameters())
    plain: Any = SGD(parameters, lr=LR, momentum=MOMENTUM)
    if case.optimizer == "adam":
        plain = Adam([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}], lr=0.01)
    return model, hvd.DistributedOptimizer(plain, model.named_parameters(), **case.arguments(hvd))


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


def write(case: Case, path: Path) -> Array:
    model, optimizer = start(case)
    advance(case, model, optimizer, 0, case.saved)
    file = path.with_name(f"{case}.pt")
    if case.way == "pickled":
        file.write_bytes(pickle.dumps((model, optimizer)))
    else:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return ended(case, model, optimizer)


def go_on(case: Case, path: Path) -> Array:
    file = path.with_name(f"{case}.pt")
    if case.way == "pickled":
        model, optimizer = pickle.loads(file.read_bytes())
        return ended(case, model, optimizer)
    checkpoint = torch.load(file, weights_only=True)
    model, optimizer = start(case, first=8.0)
    model.load_state_dict(checkpoint["model"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(checkpoint["optimizer"])
    return ended(case, model, optimizer)


class Pipeline(saved_problem.Pipeline):
    """With as many stages as ranks, or one of two ranks."""

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

    def data(self, epoch: int) -> list[tuple[Any, Any]]:
        return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in super().data(epoch)]

    def values(self, engine: Any) -> Sequence[Any]:
        return list(engine.state_dict().values())


MODES = ("stash", "vertical-sync", "2bw", "flush", "gpipe")
SAVER = Saver(
    hvd,
    [
        *saved_problem.cases(passes=2, way="pickled"),
        Case("merged-gradient", saved=PLANNED),
        Case(AUTO, saved=PLANNED),
        Case("cocod:period=4", saved=8),
        Case("cocod:period=4", codec="int8 feedback", way="pickled"),
        Case(AUTO, saved=PLANNED, way="pickled"),
    ],
    [*(Pipeline(mode, "straight") for mode in MODES), Pipeline("stash", "2")],
    write,
    go_on,
)


def timed() -> None:
    """Under HVD_PIPE_TIMELINE and HVD_PIPE_PROFILE: each strategy, and a pipeline."""
    pipedream.init()
    for strategy in BASE:
        case = Case(strategy)
        advance(case, *start(case), 0, 20)
    pipeline = Pipeline("stash", "straight")
    engine = pipeline.start(0.0)
    engine.train_epoch(pipeline.data(0))
    engine.close()
    hvd.shutdown()
