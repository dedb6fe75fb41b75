"""MergedGradient does what stock Horovod does, bit for bit at two ranks.

At two ranks a sum has one rounding whatever the order of its terms, so equality is exact even
while the plan changes from the default one to the measured one; that happens in every run here
that is not given a plan. Compression.fp16 rounds each gradient before the sum, so it, too, is
exact.
"""

from __future__ import annotations

import numpy as np
import pytest
import workers_merged_gradient
from cases import of_case
from ranks import once, run_ranks
from workers_merged_gradient import CASES, HOPS, Both

MAX_FUNCTIONS, MAX_FILES = 20, 6  # that hand a gradient on
MAX_CALLED = 61  # called meanwhile, with these, and 8 of a recorder that notes nothing

against_stock = once(lambda: run_ranks(2, workers_merged_gradient.against_stock))


def assert_same(both: Both) -> None:
    different = np.flatnonzero((both.stock != both.ours).any(axis=1))
    assert both.stock.shape == both.ours.shape
    assert not len(different), (
        f"{len(different)} of {len(both.stock)} steps differ, the first is step {different[0]}, "
        f"at most by {np.abs(both.stock - both.ours).max():.3g}"
    )
    assert not np.array_equal(both.stock[0], both.stock[-1])  # it did learn something


@pytest.mark.parametrize("case", CASES)
def test_equal_to_stock_horovod(case: str) -> None:
    for both in of_case(against_stock(), case):
        assert_same(both)


def test_a_gradient_passes_few_functions() -> None:
    """A ratchet: docs/architecture.md draws them."""
    for way, called in of_case(against_stock(), HOPS):
        listed = "\n".join(
            f"{'->' if hop in way else '  '} {hop.file} {hop.function}" for hop in called
        )
        assert way[0].function == "_hook.<locals>.on_gradient", listed
        assert way[-1].function == "DistributedMixin._apply", listed
        assert len(way) <= MAX_FUNCTIONS, listed
        assert len({hop.file for hop in way}) <= MAX_FILES, listed
        assert len(called) <= MAX_CALLED, listed


def test_equal_to_stock_horovod_in_a_process_set() -> None:
    dynamic = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    ranks = run_ranks(3, workers_merged_gradient.in_a_process_set, env=dynamic)
    for both in ranks:
        assert_same(both)
    assert np.array_equal(ranks[0].ours, ranks[2].ours)
    assert not np.array_equal(ranks[0].ours, ranks[1].ours)
