"""PipeSGD: every gradient is applied exactly once, one step late, whatever the script does."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cells import Cell
from on_ranks import gather, on_ranks
from pipe_sgd_race import DEFAULT_BYTES, RACED, Race, race
from problem import OPTIMIZERS, STEPS, Loss, Weights, loss_of, make_model, train, weights_of
from serial import make_workers
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.torch.messages.allreduce import REDUCED, SENT

DRAINS = (STEPS // 2, STEPS - 1)

momentum = OPTIMIZERS["momentum"]
pytestmark = on_ranks(2, init=hvd.init)


def wrapped(strategy: str) -> tuple[Any, Any]:
    model = make_model()
    return model, hvd.DistributedOptimizer(
        momentum(model), model.named_parameters(), strategy=strategy
    )


class Recorder(torch.optim.Optimizer):
    """Applies nothing, but remembers each gradient that it was told to apply."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.applied: list[list[float]] = []

    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.applied.append(torch.cat(gradients).tolist())


def assert_equation(strategy: str, weights: Weights) -> None:
    """Compare a run that is drained at its end."""
    wanted = Cell(strategy, "momentum").expected(2)[hvd.rank()]
    np.testing.assert_allclose(weights, wanted, rtol=0, atol=1e-12)


class Optimizer:
    """An optimizer, with something else in the place of one of its methods."""

    def __init__(self, optimizer: Any, **methods: Callable[[], Any]) -> None:
        self.step, self.synchronize = optimizer.step, optimizer.synchronize
        self.zero_grad = optimizer.zero_grad
        vars(self).update(methods)


@pytest.mark.parametrize("after", [2, 3])
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd"])
def test_a_state_is_loaded_where_gradients_stay_in_place(strategy: str, after: int) -> None:
    """The pending gradient of a state went into the buffer that p.grad led to, in every second
    step: zero_grad(set_to_none=False) cleared it, and the next gradient was applied twice.
    """
    model, optimizer = wrapped(strategy)
    steps = 0

    def step() -> None:
        nonlocal steps
        optimizer.step()
        steps += 1
        if steps == after:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    zero_grad = functools.partial(optimizer.zero_grad, set_to_none=False)
    loading = Optimizer(optimizer, step=step, zero_grad=zero_grad)
    assert_equation(strategy, train(model, loading, hvd.rank(), drains={STEPS - 1}))


def assert_drained_twice(strategy: str, weights: list[Weights]) -> None:
    """Compare a run that is drained in the middle and at its end."""
    wanted = make_workers(strategy, 2, make_model, momentum).train(STEPS, drains=DRAINS)
    np.testing.assert_allclose(weights, wanted[hvd.rank()], rtol=0, atol=1e-12)


BY_HAND = ["merged-gradient", "pipe-sgd", "pipe-sgd:warmup_steps=5", "cocod:period=3"]


def set_gradients(model: nn.Module, optimizer: Any, way: str, step: int) -> None:
    """Set gradients by hand, of which no hook hears, or (mixed) of the first layer's at most."""
    parameters = list(model.parameters())
    loss = loss_of(model, hvd.rank(), step)
    gradients = list(torch.autograd.grad(loss, parameters, retain_graph=True))
    first = 0
    if way == "mixed":
        optimizer.zero_grad()
        if step % 2:
            first = 2
            loss.backward(inputs=parameters[:first])
    for parameter, gradient in zip(parameters[first:], gradients[first:], strict=True):
        if way in ("assigned", "mixed") or parameter.grad is None:
            parameter.grad = gradient
        elif way == "in place":
            parameter.grad.copy_(gradient)
        else:
            parameter.grad.data.copy_(gradient)  # nobody can see it


@pytest.mark.parametrize("synchronizes", [False, True], ids=["step", "synchronize"])
@pytest.mark.parametrize("way", ["assigned", "in place", "mixed"])
@pytest.mark.parametrize("strategy", BY_HAND)
def test_gradients_may_be_set_by_hand(strategy: str, way: str, synchronizes: bool) -> None:
    """synchronize() heard of hooks only. Pipe-SGD drained, and then sent again what it had just
    applied: the first gradient was applied for ever. CoCoD averaged models in every step, and
    merged-gradient applied each rank's own gradient after a drain.
    """
    model, optimizer = wrapped(strategy)
    records = []
    for step in range(STEPS):
        set_gradients(model, optimizer, way, step)
        if synchronizes:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        records.append(weights_of(model))
        if step in DRAINS:
            if way == "in place":
                model.zero_grad(set_to_none=False)
            optimizer.synchronize()
            records.append(weights_of(model))
    assert_drained_twice(strategy, records)


