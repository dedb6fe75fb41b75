"""Optimizers that people take from PyPI, each as its README uses it: rows of a table.

A `Row` trains under every strategy on real ranks, and is compared with plain torch that plays all
workers in one process. ``python tests/parallel/test_uses.py`` writes the table
into docs/uses.md. The packages are imported when a row is used, as they take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from problem import Loss, batch, loss_of, make_model, weights_of
from serial import make_workers
from torch import nn
from torch.func import functional_call
from uses_common import Array

import hvd_pipe.torch as hvd

MERGED, PIPE, COCOD = "merged-gradient", "pipe-sgd", "cocod:period=4"
FORWARD = "merged-gradient:overlap=forward,bucket_bytes=64"
STRATEGIES = (MERGED, FORWARD, PIPE, COCOD)
STEPS = 11
PAUSE = 6  # after so many steps, and after the last, the model is evaluated

CONSTRAINTS = Path(__file__).parents[2] / "docker" / "constraints.txt"

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Row:
    """An optimizer of a package on PyPI; ``defers``: overlap=forward leaves updates to later."""

    name: str
    package: str
    make: Callable[[nn.Module], Any]
    defers: bool = False
    note: str = ""
    tolerance: float = 1e-9

    @property
    def version(self) -> str:
        """That which `make setup` installs."""
        pins = (line.partition("==") for line in CONSTRAINTS.read_text().splitlines())
        return next(version for package, _, version in pins if package == self.package)

    def outcome(self, strategy: str) -> str:
        """Return what the table says of a strategy."""
        return "works, in `step()`" if strategy == FORWARD and not self.defers else "works"

    def distribute(self, model: nn.Module, strategy: str) -> tuple[Any, list[Any]]:
        """Return the script's optimizer, and the distributed ones in it."""
        optimizer = distributed(self.make(model), list(model.named_parameters()), strategy)
        return optimizer, [optimizer]

    def step(self, model: nn.Module, optimizer: Any, number: int) -> None:
        """One step of the script, on a rank."""
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), number).backward()
        optimizer.step()

    # In one process.

    def loss(self) -> Loss:
        """Return the loss whose gradients are those that the script sends."""
        return loss_of


def distributed(optimizer: Any, named: Named, strategy: str) -> Any:
    return hvd.DistributedOptimizer(optimizer, named, strategy=strategy)


def run(row: Row, strategy: str) -> tuple[Array, bool]:
    """On a rank: the weights at each evaluation, and whether an update was ever deferred."""
    model, rows, deferred = make_model(), [], False
    optimizer, parts = row.distribute(model, strategy)
    for number in range(STEPS):
        row.step(model, optimizer, number)
        deferred = deferred or any(part._hvd_pipe.is_due for part in parts)
        if number + 1 in (PAUSE, STEPS):
            with evaluation([optimizer], lambda: [part.synchronize() for part in parts]):
                rows.append(weights_of(model))
    return np.array(rows), deferred


def expected(row: Row, strategy: str, n: int = 2) -> Array:
    """In one process: the rows of n workers."""
    workers = make_workers(strategy, n, make_model, row.make)
    for number in range(STEPS):
        workers.backward(row.loss(), number)
        workers.step()
        if number + 1 in (PAUSE, STEPS):
            with evaluation(workers.optimizers, workers.synchronize):
                workers.record()
    return workers.trajectory


@contextmanager
def evaluation(optimizers: Iterable[Any], synchronize: Callable[[], object]) -> Iterator[None]:
    """Bring optimizers to where models are evaluated; schedule-free ones have a mode for it.

    ``synchronize`` comes before it, as the pending gradient is applied in the mode for training;
    and after it, as CoCoD's ranks make unlike weights of equal ones and of their own states.
    """
    synchronize()
    modal = [each for each in optimizers if hasattr(each, "eval")]
    for each in modal:
        each.eval()
    if modal:
        synchronize()
    yield
    for each in modal:
        each.train()


# Makers.


def imported(package: str, name: str) -> Any:
    return getattr(import_module(package), name)


