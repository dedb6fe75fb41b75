"""What would give wrong numbers or wait for ever, and must not, on two ranks."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import torch
from cases import run_cases
from problem import OPTIMIZERS, Weights, make_model, train, weights_of
from torch import nn

import hvd_pipe.torch as hvd

LR = 2.0**-6
EARLY, LATE = 5, 25  # steps of rank 0 and rank 1; a plan is due in between
MORE = 16  # after both have joined; a plan is due, if none was made

STRATEGIES = ("merged-gradient", "pipe-sgd", "cocod:period=2")


def one_weight(strategy: str, lr: float = LR) -> tuple[nn.Linear, Any]:
    """A model whose gradient is 1 on both ranks in every step."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=lr)
    return model, hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)


def step(model: nn.Linear, optimizer: Any) -> None:
    optimizer.zero_grad()
    model.weight.sum().backward()
    optimizer.step()


def joined(strategy: str) -> tuple[float, float, float]:
    """Uneven data: rank 0 has less. The weight after joining, synchronizing and going on."""
    model, optimizer = one_weight(strategy)
    for _ in range(LATE if hvd.rank() else EARLY):
        step(model, optimizer)
    hvd.join()
    before = model.weight.item()
    optimizer.synchronize()
    after = model.weight.item()
    for _ in range(MORE):
        step(model, optimizer)
    optimizer.synchronize()
    return before, after, model.weight.item()


def loaded(strategy: str) -> list[float]:
    """A state is loaded with an average in flight; the weight after each of three more steps."""
    model, optimizer = one_weight(strategy)
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        step(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.load_state_dict(state)
    nn.init.zeros_(model.weight)
    weights = []
    for _ in range(3):
        step(model, optimizer)
        weights.append(-model.weight.item() / LR)
    optimizer.synchronize()
    return [*weights, -model.weight.item() / LR]


def scaled(strategy: str) -> Weights | str:
    """Horovod's pattern for GradScaler: the weights, or why not."""
    model = make_model(torch.float32)
    optimizer: Any = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    try:
        for number in range(4):
            optimizer.zero_grad()
            x = torch.full((2, 6), 1.0 + hvd.rank() + number)
            scaler.scale(model(x).pow(2).mean()).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
    except hvd.HvdPipeError as error:
        optimizer.synchronize()
        return str(error)
    return weights_of(model)


def copied(how: str) -> str:
    _, optimizer = one_weight("pipe-sgd")
    try:
        copy.deepcopy(optimizer) if how == "deepcopy" else pickle.dumps(optimizer)
    except hvd.HvdPipeError as error:
        return str(error)
    return "nothing was raised"


class Old(torch.optim.SGD):
    """As people wrote optimizers before zero_grad() had an argument."""

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.zero_()


def old_zero_grad(strategy: str) -> Weights:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        Old(model.parameters(), lr=0.05), model.named_parameters(), strategy=strategy
    )
    return train(model, optimizer, hvd.rank(), steps=6)


def made_anew() -> Weights:
    """An optimizer for parameters that another one, still alive, has listened to."""
    model = make_model()
    first = hvd.DistributedOptimizer(OPTIMIZERS["adam"](model), model.named_parameters())
    second = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](model), model.named_parameters())
    weights = train(model, second, hvd.rank(), steps=6)
    del first
    return weights


def run() -> dict[Any, Any]:
    hvd.init()
    cases: dict[Any, Any] = {
        (name, strategy): partial(case, strategy)
        for strategy in STRATEGIES
        for name, case in (
            ("joined", joined),
            ("loaded", loaded),
            ("scaled", scaled),
            ("old", old_zero_grad),
        )
    }
    cases |= {("copied", how): partial(copied, how) for how in ("deepcopy", "pickle")}
    return run_cases({**cases, "made anew": made_anew})


def clip_without_a_gradient() -> str:
    """Rank 1 has an empty batch in step 2 and skips backward(), under the clipping pattern."""
    hvd.init()
    model, optimizer = one_weight("pipe-sgd")
    try:
        for number in range(6):
            optimizer.zero_grad()
            if (hvd.rank(), number) != (1, 2):
                model.weight.sum().backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
    except hvd.HvdPipeError as error:
        return str(error)
    return "nothing was raised"


def refused_on_one_rank() -> str:
    """An error of any kind while rank 1 reads its arguments reaches rank 0."""
    hvd.init()

    def names() -> Any:
        if hvd.rank() == 1:
            raise KeyError("layer 7")
        return make_model().named_parameters()

    model = make_model()

    class Named:
        def __iter__(self) -> Any:
            return iter(model.named_parameters()) if hvd.rank() == 0 else names()

    try:
        hvd.DistributedOptimizer(OPTIMIZERS["adam"](model), Named())
    except (KeyError, hvd.HvdPipeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
