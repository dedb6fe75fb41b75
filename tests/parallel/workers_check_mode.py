"""Training under the checks of `runtime.check_mode`: test_check_mode.py looks at the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from cases import Raised, run_cases
from problem import OPTIMIZERS, Loss, Weights, loss_of, make_model, train, weights_of
from torch import nn
from workers_merged_gradient import Heads, heads_loss

import hvd_pipe.torch as hvd
from hvd_pipe.runtime import check_mode
from hvd_pipe.torch.messages import buckets
from hvd_pipe.torch.strategies import base, model_average

SEEDS = 20
STEPS = 11
PLANNED = 16  # merged-gradient has made its plan by then
FAULTY = 3  # the step in which faults are planted

INT8 = hvd.Int8(chunk=16, error_feedback=True)
BATTERY: dict[str, tuple[str, int, dict[str, Any]]] = {
    "merged-gradient": ("merged-gradient", PLANNED, {}),
    "merged-gradient, small buckets": ("merged-gradient:bucket_bytes=64", STEPS, {}),
    "merged-gradient, forward": ("merged-gradient:bucket_bytes=64,overlap=forward", STEPS, {}),
    "pipe-sgd": ("pipe-sgd:bucket_bytes=64", STEPS, {}),
    "pipe-sgd, prediction": ("pipe-sgd:prediction=local,warmup_steps=2", STEPS, {}),
    "pipe-sgd, int8": ("pipe-sgd:bucket_bytes=64", STEPS, {"compression": INT8}),
    "cocod": ("cocod:period=2", STEPS, {}),
    "cocod, momenta": ("cocod:period=3,momentum=average,pull_back=0.6", STEPS, {}),
}


def trajectory(
    strategy: str,
    steps: int,
    arguments: dict[str, Any],
    make: Callable[[], nn.Module] = make_model,
    loss: Loss = loss_of,
) -> Weights:
    """The weights after every step, and after ``synchronize()`` in the middle and at the end."""
    torch.manual_seed(1)
    model = make()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy, **arguments
    )
    drains = {steps // 2, steps - 1}
    return train(model, optimizer, hvd.rank(), loss=loss, steps=steps, drains=drains)


@contextmanager
def checks(seed: int | None) -> Iterator[None]:
    """As if the job had been started with these delays, or with none and no checks."""
    before = check_mode.active
    check_mode.active = check_mode.OFF if seed is None else check_mode.Check(seed, hvd.rank())
    try:
        yield
    finally:
        check_mode.active = before


def battery() -> dict[tuple[str, int | None], Weights | Raised]:
    """Every strategy without checks (None), and with those of each seed."""
    hvd.init()
    found: dict[tuple[str, int | None], Weights | Raised] = {}
    for seed in (None, *range(SEEDS)):
        with checks(seed):
            cases = {(name, seed): partial(trajectory, *cell) for name, cell in BATTERY.items()}
            found |= run_cases(cases)
    return found


# Faults.


def changed_in_flight(strategy: str) -> str:
    """Rank 1 clips a gradient by way of ``.data`` while it is being sent."""

    def clip(model: nn.Module, number: int) -> None:
        gradient = model.get_parameter("2.weight").grad
        if (hvd.rank(), number) == (1, FAULTY):
            assert gradient is not None
            gradient.data.clamp_(-1e-3, 1e-3)

    return _said(strategy, after_backward=clip)


def changed_by_hand(strategy: str) -> str:
    """Rank 1 changes one weight in its last bits, right after an update."""

    def nudge(model: nn.Module, number: int) -> None:
        if (hvd.rank(), number) == (1, FAULTY):
            model.get_parameter("2.bias").data[1] += 1e-14

    return _said(strategy, after_update=nudge)


def unequal_average() -> str:
    """CoCoD's last average is not the same on rank 1."""
    plain = model_average.ModelAverage.average_now

    def average_now(self: model_average.ModelAverage) -> None:
        plain(self)
        if hvd.rank() == 1:
            next(value for value in self._values() if value is not None).data.mul_(1 + 1e-14)

    model_average.ModelAverage.average_now = average_now  # type: ignore[method-assign]
    try:
        return _said("cocod:period=2")
    finally:
        model_average.ModelAverage.average_now = plain  # type: ignore[method-assign]