def of(package: str, name: str, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: imported(package, name)(model.parameters(), **options)


def schedule_free(name: str, lr: float) -> Row:
    def make(model: nn.Module) -> Any:
        optimizer = of("schedulefree", name, lr=lr, warmup_steps=3)(model)
        optimizer.train()
        return optimizer

    note = (
        "`optimizer.synchronize()`, `optimizer.eval()`, and under `cocod` `synchronize()` once "
        "more: each rank's state has a part in what `eval()` makes of the weights"
    )
    return Row(name, "schedulefree", make, note=note)


def simple(name: str, **options: Any) -> Row:
    return Row(name, "pytorch_optimizer", of("pytorch_optimizer", name, **options))


def matrices_and_vectors(model: nn.Module) -> tuple[Named, Named]:
    every = list(model.named_parameters())
    return [(n, p) for n, p in every if p.ndim > 1], [(n, p) for n, p in every if p.ndim == 1]


def muon_in_groups(model: nn.Module) -> Any:
    matrices, vectors = matrices_and_vectors(model)
    groups = [
        {"params": [p for _, p in matrices], "lr": 0.02, "use_muon": True},
        {"params": [p for _, p in vectors], "lr": 0.003, "betas": (0.9, 0.95), "use_muon": False},
    ]
    return imported("pytorch_optimizer", "Muon")(groups)


def lookahead(model: nn.Module) -> Any:
    return imported("pytorch_optimizer", "Lookahead")(sgd(model), k=3)


class Both:
    """Two optimizers that step together."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        for each in self.optimizers:
            each.step()


class MuonAndAdamW(Row):
    """Torch's Muon takes matrices only: two optimizers, each distributed by itself."""

    def distribute(self, model: nn.Module, strategy: str) -> tuple[Any, list[Any]]:
        both = zip(self.make(model).optimizers, matrices_and_vectors(model), strict=True)
        parts = [distributed(plain, own, strategy) for plain, own in both]
        return Both(*parts), parts


def muon_and_adamw(model: nn.Module) -> Both:
    matrices, vectors = ([p for _, p in own] for own in matrices_and_vectors(model))
    return Both(torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01))


# SAM: the gradients at weights that the first pass has moved along its own gradients.

RHO = 0.05
BASE: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}


class Sam(Row):
    """The distributed optimizer is SAM's base; the first pass is each rank's own."""

    def distribute(self, model: nn.Module, strategy: str) -> tuple[Any, list[Any]]:
        def base(groups: Any, **options: Any) -> Any:
            plain = torch.optim.SGD(groups, **options)
            return distributed(plain, list(model.named_parameters()), strategy)

        optimizer = sam(model, base)
        return optimizer, [optimizer.base_optimizer]

    def step(self, model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        with optimizer.base_optimizer.no_sync():
            loss_of(model, hvd.rank(), number).backward()
            optimizer.first_step(zero_grad=True)
        loss_of(model, hvd.rank(), number).backward()
        optimizer.second_step()

    def loss(self) -> Loss:
        return _moved_loss


def sam(model: nn.Module, base: Callable[..., Any] = torch.optim.SGD) -> Any:
    return imported("pytorch_optimizer", "SAM")(model.parameters(), base, rho=RHO, **BASE)


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), **BASE)


def _moved_loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    """A rank's loss at weights that are moved along its gradient."""
    parameters = dict(model.named_parameters())
    own = torch.autograd.grad(loss_of(model, rank, number), list(parameters.values()))
    norm = torch.stack([each.norm() for each in own]).norm()
    moved = {
        name: parameter + RHO * gradient / norm
        for (name, parameter), gradient in zip(parameters.items(), own, strict=True)
    }
    inputs, targets = batch(rank, number)
    return nn.functional.mse_loss(functional_call(model, moved, (inputs,)), targets)


ROWS = {
    row.name: row
    for row in [
        Row("NAdam", "torch", of("torch.optim", "NAdam", lr=0.02), defers=True),
        Row("Adafactor", "torch", of("torch.optim", "Adafactor", lr=0.02), defers=True),
        MuonAndAdamW("Muon, with AdamW for the rest", "torch", muon_and_adamw, defers=True),
        schedule_free("AdamWScheduleFree", 0.02),
        schedule_free("SGDScheduleFree", 0.2),
        simple("AdaBelief", lr=0.02),
        simple("AdaFactor", lr=0.02),
        simple("Adan", lr=0.02),
        simple("LARS", lr=0.5),
        simple("Lamb", lr=0.02),
        simple("Lion", lr=0.01),
        Row("Lookahead", "pytorch_optimizer", lookahead),
        Row("Muon, with groups for AdamW", "pytorch_optimizer", muon_in_groups),
        simple("Prodigy", d0=0.01),
        simple("SOAP", lr=0.02, precondition_frequency=3),
        Sam(
            "SAM, the first pass in `no_sync()`",
            "pytorch_optimizer",
            sgd,
            defers=True,
            tolerance=1e-7,  # it computes the norm in float32
            note="the distributed optimizer is SAM's base, and the first pass is in its "
            "`no_sync()`: each rank moves its weights along its own gradients. With "
            "`step(closure)` both passes are sent, and under `pipe-sgd` those of the first would "
            "be applied: call `first_step` and `second_step`",
        ),
    ]
}