@pytest.mark.parametrize("strategy", BY_HAND[1:])
def test_gradients_that_nobody_can_see_are_refused(strategy: str) -> None:
    """A write by ``.data`` counts no version: what was applied before was applied again."""
    model, optimizer = wrapped(strategy)
    with pytest.raises(hvd.HvdPipeError, match=r"synchronize\(\) found no new gradient"):  # noqa: PT012
        for step in range(4):
            set_gradients(model, optimizer, "by data", step)
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()


def drained_by_a_new_engine(strategy: str, renew: Callable[[Any, Any], tuple[Any, Any]]) -> None:
    """The optimizer is renewed in the middle and at the end, and drained first thing."""
    model, optimizer = wrapped(strategy)
    records = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        records.append(weights_of(model))
        if step in DRAINS:
            model, optimizer = renew(model, optimizer)
            optimizer.synchronize()
            records.append(weights_of(model))
    assert_drained_twice(strategy, records)


@pytest.mark.parametrize("strategy", BY_HAND)
def test_a_copy_knows_what_was_applied(strategy: str) -> None:
    drained_by_a_new_engine(strategy, lambda *trained: copy.deepcopy(trained))


def init() -> None:
    importlib.import_module("mpi4py.MPI")  # it finalises MPI, so that Horovod does not
    hvd.init()


@on_ranks(2, init=init)
@pytest.mark.parametrize("strategy", BY_HAND)
def test_an_engine_that_starts_again_knows_what_was_applied(strategy: str) -> None:
    """After hvd.shutdown() and hvd.init(), Pipe-SGD took a gradient that it had applied for a new
    one, sent it again and dropped the pending one.
    """

    def restart(*trained: Any) -> Any:
        hvd.shutdown()
        hvd.init()
        return trained

    drained_by_a_new_engine(strategy, restart)


# Plans that are tried in training ----------------------------------------------------------------


class Raced(NamedTuple):
    """After each step, the weights, the plan, and whether a state would hold it."""

    weights: Weights
    plans: list[hvd.Plan]
    holds: list[bool]


SAVES = range(13, STEPS, 2)
"""The steps whose end is saved, by their number from 1 on."""


def load_often(optimizer: Any, step: int) -> None:
    """Where a message travels in the buckets before, and where a plan has just been chosen."""
    if step in (9, 10, 25, 43, 44):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def grows(optimizer: Any, step: int) -> None:
    """A layer joins while a message travels in the buckets before."""
    if step == 9:
        torch.manual_seed(8)
        more = nn.Linear(3, 3).double()
        for p in more.parameters():
            p.grad = torch.full_like(p, 0.25)
        optimizer.add_param_group({"params": list(more.parameters())})


class Embedded(nn.Module):
    """One gradient is sparse, and comes first in the step in which a plan is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, sparse=True, dtype=torch.float64)
        self.layers = make_model()


def embedded_loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    rows = torch.tensor([(3 * rank + step) % 9, (rank + 2 * step) % 9])
    inputs = model.table(rows) if step >= 8 else torch.ones(2, 6, dtype=torch.float64)
    result: torch.Tensor = model.layers(inputs).square().mean()
    return result


def raced(
    stays: int | None,
    options: str = "",
    after: Callable[[Any, int], None] = lambda optimizer, step: None,
    drains: Collection[int] = (),
    make: Callable[[], nn.Module] = make_model,
    loss: Loss = loss_of,
    steps: int = STEPS,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
) -> Raced:
    """Train while plans are tried, or with fixed buckets where no plan is to stay."""
    torch.manual_seed(3)
    model = make()

    def run(optimizer: Any) -> Raced:
        plans: list[hvd.Plan] = []
        holds = []

        def step() -> None:
            optimizer.step()
            after(optimizer, len(plans))
            plans.append(optimizer.plan)
            if hvd.rank() == 0 and len(plans) in SAVES:  # one rank alone may save
                holds.append("plan" in optimizer.state_dict()["hvd_pipe"]["counters"])

        watched, last = Optimizer(optimizer, step=step), {*drains, steps - 1}
        weights = train(model, watched, hvd.rank(), loss=loss, steps=steps, drains=last)
        return Raced(weights, plans, holds)

    clock = race(1 if stays is None else stays)
    given = [] if stays else [f"bucket_bytes={DEFAULT_BYTES}"]
    strategy = ":".join(["pipe-sgd", ",".join([*filter(None, [options]), *given])]).rstrip(":")
    return clock.run(run, model, make_optimizer(model), strategy=strategy)


@pytest.mark.parametrize(
    ("stays", "script"),
    [
        pytest.param(1, {}, id="1 stays"),
        pytest.param(4, {}, id="4 stay"),
        pytest.param(6, {}, id="6 stay"),
        pytest.param(1, {"options": "warmup_steps=2"}, id="warm-up"),
        pytest.param(4, {"options": "prediction=local"}, id="prediction"),
        pytest.param(1, {"options": "prediction=previous"}, id="guess"),
        # Plans change in the steps 8, 16 and 24; the set in flight follows a step later.
        pytest.param(4, {"drains": (8, 16, 17, 25)}, id="drained"),
        pytest.param(6, {"drains": (7, 9, 24)}, id="drained in the change"),
        pytest.param(1, {"after": load_often, "steps": 60}, id="loaded"),
        pytest.param(
            4,
            {
                "make": Embedded,
                "loss": embedded_loss,
                "make_optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
            },
            id="sparse",
        ),
        pytest.param(1, {"after": grows, "steps": 45}, id="grows"),
    ],
)
def test_plans_are_tried_and_nothing_is_lost_on_the_way(
    stays: int, script: dict[str, Any]
) -> None:
    """A change of buckets moves no bit: two ranks' sums are the same in any message."""
    run, fixed = raced(stays, **script), raced(None, **script)
    assert np.array_equal(run.weights, fixed.weights)
    assert all(plan.tried == () for plan in fixed.plans)
    plan = run.plans[-1]
    assert plan.tried, "a plan stays"
    if "make" not in script and script.get("after") is not grows:
        assert [count for count, _ in plan.tried] == list(RACED)
        assert len(plan.buckets) == stays


