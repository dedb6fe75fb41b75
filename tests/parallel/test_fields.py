"""Two ranks with two values of an argument: both are told, of both values, before training.

An argument, or a field of a strategy or a codec, that is new and has no row fails
`test_no_argument_is_forgotten`.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from differing_values import Differing, argument, arguments_in, check, common, fields_of
from on_ranks import gather, on_ranks
from problem import make_model, train
from torch import nn
from torch.optim import SGD, Adam, Optimizer

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError, RanksDisagreeError
from hvd_pipe.planning.plan import Plan
from hvd_pipe.torch import pipedream

two = on_ranks(2, init=hvd.init, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


FILES = tempfile.TemporaryDirectory(prefix="plans-")


def half_frozen() -> nn.Module:
    model = make_model()
    model[0].requires_grad_(False)
    return model


def transposed() -> nn.Module:
    """A weight whose numbers lie in another order; a flat buffer would mix them up."""
    model = make_model()
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    return model


def narrow() -> nn.Module:
    model = make_model()
    model[4] = nn.Linear(4, 2).double()
    return model


def longer() -> nn.Module:
    return make_model().append(nn.Linear(3, 3).double())


def in_file(first: int) -> hvd.MergedGradient:
    """A file of this rank's own: files differ by content, not by path."""
    names = [name for name, _ in make_model().named_parameters()][::-1]
    path = Path(FILES.name) / f"{first}.json"
    Plan((tuple(names[:first]), tuple(names[first:])), "given").save(path)
    return hvd.MergedGradient(str(path))


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.1)


def backwards(model: nn.Module) -> Optimizer:
    return SGD(list(model.parameters())[::-1], lr=0.1)


def renamed(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(f"other.{name}", p) for name, p in model.named_parameters()]


def sent_as(overlap: str, *order: int) -> hvd.MergedGradient:
    names = [name for name, _ in make_model().named_parameters()]
    plan = Plan((tuple(names[:3]), tuple(names[3:])), "given", order=order)
    return hvd.MergedGradient(plan, overlap=overlap)


def differing(one: dict[str, Any], other: dict[str, Any], *shown: str) -> Differing:
    first, second = shown
    return Differing((one, other), (first, second))


OF_OPTIMIZERS: dict[str, Differing] = {
    **common(hvd),
    "class": argument("optimizer", sgd, adam, "SGD", "Adam"),
    "order": differing({}, {"optimizer": backwards}, "'0.weight'", "'4.bias'"),
    "names": differing({}, {"named_parameters": renamed}, "'0.weight'", "'other.0.weight'"),
    "frozen": differing({}, {"make": half_frozen}, "'0.weight'", "'2.weight'"),
    "strides": differing({}, {"make": transposed}, "(5, 6)", "with strides (1, 5)"),
    "groups": argument("groups", [[0, 1]], [[1, 0]], "[[0, 1]", "[[1, 0]"),
    "shape": differing({}, {"make": narrow}, "(3, 4)", "(2, 4)"),
    "dtype": differing({}, {"make": partial(make_model, torch.float32)}, "float64", "float32"),
    "more": differing({}, {"make": longer}, "", "'5.weight'"),
    "fewer": differing({"make": longer}, {}, "'5.weight'", ""),
    "content of a plan file": differing(
        {"strategy": in_file(2)}, {"strategy": in_file(3)}, "('4.bias', '4.weight')", "'2.bias')"
    ),
    "number of groups": argument("num_groups", 1, 2, "[[5, 4, 3, 2", "[[5, 4, 3], [2"),
    "carrier": argument("carrier", "horovod", "torch"),
    "order of a plan": differing(
        {"strategy": sent_as("forward", 0, 1)},
        {"strategy": sent_as("forward", 1, 0)},
        "sent as (0, 1)",
        "sent as (1, 0)",
    ),
    "overlap of a plan": differing(
        {"strategy": sent_as("backward", 0, 1)},
        {"strategy": sent_as("forward", 0, 1)},
        "overlap='backward'",
        "overlap='forward'",
    ),
}
NOT_TOLD = {"process_set"}
"""Ranks that do not mean the same ranks do not meet."""


def build(
    make: Callable[[], nn.Module] = make_model,
    optimizer: Callable[[nn.Module], Optimizer] = sgd,
    named_parameters: Callable[[nn.Module], Any] = nn.Module.named_parameters,
    groups: Sequence[Sequence[int]] | None = None,
    **arguments: Any,
) -> Any:
    model = make()
    own = list(model.parameters())
    return hvd.DistributedOptimizer(
        optimizer(model),
        named_parameters(model),
        groups=None if groups is None else [[own[i] for i in group] for group in groups],
        **arguments,
    )


