"""Updates of some parameters at a time: the bits of one update, and what may be updated so."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from hvd_pipe.torch.partial_updates import (
    is_separable,
    options_of,
    update_quietly,
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


def in_groups(made: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": list(made[:2])},
        {"params": list(made[2:]), "lr": torch.tensor(0.02), "weight_decay": 0.1},
    ]


def groups_for(name: str, made: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    groups = in_groups(made)
    if "a tensor" not in name:
        groups[1]["lr"] = 0.02
    return groups


def set_gradients(made: Sequence[nn.Parameter], number: int) -> None:
    torch.manual_seed(100 + number)
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)


def everything(optimizer: Optimizer, made: Sequence[nn.Parameter]) -> list[Any]:
    """Weights, state and options."""
    found: list[Any] = [p.detach().clone() for p in made]
    for parameter in made:
        found.append(sorted(optimizer.state[parameter].items()))
    found.append([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    return found


def flat(found: Any) -> Iterator[Any]:
    if isinstance(found, dict):
        found = [*found.items()]
    if isinstance(found, (list, tuple)):
        for each in found:
            yield from flat(each)
    else:
        yield found


def assert_same(one: Any, other: Any) -> None:
    for a, b in zip(flat(one), flat(other), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
            assert a.is_inference() == b.is_inference()
        else:
            assert a == b


def update(
    optimizer: Optimizer, due: Sequence[nn.Parameter], options: Sequence[dict[str, Any]]
) -> None:
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
    whole, parts = (KINDS[name](groups_for(name, made)) for made in (one, other))
    begun = torch.cat([p.detach().flatten() for p in one])
    for number in range(ROUNDS):
        set_gradients(one, number)
        set_gradients(other, number)
        whole.step()
        options, groups = options_of(parts), parts.param_groups
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
        for group, rate, taken in zip(groups, rates, options, strict=True):
            group["lr"] = taken["lr"] if isinstance(rate, torch.Tensor) else rate
        assert_same(everything(whole, one), everything(parts, other))
    assert not torch.equal(begun, torch.cat([p.detach().flatten() for p in one]))
    assert not any(p.is_inference() for p in other)


def test_an_update_that_raises_leaves_the_groups() -> None:
    made = parameters()
    optimizer = SGD(in_groups(made), lr=0.1)
    groups = optimizer.param_groups

    def step() -> None:
        assert [len(group["params"]) for group in optimizer.param_groups] == [1]
        raise RuntimeError("as users' code does")

    with pytest.raises(RuntimeError, match="as users' code does"):
        update_quietly(optimizer, step, made[:1], options_of(optimizer))
    assert optimizer.param_groups is groups
    assert [len(group["params"]) for group in groups] == [2, 3]


# Who else takes part in an update.


def test_hooks_and_scalers_are_seen() -> None:
    optimizer = SGD(parameters(), lr=0.1)
    assert updates_quietly(optimizer)
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        handle = register(lambda *_: None)
        assert not updates_quietly(optimizer)
        handle.remove()
        assert updates_quietly(optimizer)
    for register in (
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: None)
        assert not updates_quietly(optimizer)
        handle.remove()
    optimizer.found_inf = torch.zeros(1)  # type: ignore[attr-defined]
    assert not updates_quietly(optimizer)


# Which optimizers can be updated so.


class Plain(Optimizer):
    """A user's SGD with momentum, each parameter by itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def owned(self) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        return [
            (p, p.grad, group["lr"])
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, gradient, lr in self.owned():
            buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
            buffer.mul_(0.9).add_(gradient)
            self.apply(p, buffer, lr)

    def apply(self, p: torch.Tensor, change: torch.Tensor, lr: float) -> None:
        p.add_(change, alpha=-lr)


class InALoop(Plain):
    """With a list of tensors in its state."""

    def apply(self, p: torch.Tensor, change: torch.Tensor, lr: float) -> None:
        history = self.state[p].setdefault("history", [torch.zeros_like(p)])
        history.append(change.clone())
        p.add_(sum(history), alpha=-lr)


class GlobalNorm(Plain):
    """Clips by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = torch.stack([gradient.norm() for _, gradient, _ in self.owned()]).norm()
        for p, gradient, lr in self.owned():
            p.sub_(gradient / norm * lr)


class Counter(Plain):
    """Counts its updates in an attribute."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step()

    def apply(self, p: torch.Tensor, change: torch.Tensor, lr: float) -> None:
        p.add_(change, alpha=-lr / self.count)


class PrivateCounter(Plain):
    """Counts them in an attribute of a private name, and in one that is changed in place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self._count = 0
        self._seen: list[int] = []

    def step(self, closure: Any = None) -> None:
        self._count += 1
        self._seen.append(self._count)
        super().step()

    def apply(self, p: torch.Tensor, change: torch.Tensor, lr: float) -> None:
        p.add_(change, alpha=-lr / self._count)


class CountingGroup(Plain):
    """Counts them in its groups."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()


