"""Pipelines that train for two epochs: what a rank holds, and what the reference says of it."""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from on_ranks import gather, on_ranks
from pipeline_problem import MODELS, OPTIMIZERS, Batch, Plan, epoch, plan, squared
from pipeline_reference import Reference
from pipeline_versions import COALESCING
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.planning.schedule import warm_up
from hvd_pipe.planning.stages import Partition, Stage
from hvd_pipe.torch import pipedream
from hvd_pipe.torch.pipedream import graph

EPOCHS = 2
MICROBATCHES = {"2-1": 4, "1-2": 4, "3-1": 6, "1-2-1": 4}  # else 3 or the stages, if more

State = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """One pipeline, by the names of an optimizer and of a model."""

    plan: Plan
    mode: str = "stash"
    optimizer: str = "momentum"
    model: str = "mixed"
    microbatches: int = 1
    in_transit: int = 0

    def data(self, number: int) -> list[Batch]:
        return epoch(number, paired=self.model == "paired")

    def unseen(self) -> list[Batch]:
        """To evaluate on: the last minibatch cannot be cut as the others are."""
        return epoch(EPOCHS, (14, 14, 1), self.model == "paired")


class Result(NamedTuple):
    """What a run leaves: of each epoch the loss and the model, and one evaluation at the end."""

    losses: list[float]
    states: list[State]
    evaluated: float
    stage: int


def make_case(config: str, mode: str, optimizer: str = "momentum") -> Case:
    """A case of the mixed model, with as many microbatches as its schedule needs."""
    stages = config.count("-") + 1
    microbatches = MICROBATCHES.get(config, max(3, stages)) if mode in COALESCING else 1
    return Case(plan(config), mode, optimizer, microbatches=microbatches)


ON = {workers: on_ranks(workers, init=pipedream.init) for workers in (2, 3, 4)}


def on_their_ranks(cases: Mapping[str, Case], daily: Container[str]) -> list[Any]:
    """Cases by name, each on as many ranks as it has workers, and nightly where not among some."""
    return [
        pytest.param(
            name,
            marks=[ON[case.plan.workers], *([] if name in daily else [pytest.mark.nightly])],
        )
        for name, case in cases.items()
    ]


def layers_of(name: str) -> tuple[graph.Layer, ...]:
    """The layers of one of `MODELS`."""
    ((inputs, _), *_) = epoch(0, paired=name == "paired")
    return graph.trace(MODELS[name](), inputs if name == "paired" else (inputs,)).layers


def partition_of(name: str, wanted: Plan) -> Partition:
    """The plan, in the words of the engine: the traced layers of a model, divided."""
    layers = layers_of(name)
    first_call = {
        str(node.target): place
        for place, layer in reversed(list(enumerate(layers)))
        for node in layer.nodes
        if node.op == "call_module"
    }
    starts = [0, *(first_call[cut] for cut in wanted.cuts), len(layers)]
    stages = tuple(
        Stage(tuple(x.name for x in layers[first:last]), replicas, 0.1, 0, 0, 0, 0, 0.1)
        for (first, last), replicas in zip(pairwise(starts), wanted.replicas, strict=True)
    )
    in_flight = tuple(warm_up(s, wanted.replicas) + 1 for s in range(len(stages)))
    return Partition(stages, wanted.workers, 0.1, 0.1, 0.1, "paper", in_flight)


def make_engine(case: Case, **more: Any) -> Any:
    torch.set_num_threads(1)
    model = MODELS[case.model]()
    options = {
        "plan": partition_of(case.model, case.plan).with_in_transit(case.in_transit),
        "sample": case.data(0)[0],
        "progress": False,
        "loss_fn": squared,
        **more,
    }
    if case.mode in COALESCING:
        options["microbatches"] = case.microbatches
    optimizer = OPTIMIZERS[case.optimizer]
    return pipedream.PipeDream(model, optimizer_fn=optimizer, mode=case.mode, **options)


def arrays(state: dict[str, torch.Tensor]) -> State:
    return {name: tensor.detach().numpy().copy() for name, tensor in state.items()}


def train(case: Case, **more: Any) -> Result:
    """On a rank: two epochs, each of which fills the pipeline and drains it."""
    engine = make_engine(case, **more)
    losses, states = [], []
    for number in range(EPOCHS):
        losses.append(engine.train_epoch(case.data(number)).loss)
        states.append(arrays(engine.state_dict()))
    return Result(losses, states, engine.evaluate(case.unseen()).loss, engine.stage)


def reference(case: Case, model: nn.Module | None = None, **more: Any) -> Reference:
    model = model or MODELS[case.model]()
    return Reference(
        model,
        case.plan.stage_of(model),
        case.plan.replicas,
        case.mode,
        squared,
        OPTIMIZERS[case.optimizer],
        microbatches=case.microbatches,
        in_transit=case.in_transit,
        **more,
    )


def expected(case: Case, model: nn.Module | None = None, **more: Any) -> Result:
    """In a test: the same from the serial reference, of another model if one is given."""
    serial = reference(case, model, **more)
    losses, states = [], []
    for number in range(EPOCHS):
        losses.append(serial.train_epoch(case.data(number)))
        states.append(arrays(serial.state_dict()))
    return Result(losses, states, serial.evaluate(case.unseen()), -1)


def assert_equal(found: Result, wanted: Result, tolerance: float = 1e-12) -> None:
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    close(found.losses, wanted.losses)
    for state, equation in zip(found.states, wanted.states, strict=True):
        assert list(state) == list(equation)
        for name, value in equation.items():
            assert state[name].dtype == value.dtype
            close(state[name], value, err_msg=name)
    close(found.evaluated, wanted.evaluated)


def check(found: Result, case: Case, **more: Any) -> None:
    """Compare what each rank holds with the reference, which rank 0 alone computes."""
    everyone = gather(found)
    if hvd.rank() == 0:
        wanted = expected(case, **more)
        for rank in everyone:
            assert_equal(rank, wanted)
