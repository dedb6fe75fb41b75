"""What was found broken once, case by case, on two ranks, for test_regressions.py."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from cases import run_cases
from problem import OPTIMIZERS, Weights, loss_of, make_model, weights_of
from torch import nn

import hvd_pipe.torch as hvd

STEPS = 6


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, hvd.rank(), number).backward()
    optimizer.step()


def normed(grow: bool) -> Weights:
    """Statistics of BatchNorm after a parameter was unfrozen, or the optimizer was copied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    assert isinstance(model[0], nn.Linear)
    model[0].weight.requires_grad_(not grow)
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(
        plain, model.named_parameters(), strategy="cocod:period=2"
    )
    for number in range(STEPS):
        if number == STEPS // 2:
            if grow:
                model[0].weight.requires_grad_(True)
            else:
                model, optimizer = copy.deepcopy((model, optimizer))
        step(model, optimizer, number)
    optimizer.synchronize()
    return torch.cat([b.flatten().double() for b in model.buffers()]).numpy()


def frozen_alone(strategy: str) -> str:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    try:
        for number in range(STEPS):
            if (hvd.rank(), number) == (1, 3):
                next(model.parameters()).requires_grad_(False)
            step(model, optimizer, number)
    except hvd.RanksDisagreeError as error:
        return str(error)
    return "nothing was raised"


def in_bfloat16() -> Weights:
    """A model that starts unlike on rank 1, with a sparse table, broadcast and trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2)).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(hvd.rank())
    plain = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    for number in range(4):
        optimizer.zero_grad()
        model(torch.tensor([number, hvd.rank()])).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    return torch.cat([p.detach().float().flatten() for p in model.parameters()]).numpy()


def added_and_copied() -> Weights:
    """The optimizer is copied right after add_param_group, and goes on as the copy."""
    model = make_model()
    first, second = model[0], model[2]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(first.parameters(), lr=0.1), first.named_parameters()
    )
    for number in range(STEPS):
        if number == 2:
            optimizer.add_param_group({"params": list(second.parameters())})
            if hvd.size() > 1:
                model, optimizer = copy.deepcopy((model, optimizer))
        step(model, optimizer, number)
    return weights_of(model)


def clamped() -> str:
    """Weights are clamped between steps, as in a Wasserstein GAN, while they are ahead."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model),
        model.named_parameters(),
        strategy="pipe-sgd:prediction=previous",
    )
    try:
        for number in range(STEPS):
            step(model, optimizer, number)
            with torch.no_grad():
                next(model.parameters()).clamp_(-0.1, 0.1)
    except hvd.HvdPipeError as error:
        optimizer.synchronize()
        return str(error)
    return "nothing was raised"


def goes_on(strategy: str) -> tuple[str, Weights]:
    """A step with gradients that were changed too early is refused; all go back to a state."""
    model, said = make_model(), ""
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    for number in range(STEPS):
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), number).backward()
        if number == 3:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            try:
                optimizer.step()
            except hvd.HvdPipeError as error:
                said = str(error)
                optimizer.load_state_dict(state)
        else:
            optimizer.step()
    optimizer.synchronize()
    return said, weights_of(model)


def adasum_channels_last() -> Weights:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    model = model.to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), op=hvd.Adasum
    )
    torch.manual_seed(hvd.rank())
    for _ in range(3):
        optimizer.zero_grad()
        images = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
        model(images).square().mean().backward()
        optimizer.step()
    return weights_of(model)


REFUSING = ("merged-gradient:plan=wfbp", "pipe-sgd")


def run() -> dict[Any, Any]:
    hvd.init()
    cases: dict[Any, Any] = {
        "unfrozen": partial(normed, True),
        "copied": partial(normed, False),
        "bfloat16": in_bfloat16,
        "added and copied": added_and_copied,
        "clamped": clamped,
        "adasum": adasum_channels_last,
    }
    for strategy in REFUSING:
        cases["goes on", strategy] = partial(goes_on, strategy)
        cases["frozen alone", strategy] = partial(frozen_alone, strategy)
    return run_cases(cases)


def joined(strategy: str, compression: str, sparse: bool) -> str:
    """Uneven steps and hvd.join() where the other ranks' messages are no plain all-reduces."""
    hvd.init()
    model = nn.Sequential(nn.Embedding(6, 4, sparse=sparse), nn.Linear(4, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        strategy=strategy,
    )
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    try:
        hvd.join()
    except hvd.HvdPipeError as error:
        optimizer.synchronize()
        return str(error)
    return "nothing was raised"
