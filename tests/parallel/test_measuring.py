"""Measuring a running job: the own work of a rank, not its waits; the same all-reduces on all."""

from __future__ import annotations

import numpy as np
import pytest
import workers_measuring
from ranks import once, run_ranks
from workers_measuring import SLEEP, Measured


@once
def beside_a_slow_rank(strategy: str) -> list[Measured]:
    return run_ranks(2, workers_measuring.beside_a_slow_rank, strategy)


@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd"])
def test_waiting_for_a_slow_rank_is_not_a_layers_time(strategy: str) -> None:
    fast, slow = beside_a_slow_rank(strategy)
    for one in (fast, slow):
        assert np.array_equal(one.weights, one.expected)
        assert one.step_s >= 0.9 * SLEEP * 5 / 8  # a fast one waits
        names = [layer.name for layer in one.profile.layers]
        assert names == ["0", "1", "2", "3", "4", "(loss)"]
        assert one.profile.gradient_order() == ("4", "2", "0")
        assert one.profile.batch == 8
    # The sleep lies between the loss and its gradient, on the rank that sleeps.
    assert slow.profile.layers[-1].forward_s >= SLEEP


# nightly: a very busy machine may compute on the fast rank for longer than the slow one sleeps
@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["merged-gradient", "pipe-sgd"])
def test_a_fast_rank_computes_for_less_time_than_a_slow_one(strategy: str) -> None:
    fast, slow = beside_a_slow_rank(strategy)
    assert fast.profile.compute_s < slow.profile.compute_s - SLEEP / 2


def test_all_ranks_find_the_same_times() -> None:
    first, second = run_ranks(2, workers_measuring.allreduces)
    assert {k: v for k, v in first.items() if k != "seconds"} == {
        k: v for k, v in second.items() if k != "seconds"
    }
    (sizes, seconds), delay = first["whole"]
    assert sizes == first["seen"]
    assert set(sizes) <= set(first["sizes"])
    assert sizes[0] == 1024
    assert len(sizes) == len(seconds) >= 2
    assert min(seconds) > 0 <= delay
    # NCCL carries the messages of one rank alone; the other one's thread has to.
    assert first["comm"]["blocking"] is True
    (sizes, seconds), _ = first["hurried"]
    assert len(sizes) == len(seconds) == 3
    assert sizes[-1] == 2**20  # what large messages take is not left to guesses
