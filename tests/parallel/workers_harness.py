"""What the ranks of test_harness.py do."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import horovod.torch as hvd
import numpy as np
import torch
from publish import publish


def rank() -> int:
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


def ten_times_rank(addend: int) -> int:
    # Later ranks first, so that the order of results is not the order of arrival.
    time.sleep(0.2 * (2 - rank()))
    return 10 * rank() + addend


def fail_on_rank_1() -> int:
    if rank() == 1:
        raise ZeroDivisionError("only here")
    return rank()


def die_on_rank_1(number: int) -> None:
    """Have rank 1 end by a signal."""
    if rank() == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), number)
    signal.pause()


def hang_on_rank_1(directory: str, deaf: bool) -> int:
    """Leave the pids of all ranks behind, then hang; a deaf rank has lost its own deadline."""
    publish(Path(directory) / f"rank{rank()}", str(os.getpid()))
    if deaf:
        faulthandler.cancel_dump_traceback_later()
    if rank() == 1:
        time.sleep(600)
    return rank()


def variable(name: str) -> str | None:
    return os.environ.get(name)


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
    """Return the state of this rank's interpreter, and leave traces in it."""
    now = State(
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
    vars(torch)["left"] = now
    os.environ["LEFT_BY_A_RANK"] = "yes"
    os.chdir(tempfile.gettempdir())
    return now
