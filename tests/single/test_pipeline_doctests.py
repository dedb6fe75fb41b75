"""The examples of pipelines and of planning run."""

from __future__ import annotations

import doctest
import importlib

import pytest

from hvd_pipe.planning.schedule import brief

MODULES = (
    "pipeline.checkpoint",
    "pipeline.executor",
    "pipeline.plans",
    "pipeline.stage",
    "pipeline.transport",
    "planning.advise",
    "planning.choice",
    "planning.cluster",
    "planning.comm",
    "planning.fit",
    "planning.merge",
    "planning.methods",
    "planning.overlap",
    "planning.partition",
    "planning.pipeline_plans",
    "planning.plan",
    "planning.profile",
    "planning.schedule",
    "planning.simulate",
    "planning.simulate_pipeline",
    "planning.stages",
    "planning.timing",
    "planning.tuner",
    "tensorflow.pipedream.graph",
    "tensorflow.pipedream.tensors",
    "torch.pipedream.graph",
    "torch.pipedream.measure",
    "torch.pipedream.tensors",
    "torch.pipedream.weights",
    "units",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(f"hvd_pipe.{name}")
    found = doctest.testmod(module, extraglobs={"brief": brief}, optionflags=doctest.ELLIPSIS)
    assert found.attempted
    assert not found.failed
