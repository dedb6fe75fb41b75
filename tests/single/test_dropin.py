"""``import hvd_pipe.torch as hvd`` for ``import horovod.torch as hvd``: nothing is missing."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import horovod.torch as stock
import pytest
import torch

import hvd_pipe.torch as hvd

pytestmark = pytest.mark.slow

PUBLIC = [name for name in dir(stock) if not name.startswith("_")]
CALLABLE = [name for name in PUBLIC if callable(getattr(stock, name))]
OURS = "DistributedOptimizer"


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there(name: str) -> None:
    assert hasattr(hvd, name)
    assert name in hvd.__all__


@pytest.mark.parametrize("name", [name for name in CALLABLE if name != OURS])
def test_every_signature_is_the_same(name: str) -> None:
    assert _parameters(getattr(hvd, name)) == _parameters(getattr(stock, name))


def test_distributed_optimizer_adds_only_keywords() -> None:
    *ours, strategy, carrier = _parameters(hvd.DistributedOptimizer)
    assert ours == _parameters(stock.DistributedOptimizer)
    assert strategy == ("strategy", inspect.Parameter.KEYWORD_ONLY, None)
    assert carrier == ("carrier", inspect.Parameter.KEYWORD_ONLY, None)


@pytest.mark.parametrize("module", ["hvd_pipe", "hvd_pipe.strategy", "hvd_pipe.planning.merge"])
def test_no_framework_comes_with(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout
    loaded = {name.partition(".")[0] for name in output.split()}
    assert "hvd_pipe" in loaded
    assert not loaded & {"torch", "tensorflow", "keras", "horovod", "mpi4py"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes")
@pytest.mark.parametrize("of_the_user", [None, "0"])
def test_open_mpi_lets_others_compute_while_it_waits(of_the_user: str | None) -> None:
    name = "OMPI_MCA_mpi_yield_when_idle"
    environment = {key: value for key, value in os.environ.items() if key != name}
    if of_the_user is not None:
        environment[name] = of_the_user
    code = f"import os, hvd_pipe.torch as hvd; hvd.init(); print(os.environ[{name!r}])"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout
    assert output.split() == [of_the_user or "1"]


def _parameters(function: object) -> list[tuple[str, object, object]]:
    """Name, kind and default of each; annotations may be added to Horovod's, which has none."""
    assert callable(function)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a class from C has none
        return []
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]
