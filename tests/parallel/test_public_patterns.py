"""Patterns from public reports: optimizers that are replaced, graphs of gradients, odd dtypes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from on_ranks import gather, on_ranks
from pending_problem import (
    LR,
    assert_equal_on_ranks,
    batch,
    loss_of,
    make_model,
    train,
    weights_of,
)
from serial import make_workers
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError
from hvd_pipe.torch.strategies import base

pytestmark = on_ranks(2, init=hvd.init)

STRATEGIES = ("merged-gradient", "merged-gradient:overlap=forward", "pipe-sgd")
GIVEN = "merged-gradient:overlap=forward,bucket_bytes=4096"  # defers from its second step on
every = pytest.mark.parametrize("strategy", STRATEGIES)
STEPS = 24


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is dropped is gone when nobody refers to it, and not when a collector comes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def distributed(optimizer: torch.optim.Optimizer, named: Any, strategy: str) -> Any:
    return hvd.DistributedOptimizer(optimizer, named, strategy=strategy)


def plain_sgd(model: nn.Module, strategy: str) -> Any:
    plain = torch.optim.SGD(model.parameters(), LR)
    return distributed(plain, model.named_parameters(), strategy)


def means(model: nn.Module, step: int) -> list[torch.Tensor]:
    """Return the means of both ranks' gradients."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    both = [torch.autograd.grad(loss_of(model, step, rank), parameters) for rank in range(2)]
    return [(one + other) / 2 for one, other in zip(*both, strict=True)]


def alone(
    strategy: str,
    make_optimizer: Callable[[nn.Module], Any],
    steps: int = STEPS,
    drains: Collection[int] = (),
) -> torch.Tensor:
    """Return what one process comes to that has both ranks' gradients."""
    workers = make_workers(strategy, 2, make_model, make_optimizer)
    for step in range(steps):
        workers.backward(lambda model, rank, step: loss_of(model, step, rank), step)
        workers.step()
        if step in drains:
            workers.synchronize()
    workers.synchronize()
    return weights_of(workers.models[0])


@every
@pytest.mark.parametrize("keeps", [True, False], ids=["its own", "a new one"])
@pytest.mark.usefixtures("no_collector")
def test_plain_training_after_an_optimizer_was_dropped(strategy: str, keeps: bool) -> None:
    """Its hooks refused a second backward pass, until the collector came."""
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), LR)
    optimizer = distributed(plain, model.named_parameters(), strategy)
    train(model, optimizer, range(STEPS))
    optimizer.synchronize()
    assert_equal_on_ranks(model)
    del optimizer
    if not keeps:
        plain = torch.optim.SGD(model.parameters(), LR)
    train(model, plain, range(STEPS, STEPS + 4 + hvd.rank()))


@every
@pytest.mark.usefixtures("no_collector")
def test_a_new_optimizer_of_some_of_the_parameters(strategy: str) -> None:
    """The old one, which had them all, heard of their gradients as well."""
    model = make_model()
    for first in (0, 2, 0):
        named = list(model.named_parameters())[first:]
        optimizer = distributed(torch.optim.SGD([p for _, p in named], LR), named, strategy)
        for step in range(8):
            model.zero_grad()
            loss_of(model, step, hvd.rank()).backward()
            optimizer.step()
        optimizer.synchronize()
    assert_equal_on_ranks(model)


def three_of(model: nn.Module, wrap: Any, all_first: bool = False) -> list[Any]:
    """Return an optimizer of the first layer, one of the rest, and one of all parameters."""
    named = list(model.named_parameters())
    parts = (named, named[:2], named[2:]) if all_first else (named[:2], named[2:], named)
    return [wrap(torch.optim.Adam([p for _, p in part], 0.01), part) for part in parts]


