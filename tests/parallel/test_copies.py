"""A copy of a distributed optimizer is one: of the same strategy, codec, plan and passes."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import gather, on_ranks
from problem import OPTIMIZERS, loss_of, make_model, weights_of
from torch import nn

import hvd_pipe.torch as hvd

two = on_ranks(2, init=hvd.init)

OF_WHAT: dict[str, dict[str, Any]] = {
    "merged-gradient": {"strategy": "merged-gradient:bucket_bytes=64"},
    "pipe-sgd": {"strategy": hvd.PipeSGD(bucket_bytes=64, prediction="local")},
    "cocod": {"strategy": hvd.CoCoD(period=3, pull_back=0.5)},
    "codec": {"compression": hvd.Int8(chunk=8, error_feedback=True)},
    "sum": {"op": hvd.Sum},
    "predivided": {"gradient_predivide_factor": 2.0},
    "passes": {"backward_passes_per_step": 2},
    "dense": {"sparse_as_dense": True},
    "groups": {"groups": [[0, 3], [1, 2, 4]]},
}


def pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


def saved(pair: Any) -> Any:
    file = io.BytesIO()
    torch.save(pair, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "torch.save": saved,
    "a copy's copy": lambda pair: pickled(copy.deepcopy(pair)),
}


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    for _ in range(optimizer._engine().settings.passes):
        loss_of(model, hvd.rank(), number).backward()
    optimizer.step()


def described(optimizer: Any) -> dict[str, Any]:
    """What an optimizer's engine does, and how."""
    engine = optimizer._engine()
    settings, reduction = engine.settings, engine.reduction
    return {
        "kinds": [kind.__name__ for kind in type(optimizer).__mro__],
        "engine": type(engine),
        "strategy": str(optimizer._hvd_pipe_arguments.strategy),
        "plan": optimizer.plan and optimizer.plan.buckets,
        "groups": settings.groups,
        "names": list(settings.names),
        "passes": engine.settings.passes,
        "sparse_as_dense": settings.sparse_as_dense,
        "reduction": dataclasses.replace(reduction, process_set=None, traffic=None, group=None),
        "ranks": list(reduction.process_set.ranks),
    }


@two
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", OF_WHAT)
def test_a_copy_does_as_its_original(case: str, way: str) -> None:
    model, arguments = make_model(), dict(OF_WHAT[case])
    own = list(model.parameters())
    if "groups" in arguments:
        arguments["groups"] = [[own[i] for i in group] for group in arguments["groups"]]
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), **arguments
    )
    for number in range(3):
        step(model, optimizer, number)
    other_model, other = WAYS[way]((model, optimizer))
    assert described(other) == described(optimizer)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other_model, other, number)
    for one in (optimizer, other):
        one.synchronize()
    assert (weights_of(other_model) == weights_of(model)).all()
    first, second = gather(weights_of(other_model))
    assert (first == second).all()


@two
def test_a_copy_has_the_passes_of_today() -> None:
    """They may have been set after the optimizer was made."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](model), model.named_parameters())
    optimizer.set_backward_passes_per_step(3)
    assert copy.deepcopy((model, optimizer))[1]._engine().settings.passes == 3