@two
@pytest.mark.parametrize("case", OF_OPTIMIZERS)
def test_both_ranks_are_told_both_values(case: str) -> None:
    row = OF_OPTIMIZERS[case]
    with pytest.raises(RanksDisagreeError) as told:
        build(**row.values[hvd.rank()])
    check(str(told.value), row)


@two
def test_an_environment_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that `mpirun` was not told to export, the way this comes about in practice."""
    monkeypatch.setenv("HVD_PIPE_STRATEGY", ("pipe-sgd", "cocod:period=6")[hvd.rank()])
    with pytest.raises(RanksDisagreeError) as told:
        build()
    check(str(told.value), differing({}, {}, "PipeSGD", "CoCoD(period=6"))


def unreadable(_: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    raise KeyError("layer 7")
    yield


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "strategy": ({"strategy": "pipe-sdg"}, ValueError, "pipe-sdg"),
    "names": (
        {"named_parameters": lambda model: list(model.named_parameters())[1:]},
        ValueError,
        "named_parameters",
    ),
    "plan of another model": ({"make": longer, "strategy": in_file(2)}, ValueError, "5.weight"),
    "no plan file": ({"strategy": hvd.MergedGradient("missing.json")}, OSError, "missing.json"),
    "any error": ({"named_parameters": unreadable}, KeyError, "layer 7"),
}


@two
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_one_rank_is_told_to_all(name: str) -> None:
    """And a job that has caught such an error can still train."""
    arguments, kind, says = MISTAKES[name]
    odd = hvd.rank() == 1
    with pytest.raises(kind if odd else HvdPipeError) as caught:
        build(**(arguments if odd else {}))
    assert says in str(caught.value)
    assert odd or "rank 1" in str(caught.value)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    first, second = gather(train(model, optimizer, hvd.rank(), steps=3))
    assert (first == second).all()


def stages(width: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))


OF_PIPELINES: dict[str, Differing] = {
    "model": argument("model", stages(3), stages(4), "float32 (3, 2)", "float32 (4, 2)"),
    "plan": argument("plan", "straight", "auto", "1-1", "auto"),
    "mode": argument("mode", "stash", "flush"),
    "microbatches": differing(
        {"mode": "flush", "microbatches": 2}, {"mode": "flush", "microbatches": 4}, "2", "4"
    ),
    "in_transit": argument("in_transit", 0, 1),
    "sample": argument("sample", None, (torch.ones(2, 2), torch.ones(2, 1)), "False", "True"),
    "scheduler_fn": argument("scheduler_fn", None, sgd, "False, by epoch", "True, by epoch"),
    "schedule_by": argument(
        "schedule_by", "epoch", "minibatch", "False, by epoch", "False, by minibatch"
    ),
    **{
        name: differing({name: one}, {name: other}, f"{name}={one}", f"{name}={other}")
        for name, one, other in (
            ("transport", "auto", "process-sets"),
            ("recompute", True, False),
            ("wire_dtype", None, "bfloat16"),
            ("scale_lr", True, False),
            ("max_grad_norm", 1.0, 2.0),
            ("bandwidth", 1e9, 2e9),
        )
    },
    "metric_fn": differing({}, {"metric_fn": max}, "metric_fn=False", "metric_fn=True"),
}
DECIDED_BY_RANK_0 = {"loss_fn", "optimizer_fn", "profile", "memory_bytes", "progress"}


@two
@pytest.mark.parametrize("case", OF_PIPELINES)
def test_both_ranks_of_a_pipeline_are_told_both_values(case: str) -> None:
    row = OF_PIPELINES[case]
    arguments = {"model": stages(), **row.values[hvd.rank()]}
    model = arguments.pop("model")
    with pytest.raises(RanksDisagreeError) as told:
        pipedream.PipeDream(model, nn.functional.mse_loss, sgd, **arguments)
    check(str(told.value), row)


def test_no_argument_is_forgotten() -> None:
    made_of = {"make": "named_parameters"}  # the parameters themselves differ
    told = {made_of.get(name, name) for name in arguments_in(OF_OPTIMIZERS.values())}
    assert told | NOT_TOLD == set(inspect.signature(hvd.DistributedOptimizer).parameters)
    strategies = hvd.MergedGradient, hvd.PipeSGD, hvd.CoCoD, hvd.Auto
    assert fields_of(*strategies, hvd.Int8, hvd.BF16) <= OF_OPTIMIZERS.keys()
    told = arguments_in(OF_PIPELINES.values())
    assert told | DECIDED_BY_RANK_0 == set(inspect.signature(pipedream.PipeDream).parameters)
