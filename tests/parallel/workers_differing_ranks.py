"""Two ranks of which one differs: test_differing_ranks.py says what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from cases import run_cases
from problem import OPTIMIZERS, Weights, loss_of, make_model, train
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from workers_disagreement import Told

import hvd_pipe.torch as hvd

AT = 5  # the step before which rank 1 does something that rank 0 does not

STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=2")


def tell(error: Exception) -> Told:
    return Told([kind.__name__ for kind in type(error).__mro__], str(error))


# When the optimizer is built.


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.1)


def backwards(model: nn.Module) -> Optimizer:
    return SGD(list(model.parameters())[::-1], lr=0.1)


def half_frozen() -> nn.Module:
    model = make_model()
    model[0].requires_grad_(False)
    return model


def transposed() -> nn.Module:
    """A weight whose numbers lie in another order; a flat buffer would mix them up."""
    model = make_model()
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    return model


def built(
    make: Callable[[], nn.Module] = make_model,
    optimizer: Callable[[nn.Module], Optimizer] = sgd,
    groups: Any = None,
    **arguments: Any,
) -> Told | None:
    model = make()
    if groups is not None:
        groups = [[list(model.parameters())[place] for place in group] for group in groups]
    try:
        hvd.DistributedOptimizer(
            optimizer(model), model.named_parameters(), groups=groups, **arguments
        )
    except Exception as error:
        return tell(error)
    return None


UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chunk": ({"compression": hvd.Int8()}, {"compression": hvd.Int8(chunk=128)}),
    "error feedback": (
        {"compression": hvd.Compression.int8},
        {"compression": hvd.Int8(error_feedback=True)},
    ),
    "codec": ({"compression": hvd.Compression.bf16}, {"compression": hvd.Compression.int8}),
    "class": ({}, {"optimizer": adam}),
    "order": ({}, {"optimizer": backwards}),
    "frozen": ({}, {"make": half_frozen}),
    "strides": ({}, {"make": transposed}),
    "groups": ({"groups": [[0, 1]]}, {"groups": [[1, 0]]}),
    "predivide": ({"gradient_predivide_factor": 2.0}, {"gradient_predivide_factor": 1.0}),
    "sparse": ({"sparse_as_dense": True}, {"sparse_as_dense": False}),
    "weights": (
        {"strategy": hvd.CoCoD(weights=(3, 1))},
        {"strategy": hvd.CoCoD(weights=(1, 3))},
    ),
    "prediction": (
        {"strategy": "pipe-sgd:prediction=local"},
        {"strategy": "pipe-sgd:prediction=previous"},
    ),
    "pull back": (
        {"strategy": "cocod:pull_back=0.5"},
        {"strategy": "cocod:pull_back=0.6"},
    ),
    "momentum": ({"strategy": "cocod"}, {"strategy": "cocod:momentum=average"}),
    "fragments": ({"strategy": "cocod:fragments=2"}, {"strategy": "cocod:fragments=4"}),
    "bucket bytes": (
        {"strategy": "pipe-sgd:bucket_bytes=64"},
        {"strategy": "pipe-sgd:bucket_bytes=128"},
    ),
}


def build() -> dict[Any, Any]:
    hvd.init()
    return run_cases({name: partial(built, **each[hvd.rank()]) for name, each in UNLIKE.items()})


# While it trains: each is a job of its own, as ranks that have gone apart do not come together.


def late_weight(frozen: bool) -> tuple[nn.Module, nn.Parameter]:
    model = make_model(torch.float32)
    late = nn.Parameter(torch.ones(7), requires_grad=not frozen)
    model.register_parameter("late", late)
    return model, late


def join_alone(strategy: str, how: str, compression: str, steps: int) -> None:
    """Before step `AT` a parameter joins on rank 1 alone; what follows is not caught."""
    hvd.init()
    model, late = late_weight(frozen=how == "unfreeze")
    known = [p for p in model.parameters() if p is not late or how == "unfreeze"]
    optimizer: Any = hvd.DistributedOptimizer(
        SGD(known, lr=0.01),
        model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        strategy=strategy,
    )
    for step in range(steps):
        if (hvd.rank(), step) == (1, AT):
            if how == "unfreeze":
                late.requires_grad_(True)
            else:
                optimizer.add_param_group({"params": [late]})
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        if late.requires_grad:
            loss = loss + late.square().sum()
        loss.backward()
        optimizer.step()
    optimizer.synchronize()


def fail_alone(strategy: str, compression: str) -> None:
    """Rank 1's forward pass raises in the middle of training."""
    hvd.init()
    model = make_model(torch.float32)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["adam"](model),
        model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        strategy=strategy,
    )

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        if (rank, step) == (1, AT):
            raise RuntimeError("rank 1 has no memory left")
        return loss_of(model, rank, step)

    train(model, optimizer, hvd.rank(), loss=loss)


# A rank that is slow differs in time only.

PACES = {"alike": (0.0, 0.0), "rank 0 is slow": (0.01, 0.0), "rank 1 is slow": (0.0, 0.01)}
PACED = (
    # A fixed plan: int8's chunks follow the buckets, which a measured plan may cut otherwise.
    "merged-gradient:plan=single",
    "merged-gradient:plan=wfbp",
    *(strategy for strategy in STRATEGIES if strategy != "merged-gradient"),
    "pipe-sgd:prediction=local",
    "cocod:period=3,momentum=average",
    "cocod:period=4,fragments=4",
)


def paced(strategy: str, compression: Any, pauses: tuple[float, float]) -> Weights:
    model = make_model(torch.float32)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model),
        model.named_parameters(),
        compression=compression,
        strategy=strategy,
    )

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        time.sleep(pauses[rank] * (step % 3))  # before forward, and not in every step
        return loss_of(model, rank, step)

    return train(model, optimizer, hvd.rank(), loss=loss, steps=24, drains={11, 23})


def run_paced() -> dict[Any, Any]:
    hvd.init()
    codecs = {"none": hvd.Compression.none, "int8": hvd.Int8(chunk=8, error_feedback=True)}
    return run_cases(
        {
            (strategy, codec, pace): partial(paced, strategy, codecs[codec], PACES[pace])
            for strategy in PACED
            for codec in codecs
            for pace in PACES
        }
    )
