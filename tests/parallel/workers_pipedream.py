"""Pipelines that train for two epochs: what each rank holds, and what the reference says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from cases import Raised, run_cases
from hops import Hop, hops_between
from pipeline_problem import (
    OPTIMIZERS,
    SKIPPING_CUTS,
    Batch,
    Plan,
    epoch,
    make_model,
    make_random,
    plan,
    squared,
)
from pipeline_reference import COALESCING, METHODS, Reference
from torch import nn

from hvd_pipe.planning.pipeline_cost import fewest_microbatches
from hvd_pipe.planning.schedule import warm_up
from hvd_pipe.planning.stages import Partition, Stage
from hvd_pipe.torch import pipedream
from hvd_pipe.torch.pipedream import graph, stage

EPOCHS = 2
MICROBATCHES = {"2-1": 4, "1-2": 4, "3-1": 6, "1-2-1": 4}  # else 3 or the stages, if more

State = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """One pipeline.

    Args:
        plan: Its stages.
        mode: As `PipeDream` has it.
        optimizer: One of `OPTIMIZERS`.
        model: As `make_model` has it.
        microbatches: Of a minibatch.
        in_transit: Minibatches between two stages.
    """

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


def _case(config: str, mode: str, optimizer: str = "momentum") -> Case:
    stages = config.count("-") + 1
    microbatches = MICROBATCHES.get(config, max(3, stages)) if mode in COALESCING else 1
    return Case(plan(config), mode, optimizer, microbatches=microbatches)


def _equations() -> Iterable[tuple[str, Case]]:
    """Every mode with every plan, and every optimizer with some of both."""
    for config in ("1-1", "1-1-1", "1-1-1-1", "2-1", "3-1", "1-2", "1-2-1"):
        for mode in METHODS:
            yield f"{config} {mode} momentum", _case(config, mode)
        for mode in ("stash", "2bw") if config in {"1-1-1", "2-1", "1-2-1"} else ():
            for optimizer in ("sgd", "adam"):
                yield f"{config} {mode} {optimizer}", _case(config, mode, optimizer)


def _models() -> Iterable[tuple[str, Case]]:
    """Other models than the mixed one, and other cuts."""
    for config in ("1-1-1", "1-1-1-1", "1-2-1"):
        skipping = {"plan": plan(config, SKIPPING_CUTS), "model": "skipping"}
        for mode in ("stash", "2bw"):
            case = dataclasses.replace(_case(config, mode, "adam"), **skipping)
            yield f"skipping {config} {mode}", case
    for model in ("some frozen", "first frozen", "last frozen"):
        for config in ("1-1-1-1", "2-1"):
            yield f"{model} {config}", dataclasses.replace(_case(config, "stash"), model=model)
    for name, cuts, replicas in (
        ("first", ("one", "two"), (1, 1, 1)),
        ("middle", ("tanh", "two"), (1, 1, 1)),
        ("replicated", ("tanh", "two"), (1, 2, 1)),
        ("middle two", ("tanh", "soft", "two"), (1, 1, 1, 1)),
    ):
        yield f"no parameters {name}", Case(Plan(cuts, replicas), "stash", model="sparse")
    for config, mode in (("1-1-1", "stash"), ("2-1", "stash"), ("1-1-1", "2bw")):
        cuts = {2: ("three",), 3: ("two", "three")}
        case = _case(config, mode)
        yield (
            f"paired {config} {mode}",
            dataclasses.replace(case, plan=plan(config, cuts), model="paired"),
        )
    for seed in range(8):
        stages = 3 + seed % 2
        mode = list(METHODS)[seed % len(METHODS)]
        cuts = make_random(seed).random_cuts(stages, seed)
        microbatches = 5 if mode in COALESCING else 1
        yield (
            f"random {seed}",
            Case(Plan(cuts, (1,) * stages), mode, "adam", f"random {seed}", microbatches),
        )


def _in_transit() -> Iterable[tuple[str, Case]]:
    """More minibatches in flight than NOAM's: every mode but "gpipe", which has all in flight."""
    for config, k in (("1-1", 2), ("1-1-1", 1), ("1-1-1-1", 1), ("2-1", 2), ("1-2", 1)):
        for mode in METHODS:
            if mode == "gpipe" or (mode == "flush" and config != "1-1-1"):
                continue
            case = dataclasses.replace(_case(config, mode), in_transit=k)
            if mode == "2bw":
                replicas = case.plan.replicas
                fewest = fewest_microbatches("2bw", replicas, in_transit=k)
                case = dataclasses.replace(case, microbatches=fewest)
            yield f"{config} {mode} in_transit={k}", case


CASES: dict[str, Case] = dict([*_equations(), *_models(), *_in_transit()])
GLOO = {name: CASES[name] for name in ("1-1-1 stash momentum", "2-1 stash momentum")} | {
    "2-1 2bw momentum": CASES["2-1 2bw momentum"],
    "paired 1-1-1 stash": CASES["paired 1-1-1 stash"],
}
HOPS = "hops of a minibatch"
PROCESS_SETS = ("1-1 stash momentum", "2-1 stash momentum", "1-2-1 2bw momentum")
"""Those that also run under MPI with the transport of process sets."""


def partition_of(model: nn.Module, wanted: Plan) -> Partition:
    """The plan, in the words of the engine: the traced layers, divided."""
    layers = graph.trace(model).layers
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
    model = make_model(case.model)
    options = {
        "plan": partition_of(model, case.plan).with_in_transit(case.in_transit),
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
    model = model or make_model(case.model)
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


def cases_of(workers: int) -> dict[str, Case]:
    return {name: case for name, case in CASES.items() if case.plan.workers == workers}


def run(workers: int, transport: str = "auto") -> dict[str, Any]:
    """Under MPI: all cases of so many workers, or those of process sets alone."""
    pipedream.init()
    chosen = cases_of(workers)
    if transport == "process-sets":
        chosen = {name: chosen[name] for name in PROCESS_SETS if name in chosen}
    cases = {name: _trains(case, transport) for name, case in chosen.items()}
    if workers == 3 and transport == "auto":
        cases[HOPS] = _hops
    return run_cases(cases)


def _hops() -> list[Hop]:
    """What a minibatch passes through in the steady state, from one update to the next."""
    border = stage.TorchStage.update.__code__
    with hops_between(border, first=2, last=5) as hops:
        engine = make_engine(CASES["1-1-1 stash momentum"])
        engine.train_epoch(CASES["1-1-1 stash momentum"].data(0))
    return hops


def run_gloo() -> dict[str, Result | Raised]:
    pipedream.init()
    return run_cases({name: _trains(case, "auto") for name, case in GLOO.items()})


def _trains(case: Case, transport: str) -> Any:
    return lambda: train(case, transport=transport)
