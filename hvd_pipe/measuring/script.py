"""Run a training script in this process, and measure its steps: what `hvd-pipe check` starts.

    python -m hvd_pipe.measuring.script FOLDER train.py ARGUMENTS...

The script is not changed: PyTorch calls hooks before and after each step of any optimizer. The
folder gets `FACTS` and a profile (`PROFILE`), and then this process ends. An exception that ends
the script is in `FAILURE`.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from tqdm import tqdm  # type: ignore[import-untyped]

from hvd_pipe.measuring import step_times
from hvd_pipe.measuring.facts import FACTS, FAILURE, PROFILE, Facts
from hvd_pipe.measuring.step_times import STEPS, JobProfile, JobTimes
from hvd_pipe.runtime.gradient_index import SKIP_STEPS

T = TypeVar("T")

_SHARDING = ("FullyShardedDataParallel", "ZeroRedundancyOptimizer")
_PATIENCE = 30  # steps in which no gradient was seen


class Watch:
    """Measures the steps of the first optimizer that makes one, and of those between its steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._depth = 0
        self._optimizers: list[Optimizer] = []
        self._parameters: list[torch.Tensor] = []
        self._profile: JobProfile | None = None
        self._ended_s: list[float] = []
        self._sharded = ""
        self._caveats: set[str] = set()
        self._bar: Any = None
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def note(self) -> None:
        """Write down what is known of the script so far."""
        if self._optimizers:
            self._facts().save(self._folder / FACTS)

    def _before_step(self, *_: object) -> None:
        self._depth += 1

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        self._depth -= 1
        if self._depth > 0:  # within the step of another, or of Horovod's class around it
            return
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        if any(optimizer is known for known in self._optimizers):
            if optimizer is self._optimizers[0]:
                self._end_step()
        elif self._profile is not None:
            name = type(optimizer).__name__
            self._caveats.add(f"{name} is not measured, as its first step came later")
        elif parameters:
            self._add(optimizer, parameters)

    def _add(self, optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
        """Take in an optimizer that makes its first step."""
        self._optimizers.append(optimizer)
        known = {id(parameter) for parameter in self._parameters}
        self._parameters += [p for p in parameters if id(p) not in known]
        if any(p.grad is not None and p.grad.is_sparse for p in self._parameters):
            self._caveats.add("sparse gradients count as dense ones")
        if len(self._optimizers) == 1:
            self._ended_s.append(time.monotonic())
            self._sharded = _sharded_by(self._parameters)
            self.note()
            if self._sharded:
                _leave()
        if isinstance(optimizer, torch.optim.LBFGS):
            sys.exit("LBFGS computes gradients within its steps: no strategy can send them early.")

    def _end_step(self) -> None:
        """End a step of the first optimizer."""
        self._ended_s.append(time.monotonic())
        if step_times.is_profiling():  # as hvd_pipe's optimizer does by itself
            self.note()
            if (self._folder / PROFILE).exists():
                _leave()
        elif self._profile is None:
            times = JobTimes(self._optimizers[0], self._parameters, alone=True)
            times.end_step()
            names, sizes = _names(self._parameters), [p.nbytes for p in self._parameters]
            self._profile = JobProfile(os.fspath(self._folder / PROFILE), times, names, sizes)
            self._bar = tqdm(total=STEPS, desc="steps", leave=False, disable=None)
        else:
            self._bar.update()
            self.note()
            if not self._profile.end_step():
                self._bar.close()
                _leave()
            if len(self._ended_s) > _PATIENCE and not self._profile.times.steps:
                sys.exit(
                    "No gradient of the parameters that are updated was seen. The script may "
                    "update copies of its weights, or replay CUDA graphs: measure its model."
                )

    def _facts(self) -> Facts:
        weights = sum(p.nbytes for p in self._parameters)
        state = {
            id(tensor): tensor.nbytes
            for optimizer in self._optimizers
            for value in optimizer.state.values()
            for tensor in (value.values() if isinstance(value, dict) else [value])
            if isinstance(tensor, torch.Tensor)
        }
        ends = self._ended_s[1 + SKIP_STEPS :]
        seconds = [after - before for before, after in pairwise(ends)]
        device = self._parameters[0].device.type
        return Facts(
            " and ".join(dict.fromkeys(type(one).__name__ for one in self._optimizers)),
            round(sum(state.values()) / weights, 2),
            device,
            len(self._ended_s),
            # On a GPU, the host's clock says when work was launched.
            (min(seconds), max(seconds)) if seconds and device == "cpu" else None,
            self._sharded,
            "; ".join(sorted(self._caveats)),
        )


def _sharded_by(parameters: Iterable[torch.Tensor]) -> str:
    """Return what divides parameters or state over ranks; in a job of one, nothing is yet."""
    if any(type(parameter).__name__ == "DTensor" for parameter in parameters):
        return "FSDP or tensor parallelism"
    kinds = {type(one).__name__ for kind in (Optimizer, torch.nn.Module) for one in _all_of(kind)}
    return next((name for name in _SHARDING if name in kinds), "")


def _names(parameters: Iterable[torch.Tensor]) -> list[str]:
    """Return the names of parameters, in the largest module that has them."""
    known: dict[int, str] = {}
    # DDP has the parameters of the model in it, of which the job's plans speak.
    ddp = torch.nn.parallel.DistributedDataParallel
    modules = [module for module in _all_of(torch.nn.Module) if not isinstance(module, ddp)]
    for module in sorted(modules, key=lambda module: -sum(1 for _ in module.parameters())):
        for name, parameter in module.named_parameters():
            known.setdefault(id(parameter), name)
    names: dict[str, None] = {}
    for index, trained in enumerate(parameters):
        name = known.get(id(trained), "")
        # Two models may use a name twice.
        names[f"parameter {index}" if not name or name in names else name] = None
    return list(names)


def _all_of(kind: type[T]) -> Iterator[T]:
    """Yield all objects of a class that are set up."""
    ready = "param_groups" if issubclass(kind, Optimizer) else "_parameters"
    gc.unfreeze()
    for one in gc.get_objects():
        if issubclass(type(one), kind) and ready in vars(one):
            yield one


def _leave() -> NoReturn:
    """End this process at once: nothing that the script does at its end is wanted."""
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Run the script as ``python train.py`` does."""
    folder, script, *arguments = sys.argv[1:]
    atexit.register(Watch(Path(folder)).note)
    path = Path(script).resolve()
    sys.argv = [script, *arguments]
    sys.path[0] = os.fspath(path.parent)
    try:
        runpy.run_path(os.fspath(path), run_name="__main__")
    except Exception as error:  # the first frames are those of this file and of runpy
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != os.fspath(path):
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames))
        (Path(folder) / FAILURE).write_text(f"{type(error).__name__}: {error}".splitlines()[0])
        sys.exit(1)


if __name__ == "__main__":
    main()
