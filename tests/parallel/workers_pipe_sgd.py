"""Pipe-SGD on parameters whose gradients say which step they come from."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import numpy as np
import torch
from cases import Raised, run_cases
from problem import OPTIMIZERS, STEPS, Loss, Weights, loss_of, make_model, train, weights_of
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.runtime import bucket_planner
from hvd_pipe.torch.messages.allreduce import REDUCED, SENT
from hvd_pipe.torch.strategies import pipe_sgd

R = TypeVar("R")

LABELS = (SENT, REDUCED)
WARMUP = 3
CLIP = 1.0


class Recorder(torch.optim.Optimizer):
    """Applies nothing, but remembers each gradient that it was told to apply."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.applied: list[list[float]] = []

    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.applied.append(torch.cat(gradients).tolist())


class Telltale(nn.Module):
    """The gradient of ``step``: worker i's is (1, (i+1) (step+1)); for ``rare`` see the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.rare = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def loss(self, rank: int, step: int) -> torch.Tensor:
        result = self.step[0] + self.step[1] * (rank + 1) * (step + 1)
        if rank == 0 and step % 2 == 0:  # the only gradients that ``rare`` gets
            result = result + self.rare.sum() * (step + 1)
        return result


def expected(step: int) -> list[float]:
    """The average over two workers of the gradients that `Telltale.loss` makes."""
    return [1.0, 1.5 * (step + 1), 0.5 * (step + 1) if step % 2 == 0 else 0.0]


class Applied(NamedTuple):
    """All gradients that were applied, and how many had been after each call."""

    gradients: list[list[float]]
    after_steps: list[int]
    after_synchronize: int
    after_more_steps: list[int]
    after_second_synchronize: int
    after_third_synchronize: int


def applied() -> Applied:
    """Ten steps, drain, four more, drain, drain again."""
    model = Telltale()
    optimizer = hvd.DistributedOptimizer(
        Recorder(model), model.named_parameters(), strategy=hvd.PipeSGD(warmup_steps=WARMUP)
    )
    seen = optimizer.applied

    def steps(numbers: range) -> list[int]:
        counts = []
        for number in numbers:
            optimizer.zero_grad()
            model.loss(hvd.rank(), number).backward()
            optimizer.step()
            counts.append(len(seen))
        return counts

    def synchronize() -> int:
        optimizer.synchronize()
        return len(seen)

    counts = (steps(range(10)), synchronize(), steps(range(10, 14)), synchronize(), synchronize())
    return Applied(seen, *counts)


class Clipped(NamedTuple):
    """What was in p.grad after ``synchronize()`` and the weights after each step."""

    gradients: list[list[float]]
    weights: list[list[float]]


def clipped(steps: int = 10) -> Clipped:
    """Horovod's pattern for clipping, with plain SGD at a learning rate of 1."""
    model = Telltale()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        model.named_parameters(),
        strategy=f"pipe-sgd:warmup_steps={WARMUP}",
    )
    result = Clipped([], [])
    for number in range(steps):
        optimizer.zero_grad()
        model.loss(hvd.rank(), number).backward()
        optimizer.synchronize()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        result.gradients.append(torch.cat(gradients).tolist())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with optimizer.skip_synchronize():
            optimizer.step()
        result.weights.append(torch.cat([p.detach() for p in model.parameters()]).tolist())
    return result


def cleared(strategy: str, clear: Callable[[nn.Module, Any], None]) -> Weights:
    """Train with another way to clear gradients than ``optimizer.zero_grad()``."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )

    class Cleared:
        step, synchronize = optimizer.step, optimizer.synchronize

        @staticmethod
        def zero_grad() -> None:
            clear(model, optimizer)

    return train(model, Cleared, hvd.rank(), drains={STEPS - 1})


def loaded(strategy: str, after: int) -> Weights:
    """Load the state in mid-run, where ``p.grad`` stays a tensor that is zeroed in place."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )

    class Loading:
        synchronize, steps = optimizer.synchronize, 0

        def step(self) -> None:
            optimizer.step()
            self.steps += 1
            if self.steps == after:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

        def zero_grad(self) -> None:
            optimizer.zero_grad(set_to_none=False)

    return train(model, Loading(), hvd.rank(), drains={STEPS - 1})


