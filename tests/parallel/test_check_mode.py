"""HVD_PIPE_CHECK: 20 seeds of delays change no bit, and planted faults show."""

from __future__ import annotations

import numpy as np
import pytest
import workers_check_mode
from cases import of_case
from ranks import once, run_ranks
from workers_check_mode import BATTERY, FAULTS, JOINED, READS, SEEDS

battery = once(lambda: run_ranks(2, workers_check_mode.battery))
faults = once(  # the variable is read at import
    lambda: run_ranks(2, workers_check_mode.faults, env={"HVD_PIPE_CHECK": "1"}, framework=None)
)


@pytest.mark.parametrize("name", BATTERY)
def test_delays_and_spoiled_buffers_change_no_bit(name: str) -> None:
    plain = of_case(battery(), (name, None))
    assert all(np.isfinite(weights).all() for weights in plain)
    assert not np.array_equal(plain[0][0], plain[0][-1])  # it did learn something
    for seed in range(SEEDS):
        for rank, weights in enumerate(of_case(battery(), (name, seed))):
            assert np.array_equal(weights, plain[rank]), f"rank {rank}, seed {seed}"


@pytest.mark.parametrize("name", [name for name in FAULTS if name.startswith("in flight")])
def test_a_gradient_that_is_changed_in_flight(name: str) -> None:
    """Rank 1 clipped ``p.grad.data`` between backward() and step().

    torch counts writes by way of ``.data`` apart, so that the check of versions saw none: what
    travelled was half clipped, or not at all, as the network would have it.
    """
    for said in of_case(faults(), name):
        assert "the gradient of '2.weight' was changed on rank 1" in said, said


@pytest.mark.parametrize("name", [name for name in FAULTS if not name.startswith("in flight")])
def test_replicas_that_differ(name: str) -> None:
    what = "the weight of '0.weight'" if "cocod" in name else "the weight of '2.bias'"
    said = of_case(faults(), name)
    assert said[0] == said[1]
    assert f"ranks disagree on {what}: rank 0 has checksum " in said[0], said[0]
    assert "; rank 1 has checksum " in said[0], said[0]


@pytest.mark.parametrize("name", READS)
def test_a_read_of_a_free_buffer(name: str) -> None:
    for weights in of_case(faults(), name):
        assert np.isnan(weights).any()


@pytest.mark.parametrize("strategy", JOINED)
def test_ranks_compare_in_the_same_steps_after_a_join(strategy: str) -> None:
    """Rank 0 has made three steps more, which must not bring its next comparison forward."""
    assert of_case(faults(), ("joined", strategy)) == [2, 2]


def test_ranks_of_which_only_some_check_are_told() -> None:
    for said in run_ranks(2, workers_check_mode.unlike_variables):
        assert "ranks disagree on HVD_PIPE_CHECK: rank 0 has 0; rank 1 has 1" in said