class InTurn:
    """Optimizers of which each makes eight steps."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._turn = (each for each in optimizers for _ in range(8))

    def step(self) -> None:
        next(self._turn).step()


@pytest.mark.parametrize("synchronizes", [True, False], ids=["synchronize", "step alone"])
@pytest.mark.parametrize("all_first", [False, True], ids=["all last", "all first"])
@pytest.mark.parametrize("strategy", [*STRATEGIES[:2], GIVEN])
def test_optimizers_of_the_same_parameters_that_take_turns(
    strategy: str, all_first: bool, synchronizes: bool
) -> None:
    """The ones that were made first read buffers that were being reduced."""
    model = make_model()
    mine = three_of(model, lambda one, named: distributed(one, named, strategy), all_first)
    for step in range(STEPS):
        for optimizer in mine:
            optimizer.zero_grad()
        loss_of(model, step, hvd.rank()).backward()
        if not synchronizes:
            mine[step // 8].step()
            continue
        for optimizer in mine:
            optimizer.synchronize()
        with mine[step // 8].skip_synchronize():
            mine[step // 8].step()
    for optimizer in mine:
        optimizer.synchronize()
    wanted = alone(strategy, lambda of: InTurn(three_of(of, lambda one, _: one, all_first)))
    torch.testing.assert_close(weights_of(model), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("strategy", [*STRATEGIES, GIVEN])
def test_one_optimizer_a_parameter_that_steps_in_backward(strategy: str, to_none: bool) -> None:
    """As torchtitan's; a new engine of an optimizer put its hook behind the script's."""
    model = make_model()
    optimizers = {
        name: distributed(torch.optim.SGD([p], LR, 0.9), [(name, p)], strategy)
        for name, p in model.named_parameters()
    }

    def stepping(optimizer: Any) -> Any:
        def step(_: torch.Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)

        return step

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(stepping(optimizers[name]))
    for step in range(STEPS):
        loss_of(model, step, hvd.rank()).backward()
    for optimizer in optimizers.values():
        optimizer.synchronize()
    wanted = alone(strategy, lambda of: torch.optim.SGD(of.parameters(), LR, 0.9))
    torch.testing.assert_close(weights_of(model), wanted, rtol=0, atol=1e-12)


def test_ranks_send_for_other_optimizers_in_one_order() -> None:
    """They went through a set, whose order differs between ranks, and waited for its first."""
    named = {name: nn.Parameter(torch.ones(2)) for name in "abcd"}
    made = [
        distributed(
            torch.optim.SGD([named[name] for name in names], LR),
            [(name, named[name]) for name in names],
            "merged-gradient",
        )
        for names in ("abcd", "ab", "cd")
    ]
    engines = [each._hvd_pipe for each in made]
    with mock.patch.object(base, "_live", engines[:: 1 if hvd.rank() == 0 else -1]):
        first, second = gather([each.settings.tag for each in base.live_engines()])
    assert first == second
    assert len(first) == 3


@pytest.mark.parametrize("strategy", ["pipe-sgd", "merged-gradient:codec"])
def test_optimizers_cannot_take_turns_where_averages_cannot_be_averaged(strategy: str) -> None:
    model = make_model()
    codec = {"compression": hvd.Int8(error_feedback=True)} if strategy.endswith("codec") else {}
    old, *_, new = three_of(
        model,
        lambda one, named: hvd.DistributedOptimizer(
            one, named, strategy=strategy.removesuffix(":codec"), **codec
        ),
    )
    loss_of(model, 0, hvd.rank()).backward()
    before = weights_of(model)
    with pytest.raises(HvdPipeError, match="another DistributedOptimizer has as well"):
        old.step()
    assert torch.equal(weights_of(model), before)
    new.step()
    new.zero_grad()
    new.synchronize()
    assert_equal_on_ranks(model)


class Points(nn.Module):
    """Grows, as the points of Gaussian splatting do."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.x = nn.Parameter(torch.randn(5, 5, generator=generator).double())
        self.w = nn.Parameter(torch.randn(5, 2, generator=generator).double())

    def forward(self, queries: torch.Tensor) -> torch.Tensor:
        return torch.exp(-torch.cdist(queries, self.x) / 3) @ self.w

    def grow(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            [old], state = group["params"], optimizer.state.pop(group["params"][0])
            new = nn.Parameter(torch.cat([old.detach(), old.detach()[:2] * 0.9]))
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.cat([state[key], torch.zeros_like(state[key][:2])])
            group["params"][0] = new
            optimizer.state[new] = state
            setattr(self, group["name"], new)

    def adam(self) -> torch.optim.Optimizer:
        groups = [{"params": [p], "name": name} for name, p in self.named_parameters()]
        return torch.optim.Adam(groups, 0.01)


@every
def test_parameters_that_are_replaced_by_larger_ones(strategy: str) -> None:
    """They were planned twice."""
    model = Points()
    optimizer = distributed(model.adam(), model.named_parameters(), strategy)
    workers = make_workers(strategy, 2, Points, Points.adam)
    for step in range(STEPS):
        train(model, optimizer, range(step, step + 1))
        workers.backward(lambda model, rank, step: loss_of(model, step, rank), step)
        workers.step()
        if step % 8 == 7:
            optimizer.synchronize()
            workers.synchronize()
            for one, other in (
                (model, optimizer),
                *zip(workers.models, workers.optimizers, strict=True),
            ):
                one.grow(other)
    torch.testing.assert_close(
        weights_of(model), weights_of(workers.models[0]), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("how", ["put in between", "swapped"])
@pytest.mark.parametrize("strategy", STRATEGIES[:2])
def test_places_of_parameters_that_shift(strategy: str, how: str) -> None:
    """A new parameter took the name, and the message, of one that was still there."""

    def shift(of: nn.Sequential, optimizer: Any) -> None:
        torch.manual_seed(3)
        layer = nn.Linear(5, 5).double()
        if how == "put in between":
            of.insert(1, layer)
        else:
            del of[0]
            of.append(nn.Linear(5, 5).double())
        optimizer.param_groups[0]["params"][:] = list(of.parameters())

    made = []
    for _ in range(2):
        torch.manual_seed(2)
        made.append(nn.Sequential(*(nn.Linear(5, 5).double() for _ in range(3))))
    model, wanted = made

    def loss(of: nn.Module, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2 * step + rank)
        return (of(torch.randn(4, 5, generator=generator).double()) ** 2).mean()

    plain = torch.optim.SGD(wanted.parameters(), LR)
    optimizer = plain_sgd(model, strategy)
    for step in range(STEPS):
        if step == STEPS // 2:
            shift(model, optimizer)
            shift(wanted, plain)
        optimizer.zero_grad()
        loss(model, step, hvd.rank()).backward()
        optimizer.step()
        plain.zero_grad()
        (loss(wanted, step, 0) / 2 + loss(wanted, step, 1) / 2).backward()
        plain.step()
    optimizer.synchronize()
    torch.testing.assert_close(weights_of(model), weights_of(wanted), rtol=0, atol=1e-12)


@every
def test_gradients_with_a_graph(strategy: str) -> None:
    """A script differentiates them once more, before ``step()``."""
    model = make_model()
    optimizer = plain_sgd(model, strategy)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, hvd.rank())
        own = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        ones = [torch.ones_like(each) for each in own]
        expected = torch.autograd.grad(own, list(model.parameters()), ones, retain_graph=True)
        loss.backward(create_graph=True)
        gradients = [p.grad for p in model.parameters()]
        found = torch.autograd.grad(gradients, list(model.parameters()), ones)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        wants = means(model, step)
        optimizer.step()
        if strategy != "pipe-sgd":
            assert all(map(torch.allclose, [p.grad for p in model.parameters()], wants))
    optimizer.synchronize()
    wanted = alone(strategy, lambda of: torch.optim.SGD(of.parameters(), LR))
    torch.testing.assert_close(weights_of(model), wanted, rtol=0, atol=1e-12)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10 has grad_dtype")
@every
def test_gradients_of_another_dtype_than_their_parameters(strategy: str) -> None:
    model = make_model().bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    inner = torch.optim.SGD(model.parameters(), LR, foreach=False)
    optimizer = distributed(inner, model.named_parameters(), strategy)
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(batch(step, hvd.rank()).bfloat16()).float() ** 2).mean().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        optimizer.step()
    optimizer.synchronize()
    assert_equal_on_ranks(model.double())


def test_a_lazy_module_is_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(3, bias=False))
    with pytest.raises(ValueError, match=r"'0\.weight' has no shape yet: run one batch"):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    with pytest.raises(ValueError, match=r"'0\.weight' has no shape yet: run one batch"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), LR), model.named_parameters())


@every
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_were_cleared_stay_so_when_training_is_interrupted(
    strategy: str, to_none: bool
) -> None:
    """Trainers clear gradients after a step, then evaluate; the next pass added to averages."""
    model = make_model()
    optimizer = plain_sgd(model, strategy)
    for step in range(9):
        loss_of(model, step, hvd.rank()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        if step == 5:
            optimizer.synchronize()
    optimizer.synchronize()
    wanted = alone(strategy, lambda of: torch.optim.SGD(of.parameters(), LR), 9, {5})
    torch.testing.assert_close(weights_of(model), wanted, rtol=0, atol=1e-12)
