"""Options of pipelines: recompute, bfloat16 on the wire, schedulers, clipping, checkpoints."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cases import Raised, run_cases
from pipeline_problem import (
    MODELS,
    Paired,
    make_paired,
    make_sparse,
    plan,
)
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, StepLR
from workers_pipedream import (
    Case,
    Result,
    State,
    arrays,
    make_engine,
    reference,
    train,
)

import hvd_pipe.torch as hvd
from hvd_pipe.torch import pipedream

SEED = 11  # of dropout


def make_dropping() -> nn.Module:
    torch.manual_seed(12)
    layers = OrderedDict[str, nn.Module](
        conv=nn.Conv1d(2, 4, 3, padding=1, bias=False),
        norm=nn.BatchNorm1d(4),
        drop=nn.Dropout(0.25),
        flatten=nn.Flatten(),
        one=nn.Linear(24, 6, bias=False),
        last_norm=nn.BatchNorm1d(6),
        tanh=nn.Tanh(),
        dropped=nn.Dropout(0.5),
        head=nn.Linear(6, 3),
    )
    return nn.Sequential(layers).double()


MODELS["dropping"] = make_dropping
DROPPING_CUTS = {2: ("one",), 3: ("flatten", "tanh")}


def _dropping(config: str, mode: str, microbatches: int = 1) -> Case:
    return Case(plan(config, DROPPING_CUTS), mode, "momentum", "dropping", microbatches)


RECOMPUTED = {
    "1-1 stash": _dropping("1-1", "stash"),
    "1-1 flush": _dropping("1-1", "flush", 3),
    "1-1 gpipe": _dropping("1-1", "gpipe", 3),
    "1-1-1 stash": _dropping("1-1-1", "stash"),
    "1-1-1 vertical-sync": _dropping("1-1-1", "vertical-sync"),
    "2-1 2bw": _dropping("2-1", "2bw", 4),
    "1-2 stash": _dropping("1-2", "stash"),
    "1-1-1 stash, LSTM": Case(plan("1-1-1"), "stash", "adam"),
}


def with_seed(case: Case, **more: Any) -> Result:
    torch.manual_seed(SEED)
    return train(case, **more)


class _Round(torch.autograd.Function):
    """What a message in bfloat16 makes of activations and gradients."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().to(x.dtype)

    @staticmethod
    def backward(_: Any, g: torch.Tensor) -> torch.Tensor:
        return g.bfloat16().to(g.dtype)


