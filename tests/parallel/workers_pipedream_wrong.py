"""What pipelines refuse, what ranks are told that differ, and plans that are words.

As a script, ``python workers_pipedream_wrong.py FOLDER MODE WRONG``: a rank that trains until
something happens to it.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cases import Raised, run_cases
from pipeline_problem import OPTIMIZERS, Batch, make_model, plan, squared
from publish import end_late_over_gloo, publish
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from workers_pipedream import Case, Result, make_engine, partition_of, train

import hvd_pipe.torch as hvd
from hvd_pipe.planning.profile import LayerProfile, ModelProfile
from hvd_pipe.torch import pipedream
from hvd_pipe.torch.pipedream import graph


def unlike(what: str) -> tuple[str, str]:
    """Train with minibatches that differ between ranks or from the first: what ranks are told."""
    pipedream.init()
    case = Case(plan("1-1-1"))
    engine = make_engine(case)
    batches = case.data(0)
    if what == "order" and hvd.rank() == 2:
        batches = batches[::-1]
    if what == "length" and hvd.rank() == 1:
        batches = batches[:-1]
    if what == "shape":
        batches[3] = (torch.zeros(14, 2, 5, dtype=torch.float64), batches[3][1])
    if what == "dtype":
        batches[3] = (batches[3][0].float(), batches[3][1])
    try:
        engine.train_epoch(batches)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _profile() -> ModelProfile:
    """Times by which the mixed model is cut before the LSTM, and bytes that forbid replicas."""
    layers = graph.trace(make_model("mixed")).layers
    before = next(at for at, layer in enumerate(layers) if "lstm" in layer.name)
    share = {True: 1.0 / before, False: 1.0 / (len(layers) - before)}
    times = [share[at < before] for at in range(len(layers))]
    return ModelProfile(
        tuple(
            LayerProfile(layer.name, 2**30, seconds, seconds / 2, 800)
            for layer, seconds in zip(layers, times, strict=True)
        )
    )


NAMED = ("straight", "1-1", "auto", "saved")


def named(what: str, folder: Path) -> Result:
    """Train with a plan that is a word or a file, and with times that are given."""
    path = folder / f"plan.{hvd.rank()}.json"
    wanted: str = what
    if what == "saved":
        partition_of(make_model("mixed"), plan("1-1")).save(path)
        wanted = str(path)
    return train(Case(plan("1-1")), plan=wanted, profile=_profile(), bandwidth=1e9)


class Wrong(NamedTuple):
    """Arguments that cannot be, and what every rank is told."""

    options: dict[str, Any]
    error: str
    says: str


WRONG = {
    "mode": Wrong({"mode": "1f1b"}, "ValueError", "mode must be one of stash"),
    "plan's workers": Wrong({"plan": "2-1"}, "ValueError", "is for 3 workers"),
    "plan's zero": Wrong({"plan": "2-0"}, "ValueError", "a stage without workers"),
    "plan's text": Wrong({"plan": "two"}, "ValueError", "is no plan"),
    "plan's type": Wrong({"plan": 2}, "TypeError", "plan must be 'auto'"),
    "plan's file": Wrong({"plan": "/nowhere/plan.json"}, "FileNotFoundError", "/nowhere"),
    "microbatches of stash": Wrong({"microbatches": 2}, "ValueError", "has no microbatches"),
    "no microbatches": Wrong(
        {"mode": "flush", "microbatches": 0}, "ValueError", "must be at least 1"
    ),
    "microbatches' type": Wrong(
        {"mode": "flush", "microbatches": 1.5}, "TypeError", "must be an integer"
    ),
    "too few for 2bw": Wrong(
        {"mode": "2bw", "microbatches": 1}, "ValueError", "microbatches must be at least 2"
    ),
    "more than samples": Wrong(
        {"mode": "flush", "microbatches": 15}, "ValueError", "cannot be cut into 15 microbatches"
    ),
    "transport": Wrong({"transport": "nccl"}, "ValueError", "transport must be one of"),
    "meta": Wrong({"model": nn.Linear(3, 3, device="meta")}, "ValueError", "build the model anew"),
    "wire_dtype": Wrong({"wire_dtype": "int8"}, "ValueError", "wire_dtype must be None or"),
    "schedule_by": Wrong({"schedule_by": "step"}, "ValueError", "schedule_by must be 'epoch'"),
    "max_grad_norm": Wrong({"max_grad_norm": -1.0}, "ValueError", "max_grad_norm must be finite"),
    "max_grad_norm's type": Wrong({"max_grad_norm": "1"}, "TypeError", "must be a number"),
    "bandwidth": Wrong({"bandwidth": float("nan")}, "ValueError", "bandwidth must be finite"),
    "memory_bytes": Wrong({"memory_bytes": 0}, "ValueError", "memory_bytes must be finite"),
    "loss_fn": Wrong({"loss_fn": None}, "TypeError", "loss_fn must be a function"),
    "optimizer_fn": Wrong({"optimizer_fn": 0.1}, "TypeError", "optimizer_fn must be a function"),
    "scheduler_fn": Wrong({"scheduler_fn": 3}, "TypeError", "scheduler_fn must be a function"),
    "metric_fn": Wrong({"metric_fn": "acc"}, "TypeError", "metric_fn must be a function"),
    "model": Wrong({"model": [nn.Linear(2, 2), "x"]}, "TypeError", "model must be an nn.Module"),
    "no model": Wrong({"model": []}, "TypeError", "an empty list"),
    "nothing to train": Wrong({"model": nn.ReLU()}, "ValueError", "no parameters"),
    "sample": Wrong({"sample": torch.zeros(3)}, "TypeError", "must yield (inputs, targets)"),
    "no optimizer": Wrong({"optimizer_fn": lambda _: 0.1}, "TypeError", "torch.optim.Optimizer"),
    "plateau": Wrong({"scheduler_fn": ReduceLROnPlateau}, "TypeError", "without a metric"),
    "no tensors": Wrong({"sample": ("x", torch.zeros(3))}, "TypeError", "inputs must be tensors"),
}
UNLIKE = {
    "mode": [{"mode": "stash"}, {"mode": "vertical-sync"}],
    "recompute": [{"recompute": False}, {"recompute": True}],
    "wire_dtype": [{}, {"wire_dtype": "bfloat16"}],
    "model": [{}, {"model": nn.Linear(3, 3)}],
    "sample": [{}, {"sample": None}],
    "one stranger": [
        {},
        {"optimizer_fn": lambda _: torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)},
    ],
    "one wrong": [{}, {"loss_fn": None}],
    "one optimizer": [{}, {"optimizer_fn": lambda _: 0.1}],
}


def told(options: dict[str, Any]) -> tuple[str, str]:
    """The error that an engine with these options ends in: its class and its text."""
    model = make_model("mixed")
    usual: dict[str, Any] = {
        "model": model,
        "loss_fn": squared,
        "optimizer_fn": OPTIMIZERS["sgd"],
        "plan": partition_of(model, plan("1-1")),
        "sample": Case(plan("1-1")).data(0)[0],
        "progress": False,
    }
    try:
        pipedream.PipeDream(**(usual | options))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def loader_told(loader: Any) -> tuple[str, str]:
    """The error that an epoch with this loader ends in."""
    engine = make_engine(Case(plan("1-1")))
    try:
        engine.train_epoch(loader)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def closed() -> tuple[list[float], str]:
    """Losses of two engines, one after the other, and what the second says when it is closed."""
    case, losses = Case(plan("1-1")), []
    for _ in range(2):
        torch.manual_seed(0)
        engine = make_engine(case)
        losses.append(engine.train_epoch(case.data(0)).loss)
        engine.close()
        engine.close()
    try:
        engine.evaluate(case.data(0))
    except ValueError as error:
        return losses, str(error)
    return losses, ""


def run_wrong(folder: Path) -> dict[str, Any | Raised]:
    """On two ranks: what is refused, and plans that are named."""
    pipedream.init()
    cases: dict[str, Callable[[], Any]] = {}
    for name, wrong in WRONG.items():
        cases[f"wrong {name}"] = lambda wrong=wrong: told(wrong.options)
    for name, options in UNLIKE.items():
        cases[f"unlike {name}"] = lambda options=options: told(options[hvd.rank()])
    cases["closed"] = closed
    cases["no len"] = lambda: loader_told(iter(Case(plan("1-1")).data(0)))
    cases["empty"] = lambda: loader_told([])
    for what in NAMED:
        cases[f"plan {what}"] = lambda what=what: named(what, folder)
    return run_cases(cases)


WRONG_EPOCH = 3  # in which something goes wrong


class Loader:
    """Minibatches of which one cannot be read."""

    def __init__(self, batches: list[Batch], bad: bool) -> None:
        self._batches, self._bad = batches, bad

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Any:
        for number, batch in enumerate(self._batches):
            if self._bad and number == 2:
                raise ValueError("bad sample 17")
            yield batch


def main(folder: Path, mode: str, wrong: str = "") -> None:
    """Train for ever, with the last stage or the loader of rank 0 failing in one epoch."""
    faulthandler.dump_traceback_later(120, exit=True)
    torch.set_num_threads(1)
    if wrong:
        end_late_over_gloo()
    pipedream.init()
    number = 0

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if wrong == "loss" and number == WRONG_EPOCH:
            raise ValueError("bad sample 17")
        return squared(output, target)

    case = Case(plan("1-1-1"), mode, microbatches=3)
    rank = hvd.rank()
    publish(folder / f"pid.{rank}", str(os.getpid()))
    engine = make_engine(case, loss_fn=loss_fn)
    while True:
        bad = wrong == "loader" and rank == 0 and number == WRONG_EPOCH
        engine.train_epoch(Loader(case.data(0), bad))
        publish(folder / f"step.{rank}", str(number))
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
