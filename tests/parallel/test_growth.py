"""2,000 steps leave nothing behind: no tensor, and no memory that goes up with the steps."""

from __future__ import annotations

import pytest
import workers_growth
from cases import of_case
from ranks import once, run_ranks
from workers_growth import VARIANTS

# What no Python object shows: handles, messages of Horovod, buffers. 1,800 steps that leave 2.4 KB
# each are found; the allocator's own movements stay below.
MEMORY = 4 * 2**20

# One a step that stays would be 1,800; some are on their way at either moment.
TENSORS = 50

pytestmark = pytest.mark.nightly  # thousands of steps

results = once(lambda: run_ranks(2, workers_growth.run, timeout=240))


@pytest.mark.parametrize("strategy", VARIANTS)
def test_a_long_run_does_not_grow(strategy: str) -> None:
    for tensors, memory in of_case(results(), strategy):
        assert tensors < TENSORS
        assert memory < MEMORY
