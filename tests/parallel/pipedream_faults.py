"""Ranks that train by PipeDream until something happens to one of them.

``python pipedream_faults.py FOLDER MODE [WRONG]``; WRONG is ``loss`` or ``loader``.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import Any

import torch
from pipeline_problem import Batch, plan, squared
from publish import end_late_over_gloo, publish
from torch_pipelines import Case, make_engine

import hvd_pipe.torch as hvd
from hvd_pipe.torch import pipedream

WRONG_EPOCH = 3  # in which something goes wrong


class Loader:
    """Minibatches of which one cannot be read."""

    def __init__(self, batches: list[Batch], bad: bool) -> None:
        self._batches, self._bad = batches, bad

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Any:
        for number, batch in enumerate(self._batches):
            if self._bad and number == 2:
                raise ValueError("bad sample 17")
            yield batch


def main(folder: Path, mode: str, wrong: str = "") -> None:
    """Train for ever, with the last stage or the loader of rank 0 failing in one epoch."""
    faulthandler.dump_traceback_later(120, exit=True)
    torch.set_num_threads(1)
    if wrong:
        end_late_over_gloo()
    pipedream.init()
    number = 0

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if wrong == "loss" and number == WRONG_EPOCH:
            raise ValueError("bad sample 17")
        return squared(output, target)

    case = Case(plan("1-1-1"), mode, microbatches=3)
    rank = hvd.rank()
    publish(folder / f"pid.{rank}", str(os.getpid()))
    engine = make_engine(case, loss_fn=loss_fn)
    while True:
        bad = wrong == "loader" and rank == 0 and number == WRONG_EPOCH
        engine.train_epoch(Loader(case.data(0), bad))
        publish(folder / f"step.{rank}", str(number))
        number += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
