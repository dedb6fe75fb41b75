"""Optimizers that people take from PyPI, each as its README uses it: rows of a table.

A `Row` trains under every strategy on real ranks, and is compared with plain torch that plays all
workers in one process; or it is refused. ``python tests/parallel/test_uses.py`` writes the table
into docs/uses.md. The packages are imported when a row is used, as they take seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from problem import Loss, batch, loss_of, make_model, weights_of
from serial import Workers, make_workers
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
    """An optimizer.

    Args:
        name: As the table has it.
        package: On PyPI.
        make: The optimizer of a model, in one process.
        defers: Whether ``overlap=forward`` leaves updates to the next forward pass.
        refused: By strategy, a part of the message with which it is refused.
        elsewhere: By strategy, what to do instead, where it runs and computes something else.
        note: What the table says of it.
        tolerance: The largest difference allowed.
    """

    name: str
    package: str
    make: Callable[[nn.Module], Any]
    defers: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    tolerance: float = 1e-9

    @property
    def version(self) -> str:
        """That which `make setup` installs."""
        pins = (line.partition("==") for line in CONSTRAINTS.read_text().splitlines())
        return next(version for package, _, version in pins if package == self.package)

    def outcome(self, strategy: str) -> str:
        """Return what the table says of a strategy."""
        if strategy in self.refused:
            return "refused"
        if strategy == FORWARD and not self.defers:
            return "works, in `step()`"
        return self.elsewhere.get(strategy, "works")

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

    def loss(self, strategy: str) -> Loss:
        """Return the loss whose gradients are those that the script sends."""
        return loss_of

    def before_step(self, workers: Workers, number: int) -> None:
        """What the script does between ``backward()`` and ``step()``."""


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
        workers.backward(row.loss(strategy), number)
        row.before_step(workers, number)
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

    def loss(self, strategy: str) -> Loss:
        return functools.partial(_moved_loss, along=lambda rank: [rank])


class SamByClosure(Sam):
    """Its first pass is averaged, too, where gradients are."""

    def step(self, model: nn.Module, optimizer: Any, number: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, hvd.rank(), number)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)

    def loss(self, strategy: str) -> Loss:
        if strategy == COCOD:
            return super().loss(strategy)
        return functools.partial(_moved_loss, along=lambda rank: [0, 1])


class SamInside(Row):
    """SAM itself is distributed."""

    step = SamByClosure.step


def sam(model: nn.Module, base: Callable[..., Any] = torch.optim.SGD) -> Any:
    return imported("pytorch_optimizer", "SAM")(model.parameters(), base, rho=RHO, **BASE)


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), **BASE)


def _moved_loss(
    model: nn.Module, rank: int, number: int, along: Callable[[int], list[int]]
) -> torch.Tensor:
    """A rank's loss at weights that are moved along the mean gradient of some ranks."""
    parameters = dict(model.named_parameters())
    passes = [
        torch.autograd.grad(loss_of(model, other, number), list(parameters.values()))
        for other in along(rank)
    ]
    means = [sum(column) / len(passes) for column in zip(*passes, strict=True)]
    norm = torch.stack([each.norm() for each in means]).norm()
    moved = {
        name: parameter + RHO * mean / norm
        for (name, parameter), mean in zip(parameters.items(), means, strict=True)
    }
    inputs, targets = batch(rank, number)
    return nn.functional.mse_loss(functional_call(model, moved, (inputs,)), targets)


# SophiaH: estimates of the Hessian's diagonal, which ranks must average as they do gradients.

EVERY = 3  # steps from one estimate to the next


def curvature(model: nn.Module, rank: int, number: int) -> list[torch.Tensor]:
    """Return Hutchinson's estimates, with the same noise on all ranks."""
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(number)
    noise = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    gradients = torch.autograd.grad(loss_of(model, rank, number), parameters, create_graph=True)
    products = torch.autograd.grad(gradients, parameters, noise)
    return [product * z for product, z in zip(products, noise, strict=True)]


def sophia(model: nn.Module) -> Any:
    """`SophiaH` whose ``step()`` takes the estimates that the script has left for it."""
    plain = imported("pytorch_optimizer", "SophiaH")

    class SophiaH(plain):  # type: ignore[misc, valid-type]
        hessian: list[torch.Tensor] | None = None

        def step(self, closure: Any = None) -> Any:
            hessian, self.hessian = self.hessian, None
            return super().step(closure, hessian=hessian)

    return SophiaH(model.parameters(), lr=0.05, p=0.1, update_period=1000)


class Sophia(Row):
    """The script averages the estimates."""

    def step(self, model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), number).backward()
        if number % EVERY == 0:
            own = curvature(model, hvd.rank(), number)
            optimizer.hessian = [hvd.allreduce(each) for each in own]
        optimizer.step()

    def before_step(self, workers: Workers, number: int) -> None:
        if number % EVERY == 0:
            ranks = [curvature(model, r, number) for r, model in enumerate(workers.models)]
            mean = [torch.stack(column).mean(0) for column in zip(*ranks, strict=True)]
            for optimizer in workers.optimizers:
                optimizer.hessian = [each.clone() for each in mean]  # type: ignore[attr-defined]


class SophiaByGraph(Row):
    """As its README has it: the estimates come from the gradients' own graph."""

    def step(self, model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        torch.manual_seed(number)
        loss_of(model, hvd.rank(), number).backward(create_graph=True)
        optimizer.step()


_NEEDS_GRAPH = dict.fromkeys((MERGED, FORWARD, PIPE), "does not require grad and does not have")

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
            "`no_sync()`: each rank moves its weights along its own gradients",
        ),
        SamByClosure(
            "SAM, `step(closure)`",
            "pytorch_optimizer",
            sgd,
            defers=True,
            tolerance=1e-7,
            elsewhere={PIPE: "use `no_sync()`"},
            note="the distributed optimizer is SAM's base. Both passes are sent. Under `pipe-sgd` "
            "the gradients of the first pass would be applied: put it into `no_sync()`",
        ),
        SamInside(
            "SAM, itself distributed",
            "pytorch_optimizer",
            sam,
            refused=dict.fromkeys(STRATEGIES, "SAM requires closure"),
            note="distribute SAM's base: `SAM(parameters, lambda groups, **options: "
            "hvd.DistributedOptimizer(SGD(groups, **options), named))`",
        ),
        Sophia(
            "SophiaH, with averaged estimates",
            "pytorch_optimizer",
            sophia,
            note="a subclass passes to `step(hessian=...)` what the script has averaged by "
            "`hvd.allreduce`",
        ),
        SophiaByGraph(
            "SophiaH, `backward(create_graph=True)`",
            "pytorch_optimizer",
            of("pytorch_optimizer", "SophiaH", lr=0.05),
            refused=_NEEDS_GRAPH,
            elsewhere={COCOD: "use averaged estimates"},
            note="averaged gradients have no graph. Under `cocod` each rank estimates by itself",
        ),
    ]
}
