"""Ranks that differ are told so when the optimizer is built: all of them, with both sides.

test_fields.py has every argument. Here are what models and environments differ in, and mistakes of
one rank alone. A rank that waited for ever would be ended by the harness.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import Cell
from on_ranks import on_ranks
from problem import OPTIMIZERS, STEPS, make_model, train
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.errors import HvdPipeError

RANKS = 2
ODD = 1  # the rank that differs

pytestmark = on_ranks(RANKS, init=hvd.init)


def layers(**shapes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*shape) for name, shape in shapes.items()})


def build(path: Path, *, plan: str = "", named: bool = True, **differing: Any) -> None:
    """Build an optimizer.

    Args:
        path: A folder of this rank's own, for plan files: they differ by content, not by path.
        plan: Which plan file, if any.
        named: Whether all parameters have names.
        differing: Arguments of the optimizer; ``model``, in place of the usual one.
    """
    model = differing.pop("model", None) or layers(a=(5, 4), b=(3, 3))
    names = list(model.named_parameters())[0 if named else 1 :]
    if plan:
        a = ("a.bias", "a.weight")
        hvd.Plan((("b.bias", "b.weight"), a), "given").save(path / "a.json")
        hvd.Plan((("b.bias",), ("b.weight", *a)), "given").save(path / "b.json")
        differing["strategy"] = hvd.MergedGradient(str(path / plan))
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), names, **differing)


# What the others and rank ODD build, and what of it the message of every rank must show.
@pytest.mark.parametrize(
    ("usual", "odd", "shown"),
    [
        pytest.param(
            {}, {"model": layers(a=(5, 4), c=(3, 3))}, ("b.weight", "c.weight"), id="name"
        ),
        pytest.param({}, {"model": layers(a=(5, 4), b=(3, 2))}, ("(3, 3)", "(2, 3)"), id="shape"),
        pytest.param(
            {}, {"model": layers(a=(5, 4), b=(3, 3)).double()}, ("float32", "float64"), id="dtype"
        ),
        pytest.param(
            {}, {"model": layers(a=(5, 4), b=(3, 3), c=(2, 2))}, ("", "c.weight"), id="more"
        ),
        pytest.param({}, {"model": layers(a=(5, 4))}, ("b.weight", ""), id="fewer"),
        pytest.param(
            {"plan": "a.json"},
            {"plan": "b.json"},
            ("'b.bias', 'b.weight'", "'b.bias',)"),
            id="plan file",
        ),
    ],
)
def test_every_rank_is_told_both_sides(
    usual: dict[str, Any], odd: dict[str, Any], shown: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(HvdPipeError) as caught:
        build(tmp_path, **(odd if hvd.rank() == ODD else usual))
    check_sides(str(caught.value), shown)


def check_sides(message: str, shown: tuple[str, str]) -> None:
    """It is "... rank 0 has the usual; rank 2 has the odd ..."."""
    _, _, sides = message.partition("rank 0 ")
    ours, _, theirs = sides.partition(f"rank {ODD} ")
    assert shown[0] in ours, message
    assert shown[1] in theirs, message


def test_an_environment_that_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that `mpirun` was not told to export, the way this comes about in practice."""
    strategy = "cocod:period=6" if hvd.rank() == ODD else "pipe-sgd"
    monkeypatch.setenv("HVD_PIPE_STRATEGY", strategy)
    with pytest.raises(HvdPipeError) as caught:
        build(tmp_path)
    check_sides(str(caught.value), ("PipeSGD", "CoCoD(period=6"))


# What is wrong on rank ODD alone, the class that it raises there, and what it says.
@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        pytest.param({"strategy": "pipe-sdg"}, ValueError, "pipe-sdg", id="strategy"),
        pytest.param({"named": False}, ValueError, "named_parameters", id="names"),
        pytest.param(
            {"plan": "a.json", "model": layers(a=(5, 4), c=(3, 3))},
            ValueError,
            "b.bias",
            id="plan of another model",
        ),
        pytest.param({"plan": "missing.json"}, OSError, "missing.json", id="no plan file"),
    ],
)
def test_a_mistake_on_one_rank_is_told_to_all(
    arguments: dict[str, Any], kind: type[Exception], says: str, tmp_path: Path
) -> None:
    usual = {"plan": "a.json"} if "plan" in arguments else {}
    odd = hvd.rank() == ODD
    with pytest.raises(kind if odd else HvdPipeError) as caught:
        build(tmp_path, **(arguments if odd else usual))
    assert says in str(caught.value)
    assert odd or f"rank {ODD}" in str(caught.value)


def test_training_works_afterwards() -> None:
    """A job that has caught such an error can still train."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](model), model.named_parameters())
    weights = train(model, optimizer, hvd.rank(), drains={STEPS - 1})
    expected = Cell("merged-gradient", "momentum").expected(RANKS)[hvd.rank()]
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)
