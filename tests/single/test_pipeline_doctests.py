"""The examples in the modules of pipelines run."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from hvd_pipe.pipeline import checks, executor, feed, layout, plans, spec, transport, wire
from hvd_pipe.planning import advise_pipeline, modes
from hvd_pipe.torch.pipedream import batches, memory, versions

MODULES = [
    checks,
    executor,
    feed,
    layout,
    plans,
    spec,
    transport,
    wire,
    advise_pipeline,
    modes,
    batches,
]


@pytest.mark.parametrize("module", [*MODULES, memory, versions], ids=str)
def test_examples_run(module: ModuleType) -> None:
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert found.attempted
    assert not found.failed
