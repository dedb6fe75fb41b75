"""Jobs that write timelines."""

from __future__ import annotations

import copy
import os
import pickle
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import Raised, run_cases
from torch import nn

import hvd_pipe.torch as hvd
from hvd_pipe.runtime.timeline import DIRECTORY, MEGABYTES, OFF
from hvd_pipe.torch.measuring import timeline

WIDTH = 256
STEPS = 12
BEGUN = 6  # overlap=forward defers updates by then
PAUSE_S = 0.05

CASES = {
    "merged-gradient": ("merged-gradient", "none"),
    "pipe-sgd": ("pipe-sgd", "none"),
    "cocod": ("cocod:period=3", "none"),
    "bf16": ("merged-gradient", "bf16"),
    "int8": ("pipe-sgd", "int8"),
    "fp16": ("merged-gradient:plan=wfbp", "fp16"),
}


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, pause_s: float = 0.0
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        time.sleep(pause_s)
        model(torch.randn(64, WIDTH)).square().mean().backward()
        optimizer.step()


def wrap(model: nn.Module, strategy: str, compression: str = "none") -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        model.named_parameters(),
        compression=getattr(hvd.Compression, compression),
        strategy=strategy,
    )


def _begin(**environment: str) -> None:
    """Be as a new process with this environment; what was written is on the disk."""
    timeline.active.close()
    timeline.active = OFF
    for name in (DIRECTORY, MEGABYTES):
        os.environ.pop(name, None)
    os.environ.update(environment)


def _train(strategy: str, compression: str) -> None:
    model = make_model()
    optimizer = wrap(model, strategy, compression)
    train(model, optimizer)
    optimizer.synchronize()


def written(directory: Path) -> None:
    """Train in every way, each with a directory of its own."""
    hvd.init()
    for case, (strategy, compression) in CASES.items():
        _begin(HVD_PIPE_TIMELINE=str(directory / "made" / case))
        _train(strategy, compression)
    _overlap(directory / "made" / "overlap")
    _begin(HVD_PIPE_TIMELINE=str(directory / "small"), HVD_PIPE_TIMELINE_MB="0.01")
    _train("pipe-sgd", "none")
    _begin()


def _overlap(directory: Path) -> None:
    """Let rank 0 wait for rank 1, whose forward passes begin late."""
    _begin(HVD_PIPE_TIMELINE=str(directory))
    model = make_model()
    optimizer = wrap(model, "merged-gradient:plan=wfbp,overlap=forward")
    train(model, optimizer, pause_s=PAUSE_S * hvd.rank())
    optimizer.synchronize()


def untraced() -> None:
    hvd.init()
    _train("pipe-sgd", "int8")
    assert timeline.active is OFF


class _Fails(nn.Module):
    """Raises in its forward or backward pass when told to."""

    where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            raise RuntimeError(self.where)
        if self.where == "backward":
            x.register_hook(self._raise)
        return x

    def _raise(self, _: torch.Tensor) -> None:
        raise RuntimeError(self.where)


def troubled() -> None:
    """Do what jobs do beside training in a loop; each of 5 trainings is of ``STEPS`` steps."""
    hvd.init()
    model = nn.Sequential(make_model(), _Fails())
    optimizer = wrap(model, "merged-gradient")
    train(model, optimizer)
    for where in ("forward", "backward"):
        model[1].where = where
        with pytest.raises(RuntimeError, match=where):
            train(model, optimizer, steps=1)
        model[1].where = ""
    train(model, optimizer)
    # A model that was traced is copied and pickled as any other.
    model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer)
    # Made anew; two at once; evaluation.
    optimizer = wrap(model, "pipe-sgd")
    other = copy.deepcopy(model)
    train(model, optimizer)
    train(other, wrap(other, "cocod:period=2"))
    with torch.no_grad():
        model(torch.randn(4, WIDTH))


def other_models() -> None:
    """A scripted model; then LBFGS; each of ``STEPS`` steps."""
    hvd.init()
    model = torch.jit.script(make_model())
    train(model, wrap(model, "merged-gradient"))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), max_iter=2), model.named_parameters()
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, WIDTH)).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)


def outside() -> None:
    """Rank 1 is outside of the first optimizer's process set."""
    hvd.init()
    first = hvd.add_process_set([0])
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, hvd.DistributedOptimizer(optimizer, process_set=first))
    model = make_model()
    train(model, wrap(model, "merged-gradient"))


def refused() -> dict[str, Raised | None]:
    hvd.init()
    first, directory = hvd.rank() == 0, os.environ[DIRECTORY]
    environments = {
        "one rank alone": {DIRECTORY: directory} if first else {},
        "unwritable": {DIRECTORY: directory if first else "/dev/null/traces"},
        "wrong limit": {DIRECTORY: directory, MEGABYTES: "64MB"},
    }

    def case(environment: dict[str, str]) -> None:
        _begin(**environment)
        wrap(make_model(), "pipe-sgd")

    return run_cases({name: partial(case, found) for name, found in environments.items()})
