"""CoCoD: replicas differ between rounds and are equal, buffers too, after synchronize()."""

from __future__ import annotations

import numpy as np
import pytest
import workers_cocod
from cases import of_case
from ranks import once, run_ranks
from workers_cocod import CASES, EXTRA_BATCHES, Moment, State

results = once(lambda: run_ranks(3, workers_cocod.run))  # a mean of three is not exact

pytestmark = pytest.mark.parametrize("case", CASES)


def at(case: str, moment: int) -> list[Moment]:
    return [rank[moment] for rank in of_case(results(), case)]


def assert_means(before: list[State], after: list[State]) -> None:
    for name in before[0]:
        mean = np.mean([state[name] for state in before], axis=0)
        for state in after:
            np.testing.assert_allclose(state[name], mean, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("moment", [0, 2])
def test_replicas_differ_between(case: str, moment: int) -> None:
    """In what they learn, what they have seen, and the momenta that they build from it."""
    first, *others = at(case, moment)
    for other in others:
        for name in ("encoder.0.weight", "encoder.1.weight", "decoder.0.weight", "decoder.1.bias"):
            assert not np.array_equal(first.parameters[name], other.parameters[name]), name
            assert not np.array_equal(first.momenta[name], other.momenta[name]), name
        for name in ("encoder.1.running_mean", "decoder.1.running_var"):
            assert not np.array_equal(first.buffers[name], other.buffers[name]), name


@pytest.mark.parametrize("moment", [1, 3])
def test_replicas_are_equal_after_synchronize(case: str, moment: int) -> None:
    first, *others = at(case, moment)
    for other in others:
        for name, value in (first.parameters | first.buffers).items():
            assert np.array_equal(value, (other.parameters | other.buffers)[name]), name


@pytest.mark.parametrize("moment", [0, 2])
def test_they_are_equal_to_the_mean(case: str, moment: int) -> None:
    before, after = at(case, moment), at(case, moment + 1)
    assert_means([m.parameters for m in before], [m.parameters for m in after])
    floating = [
        [{k: v for k, v in m.buffers.items() if v.dtype.kind == "f"} for m in moments]
        for moments in (before, after)
    ]
    assert sorted(floating[0][0]) == [
        "decoder.1.running_mean",
        "decoder.1.running_var",
        "encoder.1.running_mean",
        "encoder.1.running_var",
    ]
    assert_means(*floating)


def test_integer_buffers_come_from_rank_0(case: str) -> None:
    name = "encoder.1.num_batches_tracked"
    seen = [[int(rank.buffers[name]) for rank in at(case, moment)] for moment in range(4)]
    assert seen == [[10, 10 + EXTRA_BATCHES, 10], [10] * 3, [13] * 3, [13] * 3]


@pytest.mark.parametrize("moment", [0, 2])
def test_momenta_stay_local(case: str, moment: int) -> None:
    for before, after in zip(at(case, moment), at(case, moment + 1), strict=True):
        for name, value in before.momenta.items():
            assert np.array_equal(value, after.momenta[name]), name
