"""HVD_PIPE_CHECK for Keras and tapes: delays change no bit, and planted faults show."""

from __future__ import annotations

import numpy as np
import pytest
import workers_keras_check_mode
from cases import of_case
from ranks import once, run_ranks
from workers_keras_check_mode import BATTERY, FAULTS, JOINED, SEEDS

battery = once(lambda: run_ranks(2, workers_keras_check_mode.battery, timeout=280))
faults = once(  # the variable is read at import
    lambda: run_ranks(
        2, workers_keras_check_mode.faults, env={"HVD_PIPE_CHECK": "1"}, framework=None
    )
)


@pytest.mark.parametrize(("mode", "strategy"), BATTERY)
def test_delays_change_no_bit(mode: str, strategy: str) -> None:
    for rank, (plain, *others) in enumerate(of_case(battery(), (mode, strategy))):
        assert np.isfinite(plain).all()
        assert not np.array_equal(plain[0], plain[-1])  # it did learn something
        assert len(others) == SEEDS
        for seed, weights in enumerate(others):
            assert np.array_equal(weights, plain), f"rank {rank}, seed {seed}"


@pytest.mark.parametrize("name", FAULTS)
def test_replicas_that_differ(name: str) -> None:
    """One rank's weight was changed by hand, in its last bits: training went on with it."""
    for said in of_case(faults(), name):
        assert "ranks disagree on the weight of " in said, said
        assert ": rank 0 has checksum " in said, said
        assert "; rank 1 has checksum " in said, said
        assert "cocod" in name or "bias" in said, said


@pytest.mark.parametrize("strategy", JOINED)
def test_ranks_compare_in_the_same_steps_after_a_join(strategy: str) -> None:
    """A rank that has joined takes part in no comparison; then all count from there."""
    (first, compared), (second, others) = of_case(faults(), ("joined", strategy))
    assert compared == others == 2
    assert np.isfinite(first).all()
    assert np.array_equal(first, second)
