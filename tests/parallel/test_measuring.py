"""Measuring a running job: the own work of a rank, not its waits; the same all-reduces on all."""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from on_ranks import gather, on_ranks
from problem import OPTIMIZERS, loss_of, make_model, train, weights_of

import hvd_pipe.torch as hvd
from hvd_pipe.planning.profile import ModelProfile
from hvd_pipe.torch.layer_times import measure_profile
from hvd_pipe.torch.measuring import probes
from hvd_pipe.torch.measuring.probes import measure_allreduce, measure_comm

SLEEP = 0.6  # far longer than all else in a step
STEPS = 8

pytestmark = on_ranks(2, init=hvd.init)


class Measured(NamedTuple):
    """A profile, and the mean seconds of a step."""

    profile: ModelProfile
    step_s: float


@functools.cache
def beside_a_slow_rank(strategy: str) -> list[Measured]:
    """Rank 1 sleeps in each step: the others wait for it, which is not their own work."""

    def wrapped() -> tuple[Any, Any]:
        model = make_model()
        plain = OPTIMIZERS["momentum"](model)
        return model, hvd.DistributedOptimizer(plain, model.named_parameters(), strategy=strategy)

    model, optimizer = wrapped()
    number = iter(range(STEPS))

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), next(number))
        if hvd.rank() == 1:
            time.sleep(SLEEP)
        loss.backward()
        optimizer.step()

    start = time.perf_counter()
    profile = measure_profile(model, step, batch=8, steps=STEPS - 3)
    seconds = (time.perf_counter() - start) / STEPS
    weights = weights_of(model)
    optimizer.synchronize()
    other, plain = wrapped()
    assert np.array_equal(weights, train(other, plain, hvd.rank(), steps=STEPS)[-1])
    plain.synchronize()
    return gather(Measured(profile, seconds))


@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd"])
def test_waiting_for_a_slow_rank_is_not_a_layers_time(strategy: str) -> None:
    ranks = beside_a_slow_rank(strategy)
    for profile, step_s in ranks:
        assert step_s >= 0.9 * SLEEP * 5 / 8  # a fast one waits
        names = [layer.name for layer in profile.layers]
        assert names == ["0", "1", "2", "3", "4", "(loss)"]
        assert profile.gradient_order() == ("4", "2", "0")
        assert profile.batch == 8
    # The sleep lies between the loss and its gradient, on the rank that sleeps.
    assert ranks[1].profile.layers[-1].forward_s >= SLEEP


def test_all_ranks_find_the_same_times() -> None:
    device, everyone = torch.device("cpu"), hvd.global_process_set
    sizes = [1024 * 4**i for i in range(7)]
    seen: list[int] = []
    whole = measure_allreduce(sizes, device, everyone, progress=lambda size, _: seen.append(size))
    hurried = measure_allreduce(sizes, device, everyone, budget_s=1e-4)
    with mock.patch.object(probes, "uses_nccl", return_value=hvd.rank() == 0):
        comm = measure_comm(100_000, device, everyone, "test").to_json()
    first, second = gather((whole, hurried, comm, seen))
    assert first == second
    (found, seconds), delay = whole
    assert found == seen
    assert set(found) <= set(sizes)
    assert found[0] == 1024
    assert len(found) == len(seconds) >= 2
    assert min(seconds) > 0 <= delay
    # NCCL carries the messages of one rank alone; the other one's thread has to.
    assert comm["blocking"] is True
    (found, seconds), _ = hurried
    assert len(found) == len(seconds) == 3
    assert found[-1] == 2**20  # what large messages take is not left to guesses
