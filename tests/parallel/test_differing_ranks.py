"""A rank that differs from the other: both are told, or the job ends; nobody waits for ever."""

from __future__ import annotations

import numpy as np
import pytest
import workers_differing_ranks
from cases import of_case
from ranks import once, run_ranks
from workers_differing_ranks import AT, PACED, PACES, STRATEGIES, UNLIKE
from workers_disagreement import Told

built = once(lambda: run_ranks(2, workers_differing_ranks.build))
paced = once(lambda: run_ranks(2, workers_differing_ranks.run_paced, timeout=120))

SIDES = {
    "chunk": ("Int8(chunk=256, error_feedback=False)", "Int8(chunk=128, error_feedback=False)"),
    "error feedback": ("error_feedback=False", "error_feedback=True"),
    "codec": ("BF16(", "Int8("),
    "class": ("SGD", "Adam"),
    "order": ("'0.weight'", "'4.bias'"),
    "frozen": ("'0.weight'", "'2.weight'"),
    "strides": ("(5, 6)", "with strides (1, 5)"),
    "groups": ("[0, 1]", "[1, 0]"),
    "predivide": ("2.0", "1.0"),
    "sparse": ("True", "False"),
    "weights": ("weights=(3, 1)", "weights=(1, 3)"),
    "prediction": ("prediction='local'", "prediction='previous'"),
    "pull back": ("pull_back=0.5", "pull_back=0.6"),
    "momentum": ("momentum='local'", "momentum='average'"),
    "fragments": ("fragments=2", "fragments=4"),
    "bucket bytes": ("bucket_bytes=64", "bucket_bytes=128"),
}
assert SIDES.keys() == UNLIKE.keys()


@pytest.mark.parametrize("case", SIDES)
def test_both_ranks_are_told_both_sides(case: str) -> None:
    for told in of_case(built(), case):
        assert isinstance(told, Told), "nothing was raised"
        assert "RanksDisagreeError" in told.kinds
        _, _, message = told.message.partition("rank 0 ")
        ours, _, theirs = message.partition("rank 1 ")
        assert SIDES[case][0] in ours, told.message
        assert SIDES[case][1] in theirs, told.message


def check_both_are_told(*args: object) -> None:
    """Not by Horovod's stall check, which would end the job with another message."""
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, workers_differing_ranks.join_alone, *args)
    first, second = str(caught.value).split("--- rank ")[1:3]
    assert "HvdPipeError: ranks have sent different things" in first
    assert "HvdPipeError: ranks have sent different things" in second


@pytest.mark.parametrize(("how", "codec"), [("add_param_group", "none"), ("unfreeze", "int8")])
@pytest.mark.parametrize(
    "strategy", [*STRATEGIES, "cocod:period=2,warmup_steps=20", "cocod:period=2,fragments=2"]
)
def test_a_parameter_that_joins_on_one_rank(strategy: str, how: str, codec: str) -> None:
    check_both_are_told(strategy, how, codec, AT + 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_that_joins_on_one_rank_at_the_very_end(strategy: str) -> None:
    """Rank 0 has no step left after that one: it meets rank 1 in its last synchronize()."""
    check_both_are_told(strategy, "unfreeze", "none", AT + 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
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
