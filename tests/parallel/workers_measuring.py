"""Measuring beside a job of several ranks, of which one is slow, for test_measuring.py."""

from __future__ import annotations

import time
from typing import Any, NamedTuple
from unittest import mock

import torch
from problem import OPTIMIZERS, Weights, loss_of, make_model, train

import hvd_pipe.torch as hvd
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.torch.layer_times import measure_profile
from hvd_pipe.torch.measuring import probes
from hvd_pipe.torch.measuring.probes import measure_allreduce, measure_comm

SLEEP = 0.6  # far longer than all else in a step
STEPS = 8


class Measured(NamedTuple):
    """The profile, the mean seconds of a step, and the weights with and without measuring."""

    profile: ModelProfile
    step_s: float
    weights: Weights
    expected: Weights


def beside_a_slow_rank(strategy: str) -> Measured:
    """Rank 1 sleeps in each step: the others wait for it, which is not their own work."""
    hvd.init()
    runs: list[Weights] = []
    for measured in (True, False):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](model), model.named_parameters(), strategy=strategy
        )
        if not measured:
            runs.append(train(model, optimizer, hvd.rank(), steps=STEPS)[-1])
            optimizer.synchronize()
            continue
        number = iter(range(STEPS))

        def step(model: Any = model, optimizer: Any = optimizer, number: Any = number) -> None:
            optimizer.zero_grad()
            loss = loss_of(model, hvd.rank(), next(number))
            if hvd.rank() == 1:
                time.sleep(SLEEP)
            loss.backward()
            optimizer.step()

        start = time.perf_counter()
        profile = measure_profile(model, step, batch=8, steps=STEPS - 3)
        seconds = (time.perf_counter() - start) / STEPS
        runs.append(train(model, _Nothing(), hvd.rank(), steps=1)[-1])
        optimizer.synchronize()
    return Measured(profile, seconds, *runs)


class _Nothing:
    """Lets `train` read the weights."""

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...


def allreduces() -> dict[str, Any]:
    """What every rank must find alike."""
    hvd.init()
    device, everyone = torch.device("cpu"), hvd.global_process_set
    sizes = [1024 * 4**i for i in range(7)]
    seen: list[int] = []
    whole = measure_allreduce(
        sizes, device, everyone, progress=lambda size, seconds: seen.append(size)
    )
    hurried = measure_allreduce(sizes, device, everyone, budget_s=1e-4)
    start = time.perf_counter()
    with mock.patch.object(probes, "uses_nccl", return_value=hvd.rank() == 0):
        comm = measure_comm(100_000, device, everyone, "test")
    return {
        "sizes": sizes,
        "seen": seen,
        "whole": whole,
        "hurried": hurried,
        "comm": comm.to_json(),
        "seconds": time.perf_counter() - start,
    }
