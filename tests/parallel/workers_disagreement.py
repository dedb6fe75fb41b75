"""Ranks of which one builds something else: test_disagreement.py looks at what each is told."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cases import Raised, run_cases
from problem import OPTIMIZERS, STEPS, Weights, make_model, train
from torch import nn

import hvd_pipe.torch as hvd

ODD = 2  # the rank that differs, of three


class Told(NamedTuple):
    """What `DistributedOptimizer` raised: the names of its class and bases, and the message."""

    kinds: list[str]
    message: str


def layers(**named: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(named)


def two() -> nn.ModuleDict:
    """The model of the ranks that are in the right: 24 + 12 parameters, in float32."""
    return layers(a=nn.Linear(5, 4), b=nn.Linear(3, 3))


def told(make: Callable[[], nn.Module] = two, named: bool = True, **arguments: Any) -> Told | None:
    """What building the optimizer raises; None if nothing, which no case expects."""
    model = make()
    names = model.named_parameters() if named else list(model.named_parameters())[1:]
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        hvd.DistributedOptimizer(plain, names, **arguments)
    except Exception as error:
        return Told([kind.__name__ for kind in type(error).__mro__], str(error))
    return None


def odd_one(usual: dict[str, Any], odd: dict[str, Any]) -> Told | None:
    return told(**(odd if hvd.rank() == ODD else usual))


def odd_environment() -> Told | None:
    """A variable that `mpirun` was not told to export, the way this comes about in practice."""
    with _variable("HVD_PIPE_STRATEGY", "cocod:period=6" if hvd.rank() == ODD else "pipe-sgd"):
        return told()


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def afterwards() -> Weights:
    """A job that has caught such an error can still train."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](model), model.named_parameters())
    return train(model, optimizer, hvd.rank(), drains={STEPS - 1})


def _plan(path: Path, *buckets: tuple[str, ...]) -> str:
    hvd.Plan(buckets, "given").save(path)
    return str(path)


def run(directory: str) -> dict[str, Any | Raised]:
    """All cases; in each, rank ODD does as the second dict says, the others as the first."""
    hvd.init()
    mine = Path(directory) / str(hvd.rank())  # plan files differ by content, not by path
    mine.mkdir()
    plan = _plan(mine / "a.json", ("b.bias", "b.weight"), ("a.bias", "a.weight"))
    other_plan = _plan(mine / "b.json", ("b.bias",), ("b.weight", "a.bias", "a.weight"))
    renamed = partial(layers, a=nn.Linear(5, 4), c=nn.Linear(3, 3))
    reshaped = partial(layers, a=nn.Linear(5, 4), b=nn.Linear(3, 2))
    more = partial(layers, a=nn.Linear(5, 4), b=nn.Linear(3, 3), c=nn.Linear(2, 2))
    fewer = partial(layers, a=nn.Linear(5, 4))
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "name": ({}, {"make": renamed}),
        "shape": ({}, {"make": reshaped}),
        "dtype": ({}, {"make": lambda: two().double()}),
        "more parameters": ({}, {"make": more}),
        "fewer parameters": ({}, {"make": fewer}),
        "strategy": ({}, {"strategy": "pipe-sgd"}),
        "strategy's option": (
            {"strategy": hvd.PipeSGD(warmup_steps=3)},
            {"strategy": hvd.PipeSGD(warmup_steps=5)},
        ),
        "plan file": (
            {"strategy": hvd.MergedGradient(plan)},
            {"strategy": hvd.MergedGradient(other_plan)},
        ),
        "op": ({}, {"op": hvd.Sum}),
        "compression": ({}, {"compression": hvd.Compression.fp16}),
        "passes": ({}, {"backward_passes_per_step": 2}),
        "bad strategy": ({}, {"strategy": "pipe-sdg"}),
        "bad type of strategy": ({}, {"strategy": 17}),
        "bad passes": ({}, {"backward_passes_per_step": 0}),
        "bad names": ({}, {"named": False}),
        "bad process set": ({}, {"process_set": "some"}),
        "plan of another model": ({}, {"strategy": hvd.MergedGradient(plan), "make": renamed}),
        "plan file that is not there": (
            {"strategy": hvd.MergedGradient(plan)},
            {"strategy": hvd.MergedGradient(str(mine / "missing.json"))},
        ),
    }
    return run_cases(
        {case: partial(odd_one, usual, odd) for case, (usual, odd) in cases.items()}
        | {"environment": odd_environment, "afterwards": afterwards}
    )
