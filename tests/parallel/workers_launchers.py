"""What the ranks of test_harness.py do where they have a framework, and so are forked."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import horovod.torch as hvd
import numpy as np
import torch
import workers_harness


def sum_of_ranks() -> tuple[int, float]:
    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, name="total")
    return hvd.size(), float(total)


class State(NamedTuple):
    """What a rank could have of another one."""

    threads: int
    started: bool
    left: object
    variable: str | None
    folder: str
    hash: int
    random: float
    arguments: list[str]


def state() -> State:
    """Return what a rank finds, and leave traces of it."""
    found = State(
        threads=threading.active_count(),
        started=hvd.is_initialized(),
        left=vars(torch).get("left"),
        variable=os.environ.get("LEFT_BY_A_RANK"),
        folder=str(Path.cwd()),
        hash=hash("a word"),
        random=float(np.random.random()),  # noqa: NPY002 - the state that all share
        arguments=sys.argv,
    )
    hvd.init()
    vars(torch)["left"] = found
    os.environ["LEFT_BY_A_RANK"] = "yes"
    os.chdir(tempfile.gettempdir())
    return found


def die_on_rank_1(number: int) -> None:
    """Have rank 1 end by a signal, or with an exit status."""
    if workers_harness.rank() == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), number)
    signal.pause()


def hang_on_rank_1(directory: str, deaf: bool) -> int:
    return workers_harness.hang_on_rank_1(directory, deaf)
