"""Updates of some parameters at a time: the bits of one update, and what may be updated so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import BaseTorchFunctionMode

from hvd_pipe.torch.partial_updates import (
    Options,
    update_quietly,
    updates_each_parameter,
    updates_quietly,
)

Make = Callable[[list[dict[str, Any]]], Optimizer]

ROUNDS = 5

KINDS: dict[str, Make] = {
    "sgd": lambda groups: SGD(groups, lr=0.1),
    "momentum": lambda groups: SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda groups: SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda groups: Adam(groups, lr=0.01),
    "amsgrad": lambda groups: Adam(groups, lr=0.01, amsgrad=True),
    "adam, lr a tensor": lambda groups: Adam(groups, lr=torch.tensor(0.01), foreach=False),
    "adamw": lambda groups: AdamW(groups, lr=0.01),
    "rmsprop": lambda groups: RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda groups: Adagrad(groups, lr=0.1, lr_decay=0.1),
    "nadam": lambda groups: NAdam(groups, lr=0.01),
    **{
        f"{kind.__name__}, {how}": (
            lambda groups, kind=kind, how=how: kind(groups, lr=0.01, **{how: True})
        )
        for kind in (SGD, Adam, AdamW)
        for how in ("foreach", "fused")
    },
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(3, 2 + i)) for i in range(5)]


def groups_of(made: Sequence[nn.Parameter], rate: Any = 0.02) -> list[dict[str, Any]]:
    return [
        {"params": list(made[:2])},
        {"params": list(made[2:]), "lr": rate, "weight_decay": 0.1},
    ]


def make(name: str, made: Sequence[nn.Parameter]) -> Optimizer:
    return KINDS[name](groups_of(made, torch.tensor(0.02) if "a tensor" in name else 0.02))


def set_gradients(made: Sequence[nn.Parameter], number: int) -> None:
    torch.manual_seed(100 + number)
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)


def everything(optimizer: Optimizer, made: Sequence[nn.Parameter]) -> list[Any]:
    """Weights, state and options."""
    options = [
        {k: v for k, v in group.items() if isinstance(v, (float, tuple, torch.Tensor))}
        for group in optimizer.param_groups
    ]
    return [[p.detach().clone() for p in made], [optimizer.state[p] for p in made], options]


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


def update(optimizer: Optimizer, due: Sequence[nn.Parameter], options: Options) -> None:
    """With the gradients of these alone, as an engine binds them."""
    kept = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    for parameter, _ in kept:
        if not any(parameter is each for each in due):
            parameter.grad = torch.full_like(parameter, 1e9)  # not to be looked at
    update_quietly(optimizer, optimizer.step, due, options)
    for parameter, gradient in kept:
        parameter.grad = gradient


@pytest.mark.parametrize("name", KINDS)
def test_updates_of_some_are_one_update_of_all(name: str) -> None:
    """In inference mode and with autocast, and though the learning rate is another by then."""
    one, other = parameters(), parameters()
    whole, parts = make(name, one), make(name, other)
    begun = torch.cat([p.detach().flatten() for p in one])
    for number in range(ROUNDS):
        set_gradients(one, number)
        set_gradients(other, number)
        whole.step()
        options, groups = Options.of(parts), parts.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:  # as a scheduler does, which has its turn after step()
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(7.0)
            else:
                group["lr"] = 7.0
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            update(parts, other[1::2], options)
        update(parts, other[::2], options)
        assert parts.param_groups is groups
        assert all(float(group["lr"]) == 7.0 for group in groups)
        for group, rate, taken in zip(groups, rates, options.groups, strict=True):
            group["lr"] = taken["lr"] if isinstance(rate, torch.Tensor) else rate
        assert_same(everything(whole, one), everything(parts, other))
    assert not torch.equal(begun, torch.cat([p.detach().flatten() for p in one]))
    assert not any(p.is_inference() for p in other)


def test_an_update_that_raises_leaves_the_groups() -> None:
    made = parameters()
    optimizer = SGD(groups_of(made), lr=0.1)
    groups = optimizer.param_groups

    def step() -> None:
        assert [len(group["params"]) for group in optimizer.param_groups] == [1]
        raise RuntimeError("as users' code does")

    with pytest.raises(RuntimeError, match="as users' code does"):
        update_quietly(optimizer, step, made[:1], Options.of(optimizer))
    assert optimizer.param_groups is groups
    assert [len(group["params"]) for group in groups] == [2, 3]


# Who else takes part in an update.


def test_hooks_and_scalers_are_seen() -> None:
    optimizer = SGD(parameters(), lr=0.1)
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        assert updates_quietly(optimizer)
        handle = register(lambda *_: None)
        assert not updates_quietly(optimizer)
        handle.remove()
    assert updates_quietly(optimizer)
    optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
    assert not updates_quietly(optimizer)


# Where an update is made.


@contextlib.contextmanager
def within_grad() -> Iterator[None]:
    """Within a transformation of torch.func, which refuses to write to what it has not seen."""
    entered = torch._C._functorch._grad_increment_nesting()  # type: ignore[attr-defined]
    assert entered == 1
    try:
        yield
    finally:
        torch._C._functorch._grad_decrement_nesting()  # type: ignore[attr-defined]


ELSEWHERE: dict[str, Callable[[], Any]] = {
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another default device": lambda: torch.device("meta"),
    "fake tensors": FakeTensorMode,
    "a transformation": within_grad,
    "a mode that sees all functions": BaseTorchFunctionMode,
}


@pytest.mark.parametrize("context", ELSEWHERE.values(), ids=ELSEWHERE)
def test_an_update_is_made_where_step_was_called(context: Callable[[], Any]) -> None:
    one, other = parameters(), parameters()
    whole, parts = (AdamW(made, lr=0.01) for made in (one, other))
    for number in range(ROUNDS):
        set_gradients(one, number)
        set_gradients(other, number)
        whole.step()
        options = Options.of(parts)
        with context(), options.context():
            update_quietly(parts, parts.step, other, options)
    assert_same(everything(whole, one), everything(parts, other))


# Which optimizers can be updated so.


class Own(Optimizer):
    """Another library's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


class Declared(Own):
    updates_each_parameter = True


class Recounting(SGD):
    """A user's subclass, which may do anything."""


def wrapped(optimizer: Optimizer) -> Optimizer:
    """Return what a distributed optimizer is: an instance of a class with the user's as a base."""
    optimizer.__class__ = type("Wrapped", (type(optimizer),), {})
    return optimizer


def declared_later() -> Optimizer:
    optimizer = Own(parameters())
    optimizer.updates_each_parameter = True  # type: ignore[attr-defined]
    return optimizer


@pytest.mark.parametrize(
    ("made", "known"),
    [
        *((lambda name=name: make(name, parameters()), True) for name in KINDS),
        (lambda: torch.optim.LBFGS(parameters()), False),
        (lambda: Own(parameters()), False),
        (lambda: Recounting(parameters(), lr=0.1), False),
        (lambda: Declared(parameters()), True),
        (declared_later, True),
    ],
)
def test_what_is_known_to_update_each_parameter(
    made: Callable[[], Optimizer], known: bool
) -> None:
    assert updates_each_parameter(wrapped(made())) == known
