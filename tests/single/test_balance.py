"""Batches in proportion to speeds."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_pipe.cocod import split_batch

SPEEDS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)
WILD = st.lists(st.floats(5e-324, 1.7e308), min_size=1, max_size=12)


@st.composite
def batches(draw: st.DrawFn, of: st.SearchStrategy[list[float]]) -> tuple[int, list[float]]:
    speeds = draw(of)
    return draw(st.integers(len(speeds), 10_000)), speeds


@given(batches(SPEEDS) | batches(WILD))
def test_all_of_the_batch_and_at_least_one_each(case: tuple[int, list[float]]) -> None:
    batch, speeds = case
    split = split_batch(batch, speeds)
    assert len(split) == len(speeds)
    assert sum(split) == batch
    assert min(split) >= 1


@given(batches(SPEEDS))
def test_within_one_of_the_exact_share(case: tuple[int, list[float]]) -> None:
    """Of what those get who are not lifted to one; the lifted ones get less than that exactly."""
    batch, speeds = case
    split = split_batch(batch, speeds)
    exact = [Fraction(batch) * Fraction(s) / sum(map(Fraction, speeds)) for s in speeds]
    if min(exact) >= 1:
        for share, wanted in zip(split, exact, strict=True):
            assert abs(share - wanted) < 1 + 1e-9
    for share, wanted in zip(split, exact, strict=True):
        assert share <= math.floor(wanted) + 1 + 1e-9  # nobody pays in for others and gets more


@given(batches(SPEEDS))
def test_the_faster_worker_never_gets_less(case: tuple[int, list[float]]) -> None:
    batch, speeds = case
    in_order = [share for _, share in sorted(zip(speeds, split_batch(batch, speeds), strict=True))]
    assert in_order == sorted(in_order)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.floats(1e-3, 1e3))
def test_whole_shares_are_exact(shares: list[int], unit: float) -> None:
    assert split_batch(sum(shares), [share * unit for share in shares]) == shares


@pytest.mark.parametrize(
    ("batch", "speeds", "error", "answer"),
    [
        (3, [1.0] * 4, ValueError, "less than one sample for each of 4 workers: raise it to 4"),
        (8, [], ValueError, "speeds is empty"),
        (8, [1.0, 0.0], ValueError, r"speeds\[1\] is 0.0: speeds must be positive"),
        (8, [-1.0, 1.0], ValueError, r"speeds\[0\] is -1.0"),
        (8, [1.0, math.inf], ValueError, r"speeds\[1\] is inf"),
        (8.0, [1.0], TypeError, "batch must be an int, got 8.0"),
    ],
)
def test_errors(batch: int, speeds: list[float], error: type[Exception], answer: str) -> None:
    with pytest.raises(error, match=answer):
        split_batch(batch, speeds)