class OwnList(Plain):
    """Goes by a list of its own, and not by its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.all = [p for group in self.param_groups for p in group["params"]]

    def owned(self) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        return [(p, p.grad, 0.1) for p in self.all if p.grad is not None]


class Noisy(Plain):
    """Adds noise, which is drawn for one parameter after the other."""

    def apply(self, p: torch.Tensor, change: torch.Tensor, lr: float) -> None:
        p.add_(change + torch.randn_like(p), alpha=-lr)


class Raising(Plain):
    """Wants all gradients, and says so after it has changed something."""

    def step(self, closure: Any = None) -> None:
        super().step()
        if len(self.owned()) != 5:
            raise RuntimeError("where are the others?")


class Lookahead(Plain):
    """Does more in each sixth step, and counts steps until then."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.k = 0

    def step(self, closure: Any = None) -> None:
        self.k += 1
        super().step()
        if self.k % 6 == 0:
            for p, _, _ in self.owned():
                p.mul_(0.5)


class ClippingLarge(SGD):
    """Clips by the norm of all gradients, where that is above 1000."""

    def step(self, closure: Any = None) -> None:
        norm = sum(p.grad.norm() for g in self.param_groups for p in g["params"])
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(min(1.0, 1000.0 / norm))
        super().step()


class Slow(SGD):
    """A user's class on one of torch's."""


class Rescaled(SGD):
    """A user's class that changes what torch's does."""

    def step(self, closure: Any = None) -> None:
        norm = sum(p.grad.norm() for g in self.param_groups for p in g["params"])
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(norm)
        super().step()


class Mixin(Optimizer):
    """As `DistributedOptimizer` puts it before the user's class."""

    @property
    def plain(self) -> Callable[[], object]:
        step = super().step
        inside = getattr(step, "__wrapped__", None)
        return step if inside is None else lambda: inside(self)

    def step(self, closure: Any = None) -> None:
        raise AssertionError("an engine must not be asked")


def distributed(kind: type[Optimizer], **options: Any) -> Any:
    kind(parameters(), **options)  # as users make one: torch puts its wrapper around step()
    made = type(f"Distributed{kind.__name__}", (Mixin, kind), {})
    return made(parameters(), **options)


def owned_by(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("begun", [False, True], ids=["new", "after a step"])
@pytest.mark.parametrize(
    ("kind", "separable"),
    [
        (SGD, True),
        (Adam, True),
        (AdamW, True),
        (RMSprop, True),
        (Adagrad, True),
        (NAdam, True),
        (torch.optim.Adamax, True),
        (torch.optim.Rprop, True),
        (torch.optim.LBFGS, False),
        (Plain, True),
        (Slow, True),
        (InALoop, True),
        (GlobalNorm, False),
        (Counter, False),
        (PrivateCounter, False),
        (CountingGroup, False),
        (OwnList, False),
        (Noisy, False),
        (Raising, False),
        (Rescaled, False),
        (Lookahead, False),
        (ClippingLarge, False),
    ],
)
def test_is_separable(kind: type[Optimizer], separable: bool, begun: bool) -> None:
    """To try it leaves no trace."""
    optimizer = distributed(kind)
    made = owned_by(optimizer)
    set_gradients(made, 0)
    if begun and kind is not torch.optim.LBFGS:
        optimizer.plain()
        set_gradients(made, 1)
    weights, gradients = (
        [p.detach().clone() for p in made],
        [p.grad.clone() for p in made if p.grad is not None],
    )
    tensors = [p.grad for p in made]
    held = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}
    attributes = copy.deepcopy({k: v for k, v in held.items() if not k.endswith("_hooks")})
    before = copy.deepcopy(everything(optimizer, made)), dict(optimizer.state)
    groups, state = optimizer.param_groups, optimizer.state
    random_state = torch.get_rng_state(), random.getstate()

    assert is_separable(optimizer, optimizer.plain) is separable

    assert torch.equal(torch.get_rng_state(), random_state[0])
    assert random.getstate() == random_state[1]
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert dict(optimizer.state).keys() == before[1].keys()
    assert all(optimizer.state[p] is each for p, each in before[1].items())
    assert_same(everything(optimizer, made), before[0])
    assert_same([p.detach() for p in made], weights)
    assert all(p.grad is tensor for p, tensor in zip(made, tensors, strict=True))
    assert_same([p.grad for p in made], gradients)
    assert vars(optimizer).keys() == {*held, "state", "param_groups"}
    assert all(vars(optimizer)[key] is value for key, value in held.items())
    assert_same({key: held[key] for key in attributes}, attributes)


def test_one_parameter_is_separable() -> None:
    """There is no other half; its one update is that of all."""
    optimizer = distributed(Plain)
    made = owned_by(optimizer)
    made[0].grad = torch.ones_like(made[0])
    assert is_separable(optimizer, optimizer.plain)
