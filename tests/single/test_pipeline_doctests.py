"""The examples in the modules of pipelines run."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = (
    "pipeline.checkpoint",
    "pipeline.executor",
    "pipeline.plans",
    "pipeline.stage",
    "pipeline.transport",
    "tensorflow.pipedream.graph",
    "tensorflow.pipedream.tensors",
    "torch.pipedream.graph",
    "torch.pipedream.tensors",
    "torch.pipedream.weights",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(f"hvd_pipe.{name}")
    found = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert found.attempted
    assert not found.failed