def test_a_state_with_a_plan_is_loaded_without_new_trials() -> None:
    stay = [bool(plan.tried) for plan in raced(1, after=load_often, steps=60).plans]
    assert stay == sorted(stay)
    assert stay[44]


def test_a_rank_that_has_joined_is_not_asked() -> None:
    """It takes part in all-reduces only: the plan is timed anew when all are back.

    Rank 0 has a batch less an epoch. In the first, the plan was timed when rank 1 is alone.
    """
    runs = []
    for strategy in ("pipe-sgd", f"pipe-sgd:bucket_bytes={DEFAULT_BYTES}"):
        model = make_model()

        def run(optimizer: Any, model: nn.Module = model) -> tuple[list[Weights], list[hvd.Plan]]:
            weights, plans = [], []
            for epoch, steps in enumerate((8, 10, 10, 10, 10)):
                for step in range(steps + hvd.rank()):
                    optimizer.zero_grad()
                    loss_of(model, hvd.rank(), 10 * epoch + step).backward()
                    optimizer.step()
                hvd.join()
                weights.append(weights_of(model))
                plans.append(optimizer.plan)
            return weights, plans

        runs.append(race(4).run(run, model, momentum(model), strategy=strategy))
    (weights, plans), (fixed, _) = runs
    assert np.array_equal(weights, fixed)
    assert gather(plans) == [plans] * 2
    assert len(plans[-1].tried) == len(RACED)


def test_what_int8_has_lost_survives_a_change_of_buckets() -> None:
    """It is in the residuals, whatever the buckets: sums over all steps and ranks say so."""
    generator, steps = torch.Generator().manual_seed(5), 30
    model = nn.ParameterList(torch.randn(40, generator=generator) for _ in range(4))
    data = torch.randn(2, steps, 4, 40, generator=generator)  # the same on both ranks
    recorder, plans, most = Recorder(model), set(), 0.0

    def run(optimizer: Any) -> None:
        nonlocal most
        for step in range(steps):
            optimizer.zero_grad()
            own = data[hvd.rank(), step]
            sum((p * x).sum() for p, x in zip(model, own, strict=True)).backward()
            optimizer.step()
            plans.add(len(optimizer.plan.buckets))
            saved = optimizer.state_dict()["hvd_pipe"]["tensors"]
            pending, sent, reduced = (
                torch.cat([saved[key][i] for i in range(4)]) for key in ("pending", SENT, REDUCED)
            )
            applied = 2 * (torch.tensor(recorder.applied).view(-1, 160).sum(0) + pending)
            # What is encoded in the end is an average: of what all ranks have lost there, a half.
            residuals = hvd.allreduce(sent + 2 * reduced, op=hvd.Sum, name="residuals")
            computed = data[:, : step + 1].sum((0, 1)).flatten()
            np.testing.assert_allclose(applied + residuals, computed, atol=1e-4)
            most = max(most, float(residuals.abs().max()))

    codec = hvd.Int8(chunk=16, error_feedback=True)
    Race({}).run(run, model, recorder, strategy="pipe-sgd", compression=codec)
    assert len(plans) > 1
    assert most > 1e-3