def _by_hand(model: nn.Module, _: object) -> None:
    for p in model.parameters():
        p.grad = None


CLEAR: dict[str, Callable[[nn.Module, Any], None]] = {
    "optimizer, to None": lambda _, optimizer: optimizer.zero_grad(set_to_none=True),
    "optimizer, to zero": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "model, to None": lambda model, _: model.zero_grad(),
    "model, to zero": lambda model, _: model.zero_grad(set_to_none=False),
    "by hand": _by_hand,
}


def by_hand(strategy: str, way: str, pattern: str) -> Weights:
    """Gradients that no hook hears of; drained in the middle and at the end of training."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    records = []
    for step in range(STEPS):
        set_gradients(model, optimizer, way, step)
        if pattern == "step":
            optimizer.step()
        else:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        records.append(weights_of(model))
        if step in (STEPS // 2, STEPS - 1):
            if way == "in place":
                model.zero_grad(set_to_none=False)
            optimizer.synchronize()
            records.append(weights_of(model))
    return np.array(records)


def set_gradients(model: nn.Module, optimizer: Any, way: str, step: int) -> None:
    parameters = list(model.parameters())
    loss = loss_of(model, hvd.rank(), step)
    if way == "mixed":  # a hook hears of the first layer, or of nothing
        optimizer.zero_grad()
        first = 2 if step % 2 else 0
        gradients = list(torch.autograd.grad(loss, parameters, retain_graph=True))
        if first:
            loss.backward(inputs=parameters[:first])
        for parameter, gradient in zip(parameters[first:], gradients[first:], strict=True):
            parameter.grad = gradient
        return
    gradients = list(torch.autograd.grad(loss, parameters))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if way == "in place" and parameter.grad is not None:
            parameter.grad.copy_(gradient)
        else:
            parameter.grad = gradient


def by_data(strategy: str) -> str:
    """Gradients are written where nobody can see it."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    for step in range(4):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss_of(model, hvd.rank(), step), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.data.copy_(gradient)
        optimizer.synchronize()
        try:
            with optimizer.skip_synchronize():
                optimizer.step()
        except hvd.HvdPipeError as error:
            return str(error)
    return "nothing was raised"


