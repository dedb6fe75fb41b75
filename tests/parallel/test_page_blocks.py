"""The Python blocks of README and docs/ run as they stand, on two ranks."""

from __future__ import annotations

import numpy as np
import pytest
import workers_keras_pages
import workers_pages
from cases import of_case
from ranks import once, run_ranks

from tests import pages

SAME = {"docs/keras.md python 0": "README.md python 1"}
"""Blocks that are repeated, so that they need not run twice."""

TEXTS = {
    str(block): block.text
    for page in pages.pages()
    for block in pages.blocks(page)
    # The engine of that page is tried by test_own_strategy, in a copy of the package.
    if block.language == "python" and block.page != "docs/own-strategy.md"
}

jobs = {
    module: once(lambda module=module: run_ranks(2, module.run, _texts(module)))
    for module in (workers_pages, workers_keras_pages)
}
CASES = [(module, name) for module in jobs for name in module.BLOCKS]


def _texts(module: object) -> dict[str, str]:
    return {name: TEXTS[name] for name in module.BLOCKS}  # type: ignore[attr-defined]


@pytest.mark.parametrize(("module", "name"), CASES, ids=[name for _, name in CASES])
def test_a_block_runs(module: object, name: str) -> None:
    first, second = of_case(jobs[module](), name)
    assert len(first) == len(second)
    for mine, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_every_block_runs_or_is_repeated() -> None:
    run = {name for _, name in CASES}
    assert set(TEXTS) == run | set(SAME)
    for name, original in SAME.items():
        assert TEXTS[name] == TEXTS[original]
