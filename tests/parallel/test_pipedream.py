"""Pipelines of PyTorch's PipeDream: equal to the equations of the serial reference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np
import pytest
from hops import hops_between
from on_ranks import on_ranks
from pipeline_problem import (
    SKIPPING_CUTS,
    Plan,
    plan,
)
from pipeline_versions import METHODS
from torch_pipelines import (
    ON,
    Case,
    Result,
    check,
    make_case,
    make_engine,
    on_their_ranks,
    train,
)

import hvd_pipe.torch as hvd
from hvd_pipe.planning.pipeline_plans import fewest_microbatches
from hvd_pipe.torch import pipedream
from hvd_pipe.torch.pipedream import stage

MAX_FUNCTIONS, MAX_FILES = 36, 10  # that a minibatch passes through on a middle stage


def _equations() -> Iterable[tuple[str, Case]]:
    """Every mode with every plan, and every optimizer with some of both."""
    for config in ("1-1", "1-1-1", "1-1-1-1", "2-1", "3-1", "1-2", "1-2-1"):
        for mode in METHODS:
            yield f"{config} {mode} momentum", make_case(config, mode)
        for mode in ("stash", "2bw") if config in {"1-1-1", "2-1", "1-2-1"} else ():
            for optimizer in ("sgd", "adam"):
                yield f"{config} {mode} {optimizer}", make_case(config, mode, optimizer)


def _models() -> Iterable[tuple[str, Case]]:
    """Other models than the mixed one, and other cuts."""
    for config in ("1-1-1", "1-1-1-1", "1-2-1"):
        skipping = {"plan": plan(config, SKIPPING_CUTS), "model": "skipping"}
        for mode in ("stash", "2bw"):
            case = dataclasses.replace(make_case(config, mode, "adam"), **skipping)
            yield f"skipping {config} {mode}", case
    for model in ("some frozen", "first frozen", "last frozen"):
        for config in ("1-1-1-1", "2-1"):
            yield f"{model} {config}", dataclasses.replace(make_case(config, "stash"), model=model)
    for name, cuts, replicas in (
        ("first", ("one", "two"), (1, 1, 1)),
        ("middle", ("tanh", "two"), (1, 1, 1)),
        ("replicated", ("tanh", "two"), (1, 2, 1)),
        ("middle two", ("tanh", "soft", "two"), (1, 1, 1, 1)),
    ):
        yield f"no parameters {name}", Case(Plan(cuts, replicas), "stash", model="sparse")
    for config, mode in (("1-1-1", "stash"), ("2-1", "stash"), ("1-1-1", "2bw")):
        cuts = {2: ("three",), 3: ("two", "three")}
        case = make_case(config, mode)
        yield (
            f"paired {config} {mode}",
            dataclasses.replace(case, plan=plan(config, cuts), model="paired"),
        )


def _in_transit() -> Iterable[tuple[str, Case]]:
    """More minibatches in flight than NOAM's: every mode but "gpipe", which has all in flight."""
    for config, k in (("1-1", 2), ("1-1-1", 1), ("1-1-1-1", 1), ("2-1", 2), ("1-2", 1)):
        for mode in METHODS:
            if mode == "gpipe" or (mode == "flush" and config != "1-1-1"):
                continue
            case = dataclasses.replace(make_case(config, mode), in_transit=k)
            if mode == "2bw":
                replicas = case.plan.replicas
                fewest = fewest_microbatches("2bw", replicas, in_transit=k)
                case = dataclasses.replace(case, microbatches=fewest)
            yield f"{config} {mode} in_transit={k}", case


CASES: dict[str, Case] = dict([*_equations(), *_models(), *_in_transit()])
GLOO = [
    *("1-1-1 stash momentum", "2-1 2bw momentum"),
    pytest.param("2-1 stash momentum", marks=pytest.mark.nightly),
    pytest.param("paired 1-1-1 stash", marks=pytest.mark.nightly),
]
PROCESS_SETS = {
    name: CASES[name]
    for name in ("1-1 stash momentum", "2-1 stash momentum", "1-2-1 2bw momentum")
}
"""Those that also run under MPI with the transport of process sets."""

DAILY = {
    *(f"1-1 {mode} momentum" for mode in METHODS),
    *(f"{config} {mode} momentum" for config in ("1-1-1", "2-1") for mode in ("stash", "2bw")),
    *("1-1-1 vertical-sync momentum", "1-2 stash momentum", "1-2 gpipe momentum"),
    *("1-2-1 stash momentum", "1-2-1 2bw adam", "3-1 vertical-sync momentum"),
    *("2-1 flush momentum", "2-1 stash adam", "1-1-1 2bw sgd", "1-1-1-1 stash momentum"),
    *("1-1 stash in_transit=2", "1-1-1 stash in_transit=1", "2-1 2bw in_transit=2"),
    *("skipping 1-1-1 stash", "some frozen 2-1", "first frozen 2-1", "last frozen 2-1"),
    *("no parameters first", "no parameters middle", "no parameters replicated"),
    "paired 1-1-1 stash",
}
"""Every mode, optimizer, model and kind of plan once; the other cases are nightly."""


@functools.cache
def trained(name: str, transport: str = "auto") -> Result:
    return train(CASES[name], transport=transport)


@pytest.mark.parametrize("name", on_their_ranks(CASES, DAILY))
def test_pipelines_are_their_equations(name: str) -> None:
    """Losses and the whole model after each epoch, on every rank, and an evaluation."""
    found, widths = trained(name), CASES[name].plan.replicas
    assert found.stage == [s for s, width in enumerate(widths) for _ in range(width)][hvd.rank()]
    check(found, CASES[name])


@on_ranks(3, launcher="gloo", init=pipedream.init)
@pytest.mark.parametrize("name", GLOO)
def test_pipelines_without_mpi(name: str) -> None:
    check(trained(name), CASES[name])


@pytest.mark.parametrize("name", on_their_ranks(PROCESS_SETS, DAILY))
def test_both_transports_carry_the_same(name: str) -> None:
    one, other = trained(name, "process-sets"), trained(name)
    assert one.losses == other.losses
    for state, same in zip(one.states, other.states, strict=True):
        for key, value in state.items():
            assert np.array_equal(value, same[key]), key


@ON[3]
def test_a_minibatch_passes_few_functions() -> None:
    """From one update of the middle stage to the next; docs/architecture.md draws them."""
    case = CASES["1-1-1 stash momentum"]
    with hops_between(stage.TorchStage.update.__code__, first=2, last=5) as hops:
        make_engine(case).train_epoch(case.data(0))
    if hvd.rank() == 1:
        functions = "\n".join(f"{hop.file} {hop.function} ({hop.thread})" for hop in hops)
        assert {hop.thread for hop in hops} == {"MainThread", "hvd_pipe mpi"}, functions
        assert len(hops) <= MAX_FUNCTIONS, functions
        assert len({hop.file for hop in hops}) <= MAX_FILES, functions