class Round(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Round.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class RoundedPaired(Paired):
    """What goes from the layer "two" to the layer "three" is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.tanh = Round()

    def forward(self, x: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.two(torch.tanh(self.one(self.flatten(x)))))
        x = self.tanh(x)
        result: torch.Tensor = self.head(torch.tanh(self.three(x)) + self.words(word))
        return result


def make_rounded(case: Case) -> nn.Module:
    """The case's model, with rounding at its cuts."""
    if case.model == "paired":
        model = RoundedPaired().double()
        model.load_state_dict(make_paired().state_dict())
        return model
    rounded = OrderedDict[str, nn.Module]()
    for name, layer in make_sparse().named_children():
        if name in case.plan.cuts:
            rounded[f"before_{name}"] = Round()
        rounded[name] = layer
    return nn.Sequential(rounded)


_SPARSE = {2: ("soft",), 3: ("tanh", "two")}
ROUNDED = {
    "1-1 stash": Case(plan("1-1", _SPARSE), "stash", model="sparse"),
    "1-1 flush": Case(plan("1-1", _SPARSE), "flush", "adam", "sparse", 3),
    "1-1 paired": Case(plan("1-1", {2: ("three",)}), "stash", model="paired"),
    "1-1-1 vertical-sync": Case(plan("1-1-1", _SPARSE), "vertical-sync", model="sparse"),
    "2-1 2bw": Case(plan("2-1", _SPARSE), "2bw", model="sparse", microbatches=4),
}


def by_epoch(optimizer: Optimizer) -> LRScheduler:
    return StepLR(optimizer, 1, gamma=0.25)


def by_minibatch(optimizer: Optimizer) -> LRScheduler:
    return ExponentialLR(optimizer, 0.8)


OPTIONS: dict[str, tuple[Case, dict[str, Any]]] = {
    "1-2 not scaled": (Case(plan("1-2")), {"scale_lr": False}),
    "2-1 not scaled": (Case(plan("2-1")), {"scale_lr": False}),
    "1-1 by epoch": (Case(plan("1-1")), {"scheduler_fn": by_epoch}),
    "2-1 by epoch": (Case(plan("2-1"), "2bw", "adam", microbatches=4), {"scheduler_fn": by_epoch}),
    "1-1 by minibatch": (
        Case(plan("1-1"), optimizer="sgd"),
        {"scheduler_fn": by_minibatch, "schedule_by": "minibatch"},
    ),
    "2-1 by minibatch": (
        Case(plan("2-1"), optimizer="sgd"),
        {"scheduler_fn": by_minibatch, "schedule_by": "minibatch"},
    ),
    "1-1-1 flush by minibatch": (
        Case(plan("1-1-1"), "flush", microbatches=3),
        {"scheduler_fn": by_minibatch, "schedule_by": "minibatch"},
    ),
    "1-1 clipped": (Case(plan("1-1"), "flush", microbatches=3), {"max_grad_norm": 0.1}),
    "1-1-1 clipped": (Case(plan("1-1-1"), "gpipe", microbatches=3), {"max_grad_norm": 0.1}),
    "2-1 clipped": (Case(plan("2-1"), "flush", microbatches=4), {"max_grad_norm": 0.1}),
    "1-2 clipped": (Case(plan("1-2"), "gpipe", "adam", microbatches=4), {"max_grad_norm": 0.1}),
}

RESUMED = {
    "1-1 stash": _dropping("1-1", "stash"),
    "2-1 stash": _dropping("2-1", "stash"),
    "1-2 vertical-sync": _dropping("1-2", "vertical-sync"),
    "1-1-1 2bw": dataclasses.replace(_dropping("1-1-1", "2bw", 3), optimizer="adam"),
    "1-1-1 flush": _dropping("1-1-1", "flush", 3),
}


class Resumed(NamedTuple):
    """The model after two epochs without and with an interruption, and the losses of the last."""

    whole: State
    resumed: State
    losses: tuple[float, float]


def resumed(case: Case, folder: Path) -> Resumed:
    """Train for two epochs; then again, with an engine for each of them."""
    torch.manual_seed(SEED + hvd.rank())
    whole = make_engine(case)
    whole.train_epoch(case.data(0))
    whole.save(folder)  # which averages running statistics over replicas
    last = whole.train_epoch(case.data(1)).loss
    torch.manual_seed(SEED + hvd.rank())
    first = make_engine(case)
    first.train_epoch(case.data(0))
    first.save(folder)
    torch.manual_seed(1)
    second = make_engine(case)
    second.train_epoch(case.data(4))  # which loading must undo
    second.load(folder)
    again = second.train_epoch(case.data(1)).loss
    return Resumed(arrays(whole.state_dict()), arrays(second.state_dict()), (last, again))


SAVED = {  # by the optimizer
    "momentum": Case(plan("2-1"), "stash"),
    "adam": Case(plan("1-1-1"), "2bw", "adam", microbatches=3),
    "grouped": Case(plan("2-1"), "stash", "grouped"),
}
MOVED = {
    "to 1": Case(plan("1")),
    "to 1-1": Case(plan("1-1")),
    "to 1-1 2bw": Case(plan("1-1"), "2bw", microbatches=3),
    "to 1-2": Case(plan("1-2")),
    "to 3-1": Case(plan("3-1")),
    "to 1-1-1-1": Case(plan("1-1-1-1"), "vertical-sync"),
}


def move(case: Case, folder: Path) -> Result:
    """Go on with what another plan on another number of workers has saved."""
    engine = make_engine(case)
    engine.load(folder)
    loss = engine.train_epoch(case.data(1)).loss
    state = arrays(engine.state_dict())
    return Result([loss], [state], engine.evaluate(case.unseen()).loss, engine.stage)


def moved(before: Case, case: Case) -> Result:
    """In a test: the same from the serial reference."""
    first, second = reference(before), reference(case)
    first.train_epoch(before.data(0))
    second.take_over(first)
    loss = second.train_epoch(case.data(1))
    state = arrays(second.state_dict())
    return Result([loss], [state], second.evaluate(case.unseen()), -1)


def save(case: Case, folder: Path) -> State:
    engine = make_engine(case)
    engine.train_epoch(case.data(0))
    engine.save(folder)
    return arrays(engine.state_dict())


class Scale(nn.Module):
    """Multiplies by weights in bfloat16."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, n, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.to(x.dtype)


def make_formats(seed: int) -> nn.Module:
    """Weights in another memory format, and others that Horovod has no name for."""
    torch.manual_seed(seed)
    layers = OrderedDict[str, nn.Module](
        lift=nn.Unflatten(1, (2, 1)),
        conv=nn.Conv2d(2, 4, (1, 3), padding=(0, 1)).to(memory_format=torch.channels_last),
        flatten=nn.Flatten(),
        one=nn.Linear(24, 6),
        scale=Scale(6),
        head=nn.Linear(6, 3),
    )
    model = nn.Sequential(layers)
    for name, layer in model.named_children():
        if name != "scale":
            layer.double()
    with torch.no_grad():
        layers["scale"].weight.mul_(1 + seed)
    return model


FORMATS = Case(plan("1-1", {2: ("one",)}), "flush", "momentum", "formats", 3)


def in_formats() -> Result:
    """Train what is another model on each rank, of which rank 0's counts."""
    MODELS["formats"] = lambda: make_formats(hvd.rank())
    engine = make_engine(FORMATS)
    loss = engine.train_epoch(FORMATS.data(0)).loss
    state = {name: tensor.double().numpy() for name, tensor in engine.state_dict().items()}
    return Result([loss], [state], 0.0, engine.stage)


def cases_of(workers: int) -> dict[str, Callable[[], Any]]:
    """All that so many workers do, by the name of the test and its case."""
    found: dict[str, Callable[[], Any]] = {}

    def mine(case: Case) -> bool:
        return case.plan.workers == workers

    for name, case in RECOMPUTED.items():
        if mine(case):
            found[f"kept {name}"] = lambda case=case: with_seed(case)
            found[f"recomputed {name}"] = lambda case=case: with_seed(case, recompute=True)
    for name, case in ROUNDED.items():
        if mine(case):
            found[f"rounded {name}"] = lambda case=case: train(case, wire_dtype="bfloat16")
    for name, (case, options) in OPTIONS.items():
        if mine(case):
            found[name] = lambda case=case, options=options: train(case, **options)
    if mine(FORMATS):
        found["formats"] = in_formats
    return found


def run(workers: int) -> dict[str, Any | Raised]:
    pipedream.init()
    return run_cases(cases_of(workers))


def run_checkpoints(workers: int, folder: Path) -> dict[str, Any | Raised]:
    """Save and load on the same workers; of three workers save, and of others go on from there."""
    pipedream.init()
    cases: dict[str, Callable[[], Any]] = {
        name: lambda name=name, case=case: resumed(case, folder / f"resumed {name}")
        for name, case in RESUMED.items()
        if case.plan.workers == workers
    }
    for saved, before in SAVED.items():
        if before.plan.workers == workers:
            cases[f"save {saved}"] = lambda case=before, saved=saved: save(case, folder / saved)
        for name, case in MOVED.items():
            if case.plan.workers == workers:
                after = dataclasses.replace(case, optimizer=before.optimizer)
                cases[f"{saved} {name}"] = lambda case=after, saved=saved: move(
                    case, folder / saved
                )
    return run_cases(cases)
