"""A rank that differs from the other: both are told, or the job ends; nobody waits for ever."""

from __future__ import annotations

import numpy as np
import pytest
import workers_differing_ranks
from cases import of_case
from ranks import once, run_ranks
from workers_differing_ranks import AT, PACED, PACES, STRATEGIES

paced = once(lambda: run_ranks(2, workers_differing_ranks.run_paced, timeout=120))


def check_both_are_told(*args: object) -> None:
    """Not by Horovod's stall check, which would end the job with another message."""
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, workers_differing_ranks.join_alone, *args)
    first, second = str(caught.value).split("--- rank ")[1:3]
    assert "HvdPipeError: ranks have sent different things" in first
    assert "HvdPipeError: ranks have sent different things" in second


@pytest.mark.parametrize(
    ("how", "codec"),
    # nightly: as the last steps' below, but for the codec
    [("add_param_group", "none"), pytest.param("unfreeze", "int8", marks=pytest.mark.nightly)],
)
@pytest.mark.parametrize(
    "strategy", [*STRATEGIES, "cocod:period=2,warmup_steps=20", "cocod:period=2,fragments=2"]
)
def test_a_parameter_that_joins_on_one_rank(strategy: str, how: str, codec: str) -> None:
    check_both_are_told(strategy, how, codec, AT + 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_that_joins_on_one_rank_at_the_very_end(strategy: str) -> None:
    """Rank 0 has no step left after that one: it meets rank 1 in its last synchronize()."""
    check_both_are_told(strategy, "unfreeze", "none", AT + 1)


@pytest.mark.parametrize(
    "strategy",
    [STRATEGIES[0], *(pytest.param(each, marks=pytest.mark.nightly) for each in STRATEGIES[1:])],
)
def test_an_exception_on_one_rank_ends_the_job(strategy: str) -> None:
    codec = "int8" if strategy == "pipe-sgd" else "none"
    with pytest.raises(AssertionError, match="rank 1 has no memory left") as caught:
        run_ranks(2, workers_differing_ranks.fail_alone, strategy, codec)
    assert "stall" not in str(caught.value).lower()  # Horovod's own check, after a minute


@pytest.mark.parametrize("pace", [pace for pace in PACES if pace != "alike"])
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize("strategy", PACED)
def test_a_slow_rank_changes_no_number(strategy: str, codec: str, pace: str) -> None:
    alike = of_case(paced(), (strategy, codec, "alike"))
    slow = of_case(paced(), (strategy, codec, pace))
    for rank in range(2):
        np.testing.assert_array_equal(slow[rank], alike[rank])