def started_again(strategy: str) -> Weights:
    """Horovod ends and starts anew in mid-run, and the optimizer is drained first thing."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    records = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        records.append(weights_of(model))
        if step in (STEPS // 2, STEPS - 1):
            hvd.shutdown()
            hvd.init()
            optimizer.synchronize()
            records.append(weights_of(model))
    return np.array(records)


def copied(strategy: str) -> Weights:
    """The copy of an optimizer is drained first thing."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    records = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        records.append(weights_of(model))
        if step in (STEPS // 2, STEPS - 1):
            model, optimizer = copy.deepcopy((model, optimizer))
            optimizer.synchronize()
            records.append(weights_of(model))
    return np.array(records)


DEFAULT_BYTES = 64  # with which the model has six messages, then four, then one
RACED = (6, 4, 1)
FIXED = f"bucket_bytes={DEFAULT_BYTES}"
SECONDS: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {
    6: ((1.0, 2.0, 3.0), (1.0, 1.5, 2.0)),
    4: ((3.0, 1.0, 1.5), (3.0, 1.0, 1.5)),
    # Each rank by itself would keep another plan: the slowest rank's steps count.
    1: ((1.0, 2.0, 3.0), (4.0, 3.5, 1.0)),
}
"""By the plan that stays, the seconds of a step with each plan, on both ranks."""


SAVES = range(13, STEPS, 2)
"""The steps whose end is saved, by their number from 1 on."""


class Race:
    """Plans of small messages, timed by a clock that goes as the plan in use wants.

    Args:
        seconds: Of a step, by the number of messages.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        self._seconds, self._now = seconds, 0.0
        self.optimizer: Any = None

    def perf_counter(self) -> float:
        self._now += self._seconds.get(len(self.optimizer.plan.buckets), 1.0)
        return self._now

    def run(self, train: Callable[[Any], R], model: nn.Module, plain: Any, **options: Any) -> R:
        """Train with a distributed optimizer whose plans are timed by this."""
        small = mock.patch.object(bucket_planner, "DEFAULT_BUCKET_BYTES", DEFAULT_BYTES)
        with small, mock.patch.object(pipe_sgd, "time", self):
            self.optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
            return train(self.optimizer)


def race(stays: int) -> Race:
    return Race(dict(zip(RACED, SECONDS[stays][hvd.rank()], strict=True)))


class Raced(NamedTuple):
    """After each step, the weights, the plan, and whether a state would hold it."""

    weights: Weights
    plans: list[hvd.Plan]
    holds: list[bool]


class Watched:
    """An optimizer that notes its plan after each step, and may do something then."""

    def __init__(self, optimizer: Any, after: Callable[[Any, int], None]) -> None:
        self._optimizer, self._after = optimizer, after
        self.zero_grad, self.synchronize = optimizer.zero_grad, optimizer.synchronize
        self.plans: list[hvd.Plan] = []
        self.holds: list[bool] = []

    def step(self) -> None:
        self._optimizer.step()
        self._after(self._optimizer, len(self.plans))
        self.plans.append(self._optimizer.plan)
        if hvd.rank() == 0 and len(self.plans) in SAVES:  # one rank alone may save
            counters = self._optimizer.state_dict()["hvd_pipe"]["counters"]
            self.holds.append("plan" in counters)


def nothing(_: Any, step: int) -> None:
    pass


def load_often(optimizer: Any, step: int) -> None:
    """Where a message travels in the buckets before, and where a plan has just been chosen."""
    if step in (9, 10, 25, 43, 44):
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def raced(
    options: str,
    stays: int | None = None,
    after: Callable[[Any, int], None] = nothing,
    drains: Collection[int] = (),
    make: Callable[[], nn.Module] = make_model,
    loss: Loss = loss_of,
    steps: int = STEPS,
    plain: Callable[[nn.Module], torch.optim.Optimizer] = OPTIMIZERS["momentum"],
) -> Raced:
    """Train while plans are tried, or with fixed buckets where no plan is to stay."""
    torch.manual_seed(3)
    model = make()

    def run(optimizer: Any) -> Raced:
        noted = Watched(optimizer, after)
        last = {*drains, steps - 1}
        weights = train(model, noted, hvd.rank(), loss=loss, steps=steps, drains=last)
        return Raced(weights, noted.plans, noted.holds)

    clock = race(1 if stays is None else stays)
    given = [FIXED] if stays is None else []
    strategy = ":".join(["pipe-sgd", ",".join([*filter(None, [options]), *given])]).rstrip(":")
    return clock.run(run, model, plain(model), strategy=strategy)


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


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def grows(optimizer: Any, step: int) -> None:
    """A layer joins while a message travels in the buckets before."""
    if step == 9:
        torch.manual_seed(8)
        more = nn.Linear(3, 3).double()
        for p in more.parameters():
            p.grad = torch.full_like(p, 0.25)
        optimizer.add_param_group({"params": list(more.parameters())})


def raced_with_joins(stays: int | None) -> tuple[Weights, list[hvd.Plan]]:
    """Epochs of which rank 0 has a batch less; weights and plans after each.

    In the first epoch, the plan was timed when rank 1 is alone.
    """
    model = make_model()

    def run(optimizer: Any) -> tuple[Weights, list[hvd.Plan]]:
        weights, plans = [], []
        for epoch, steps in enumerate((8, 10, 10, 10, 10)):
            for step in range(steps + hvd.rank()):
                optimizer.zero_grad()
                loss_of(model, hvd.rank(), 10 * epoch + step).backward()
                optimizer.step()
            hvd.join()
            weights.append(weights_of(model))
            plans.append(optimizer.plan)
        return np.array(weights), plans

    strategy = "pipe-sgd" if stays else f"pipe-sgd:{FIXED}"
    return race(4).run(run, model, OPTIMIZERS["momentum"](model), strategy=strategy)


class Lossy(NamedTuple):
    """Sums over all steps and ranks, after each step."""

    computed: Weights
    applied: Weights
    residuals: Weights
    plans: list[int]


def lossy(steps: int = 30) -> Lossy:
    """What int8 has lost is in the residuals, whatever the buckets."""
    generator = torch.Generator().manual_seed(5)
    model = nn.ParameterList(torch.randn(40, generator=generator) for _ in range(4))
    recorder = Recorder(model)
    computed, applied, residuals, plans = [], [], [], []
    data = torch.randn(2, steps, 4, 40, generator=generator)  # the same on both ranks

    def run(optimizer: Any) -> Lossy:
        for step in range(steps):
            optimizer.zero_grad()
            own = data[hvd.rank(), step]
            sum((p * x).sum() for p, x in zip(model, own, strict=True)).backward()
            optimizer.step()
            plans.append(len(optimizer.plan.buckets))
            saved = optimizer.state_dict()["hvd_pipe"]["tensors"]
            pending = torch.cat([saved["pending"][i] for i in range(4)])
            done = torch.tensor(recorder.applied).view(-1, 160).sum(0) + pending
            # What is encoded in the end is an average: of what all ranks have lost there, a half.
            sent, reduced = (torch.cat([saved[key][i] for i in range(4)]) for key in LABELS)
            left = hvd.allreduce(sent + 2 * reduced, op=hvd.Sum, name="left")
            computed.append(data[:, : step + 1].sum((0, 1)).flatten().numpy())
            applied.append(2 * done.numpy())
            residuals.append(left.numpy())
        return Lossy(np.array(computed), np.array(applied), np.array(residuals), plans)

    codec = hvd.Int8(chunk=16, error_feedback=True)
    return Race({}).run(run, model, recorder, strategy="pipe-sgd", compression=codec)


STRATEGIES = ["merged-gradient", "pipe-sgd:warmup_steps=5", "cocod:period=3,warmup_steps=4"]


LOADED = ["merged-gradient", "pipe-sgd"]
AFTER = (2, 3)
BY_HAND = ["merged-gradient", "pipe-sgd", "pipe-sgd:warmup_steps=5", "cocod:period=3"]
WAYS = ("assigned", "in place", "mixed")
PATTERNS = ("step", "synchronize")
RACES: dict[str, dict[str, Any]] = {
    **{f"{count} stay": {"options": "", "stays": count} for count in RACED},
    "warm-up": {"options": "warmup_steps=2", "stays": 1},
    "prediction": {"options": "prediction=local", "stays": 4},
    "guess": {"options": "prediction=previous", "stays": 1},
    # Plans change in the steps 8, 16 and 24; the set in flight follows a step later.
    "drained": {"options": "", "stays": 4, "drains": (8, 16, 17, 25)},
    "drained in the change": {"options": "", "stays": 6, "drains": (7, 9, 24)},
    "loaded": {"options": "", "stays": 1, "after": load_often, "steps": 60},
    "sparse": {
        "options": "",
        "stays": 4,
        "make": Embedded,
        "loss": embedded_loss,
        "plain": plain_sgd,
    },
    "grows": {"options": "", "stays": 1, "after": grows, "steps": 45},
}


def run() -> dict[Any, Any | Raised]:
    hvd.init()
    cases: dict[Any, Callable[[], Any]] = {"applied": applied, "clipped": clipped}
    for strategy in STRATEGIES:
        for way, clear in CLEAR.items():
            cases[strategy, way] = partial(cleared, strategy, clear)
    for strategy in LOADED:
        for after in AFTER:
            cases["loaded", strategy, after] = partial(loaded, strategy, after)
    for strategy in BY_HAND:
        for way in WAYS:
            for pattern in PATTERNS:
                cases[strategy, way, pattern] = partial(by_hand, strategy, way, pattern)
        cases["copied", strategy] = partial(copied, strategy)
    for strategy in BY_HAND[1:]:
        cases["data", strategy] = partial(by_data, strategy)
    for name, case in RACES.items():
        stays, options = case["stays"], {k: v for k, v in case.items() if k != "stays"}
        cases["race", name] = partial(raced, stays=stays, **options)
        cases["no race", name] = partial(raced, stays=None, **options)
    cases["race", "joins"] = partial(raced_with_joins, 4)
    cases["no race", "joins"] = partial(raced_with_joins, None)
    cases["race", "int8"] = lossy
    return run_cases(cases)


def run_started_again() -> dict[str, Weights | Raised]:
    importlib.import_module("mpi4py.MPI")  # it finalises MPI, so that Horovod does not
    hvd.init()
    return run_cases({strategy: partial(started_again, strategy) for strategy in BY_HAND})