def _said(
    strategy: str,
    after_backward: Callable[[nn.Module, int], None] = lambda model, number: None,
    after_update: Callable[[nn.Module, int], None] = lambda model, number: None,
) -> str:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    number = 0
    optimizer.register_step_post_hook(lambda *_: after_update(model, number))
    try:
        for number in range(2 * check_mode.COMPARE_STEPS):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), number).backward()
            after_backward(model, number)
            optimizer.step()
        optimizer.synchronize()
    except hvd.HvdPipeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def gradients_not_zeroed() -> Weights:
    """The sum of all weights, where the room of a gradient that is missing is sent as it is."""
    plain = buckets.copy_in

    def into(parameter: torch.Tensor, view: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = view
        else:
            plain(parameter, view)

    buckets.copy_in = into
    try:
        return trajectory("merged-gradient:bucket_bytes=64", STEPS, {}, Heads, heads_loss)
    finally:
        buckets.copy_in = plain


def snapshot_not_renewed() -> Weights:
    """CoCoD's progress, taken from the start of an earlier round."""
    plain = model_average._copy
    model_average._copy = lambda source, target: source.clone() if target is None else target
    try:
        return trajectory("cocod:period=2", STEPS, {})
    finally:
        model_average._copy = plain


def weights_read_after_a_step() -> Weights:
    """Weights as they are right after a ``step()`` whose update waits for the forward pass."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model),
        model.named_parameters(),
        strategy="merged-gradient:plan=wfbp,overlap=forward",
    )
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), number).backward()
        optimizer.step()
    found = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()
    assert np.isfinite(weights_of(model)).all()
    return found


class Early(nn.Module):
    """From some step on, reads a layer's weight before that layer runs, as it did not before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.reads = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.reads:
            inputs = inputs + self.second.weight.sum(0)
        result: torch.Tensor = self.second(torch.tanh(self.first(inputs)))
        return result


def use_that_was_not_watched() -> Weights:
    """The losses of a model that reads a weight where it was not read in the watched steps."""
    model = Early()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model),
        model.named_parameters(),
        strategy="merged-gradient:plan=wfbp,overlap=forward",
    )
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        model.reads = number == STEPS - 1
        loss = loss_of(model, hvd.rank(), number)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    optimizer.synchronize()
    assert np.isfinite(losses[:-1]).all()
    return np.array(losses)


def joined(strategy: str) -> int:
    """How often replicas are compared where rank 0 makes some steps more before ``hvd.join()``."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
    )
    plain, compared = base.compare_replicas, 0

    def compare_replicas(*arguments: Any) -> None:
        nonlocal compared
        compared += 1
        plain(*arguments)

    def steps(count: int) -> None:
        for number in range(count):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), number).backward()
            optimizer.step()

    base.compare_replicas = compare_replicas
    try:
        steps(6 if hvd.rank() else 9)
        last = hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        steps(2 * check_mode.COMPARE_STEPS + 4)
        optimizer.synchronize()
    finally:
        base.compare_replicas = plain
    return compared


JOINED = (
    "merged-gradient:bucket_bytes=64",
    "merged-gradient:bucket_bytes=64,overlap=forward",
    "pipe-sgd:bucket_bytes=64",
)
FAULTS: dict[str, Callable[[], str]] = {
    "in flight, merged-gradient": partial(changed_in_flight, "merged-gradient"),
    "in flight, small buckets": partial(changed_in_flight, "merged-gradient:bucket_bytes=64"),
    "in flight, pipe-sgd": partial(changed_in_flight, "pipe-sgd"),
    "by hand, merged-gradient": partial(changed_by_hand, "merged-gradient"),
    "by hand, pipe-sgd": partial(changed_by_hand, "pipe-sgd"),
    "by hand, prediction": partial(changed_by_hand, "pipe-sgd:prediction=local"),
    "average, cocod": unequal_average,
}
READS: dict[str, Callable[[], Weights]] = {
    "a gradient that is missing": gradients_not_zeroed,
    "CoCoD's snapshot": snapshot_not_renewed,
    "weights that are not here yet": weights_read_after_a_step,
    "a use that was not watched": use_that_was_not_watched,
}


def faults() -> dict[Any, Any]:
    """Started with HVD_PIPE_CHECK=1: what each fault leads to."""
    hvd.init()
    assert check_mode.active.on
    # First: an optimizer that a fault has left with a pending update would have to join, too.
    joins = {("joined", strategy): partial(joined, strategy) for strategy in JOINED}
    return run_cases({**joins, **FAULTS, **READS})


def unlike_variables() -> str:
    """HVD_PIPE_CHECK is set on rank 1 alone."""
    hvd.init()
    if hvd.rank() == 1:
        check_mode.active = check_mode.Check(0, 1)
    model = make_model()
    try:
        hvd.DistributedOptimizer(OPTIMIZERS["momentum"](model), model.named_parameters())
    except hvd.HvdPipeError as error:
        return str(error)
    return "nothing was raised"
