"""An elastic job, as users write it: ``python workers_elastic.py DIRECTORY``; see `Scenario`.

Several models train side by side, each with an optimizer of its own and a gradient that a test can
compute without any of this: of ``|w - target(rank, step)|^2 / 2``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import horovod.torch as stock
import numpy as np
import numpy.typing as npt
import torch
from horovod.common.exceptions import HorovodInternalError
from publish import publish
from torch import nn

import hvd_pipe.torch as hvd

LR = 2.0**-6  # so small that what one gradient does is there to be seen at the end
NUMEL = 600
FEEDBACK = hvd.Int8(chunk=64, error_feedback=True)
PATIENCE_S = 60.0
DEADLINE_S = 200.0

Weights = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Method:
    """What one of the optimizers is given."""

    strategy: str
    compression: Any = hvd.Compression.none

    @property
    def exact(self) -> bool:
        """Whether nothing rounds."""
        return self.compression is hvd.Compression.none


METHODS = {
    "merged-gradient": Method("merged-gradient"),
    "merged-gradient, bf16": Method("merged-gradient", hvd.BF16(error_feedback=True)),
    "merged-gradient, forward": Method("merged-gradient:plan=wfbp,overlap=forward"),
    "pipe-sgd": Method("pipe-sgd"),
    "pipe-sgd, int8": Method("pipe-sgd", FEEDBACK),
    "pipe-sgd, local": Method("pipe-sgd:prediction=local"),
    "cocod": Method("cocod:period=3"),
    "cocod, int8": Method("cocod:period=3", FEEDBACK),
    "cocod, fragments": Method("cocod:period=4,fragments=2"),
    "cocod, outer": Method("cocod:period=4,fragments=2,outer=nesterov"),
    "cocod, within": Method("cocod:period=3,within=node"),
    "auto": Method("auto:allow=pipe-sgd,steps=4"),
}


@dataclass(frozen=True)
class Scenario:
    """What happens in a job.

    Args:
        steps: How long it trains.
        commit_every: Steps between two commits.
        hosts: What the discovery script says at first.
        later: What it says from ``at`` on, where that is not empty.
        at: The step at which something happens, once.
        what: "hosts": ``later`` comes to hold, and a commit follows. "kill": the last rank is
            killed with its gradients on the way. "raise": a collective fails on the last rank.
        stock: Whether the script takes the class of its optimizers from here, and nothing else.
    """

    steps: int
    commit_every: int
    hosts: str
    at: int
    what: str
    later: str = ""
    stock: bool = False

    def write(self, directory: Path) -> None:
        """Write what the job needs to start."""
        (directory / "scenario.json").write_text(json.dumps(asdict(self)))
        (directory / "hosts").write_text(self.hosts)

    @classmethod
    def read(cls, directory: Path) -> Scenario:
        return cls(**json.loads((directory / "scenario.json").read_text()))


def target(rank: int, step: int) -> Weights:
    """Where a rank's gradient leads; unlike on each rank, and moving."""
    return np.cos(np.arange(NUMEL) * 0.01 + rank * 0.7 + step * 0.05)


class Model(nn.Module):
    """Two parameters that start as zeros, and a buffer that each rank fills with its number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(NUMEL - 7, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(7, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, rank: int, step: int) -> torch.Tensor:
        self.seen.fill_(float(rank))
        w = torch.cat([self.w, self.b])
        return 0.5 * ((w - torch.from_numpy(target(rank, step))) ** 2).sum()


def weights_of(model: Model) -> Weights:
    return torch.cat([model.w, model.b]).detach().numpy().copy()


def counted(state: Any) -> Callable[[], int]:
    """Count the calls of ``state.sync()``, which Horovod leaves out where hosts have only gone."""
    sync, calls = state.sync, list[None]()

    def counting() -> None:
        calls.append(None)
        sync()

    object.__setattr__(state, "sync", counting)
    return lambda: len(calls)


def happen(scenario: Scenario, directory: Path, state: Any) -> None:
    """Let it happen, before ``step()``; once in the job."""
    done = directory / "happened"
    if state.step != scenario.at or done.exists():
        return
    last = hvd.rank() == hvd.size() - 1
    if scenario.what == "hosts" and hvd.rank() == 0:
        publish(directory / "hosts", scenario.later)
        deadline = time.monotonic() + PATIENCE_S
        while state._host_messages.empty() and time.monotonic() < deadline:
            time.sleep(0.05)
        done.touch()
    elif scenario.what != "hosts" and last:
        done.touch()
        (directory / "moment").write_text(str(time.time()))
        if scenario.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise HorovodInternalError("as if a connection had broken")


def main(directory: Path) -> None:
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)
    torch.set_num_threads(1)
    scenario = Scenario.read(directory)
    horovod: Any = stock if scenario.stock else hvd
    horovod.init(process_sets="dynamic")
    models = {name: Model() for name in METHODS}
    optimizers = {
        name: hvd.DistributedOptimizer(
            torch.optim.SGD(models[name].parameters(), lr=LR),
            models[name].named_parameters(),
            compression=method.compression,
            strategy=method.strategy,
        )
        for name, method in METHODS.items()
    }
    states = {f"model {name}": model for name, model in models.items()}
    states |= {f"optimizer {name}": optimizer for name, optimizer in optimizers.items()}
    state = horovod.elastic.TorchState(step=0, starts=[], chosen=[], **states)

    syncs, synced, was = counted(state), list[int](), hvd.rank()

    @horovod.elastic.run
    def train(state: Any) -> None:
        if hvd.rank() == 0 and (directory / "moment").exists():
            (directory / "again").write_text(str(time.time()))
        state.starts = [*state.starts, (state.step, hvd.size())]
        synced.append(syncs())
        while state.step < scenario.steps:
            engine = optimizers["auto"]._hvd_pipe  # none where step() makes it, which measures
            state.chosen = [*state.chosen, engine.name if engine else "merged-gradient"]
            for name, optimizer in optimizers.items():
                optimizer.zero_grad()
                models[name](hvd.rank(), state.step).backward()
            happen(scenario, directory, state)
            for optimizer in optimizers.values():
                optimizer.step()
            state.step += 1
            if state.step % scenario.commit_every == 0 or state.step == scenario.at + 1:
                state.commit()

    train(state)
    for optimizer in optimizers.values():
        optimizer.synchronize()
    result: dict[str, Any] = {
        "size": hvd.size(),
        "starts": state.starts,
        "chosen": state.chosen,
        "synced": synced,
        "was": was,
    }
    if (directory / "moment").exists():
        moment, again = (float((directory / each).read_text()) for each in ("moment", "again"))
        result["recovered_s"] = again - moment
    result["weights"] = {name: weights_of(model).tolist() for name, model in models.items()}
    publish(directory / f"result.{hvd.rank()}", json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
